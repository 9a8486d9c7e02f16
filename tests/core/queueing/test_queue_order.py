"""The order of service: within a client, between clients and between classes, without starvation."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamasup.core.http.heads import Priority
from llamasup.core.queueing.queue_order import (
    LOOKAHEAD,
    MAX_LEAD,
    MAX_PASSED,
    MAX_REMEMBERED,
    PASSES,
    FairQueue,
    Queued,
    granted,
)
from tests.kit.extent import examples

HIGH, NORMAL, LOW, BATCH = Priority
TAKING_TURNS = (HIGH, NORMAL, LOW)


class Request(Queued):
    __slots__ = ("name",)

    def __init__(self, name: str, arrived_s: float, client: str, priority: Priority) -> None:
        super().__init__(arrived_s, client, priority)
        self.name = name

    def __repr__(self) -> str:
        return self.name


class Desk:
    """A queue, and requests that come to it one after the other."""

    def __init__(self) -> None:
        self.queue: FairQueue[Request] = FairQueue()
        self._times = count(1)

    def comes(self, name: str, priority: Priority = NORMAL) -> Request:
        """``a1`` is of client ``a``."""
        request = Request(name, float(next(self._times)), name[0], priority)
        self.queue.add(request)
        return request

    def come(self, names: str) -> None:
        for name in names.split():
            self.comes(name)

    def all(self) -> str:
        return " ".join(self.queue.pop().name for _ in range(len(self.queue)))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_one_client_is_served_in_order_of_arrival(desk: Desk) -> None:
    desk.come("a1 a2 a3")
    assert desk.all() == "a1 a2 a3"


def test_busy_client_does_not_delay_an_occasional_one(desk: Desk) -> None:
    desk.come("a1 a2 a3 a4 b1 c1 c2")
    assert desk.all() == "a1 b1 c1 a2 c2 a3 a4"


def test_returning_client_gets_the_last_turn(desk: Desk) -> None:
    desk.come("a1 b1 b2")
    assert desk.queue.pop().name == "a1"
    desk.comes("a2")
    assert desk.all() == "b1 a2 b2"


def test_classes_are_served_in_order_of_priority(desk: Desk) -> None:
    desk.comes("a1", LOW)
    desk.comes("b1", NORMAL)
    desk.comes("c1", HIGH)
    desk.comes("a2", HIGH)
    assert desk.all() == "c1 a2 b1 a1"


def test_class_passed_over_often_enough_gets_one_turn(desk: Desk) -> None:
    desk.comes("a1", LOW)
    desk.comes("a2", LOW)
    for number in range(2 * PASSES):
        desk.comes(f"b{number}")
    order = desk.all().split()
    assert (order.index("a1"), order.index("a2")) == (PASSES, 2 * PASSES + 1)


def test_passed_over_count_is_reset_when_the_class_is_empty(desk: Desk) -> None:
    gone = desk.comes("a1", LOW)
    for number in range(PASSES):
        desk.comes(f"b{number}")
        desk.queue.pop()
    desk.queue.remove(gone)
    desk.comes("a2", LOW)
    desk.comes("b9")
    assert desk.all() == "b9 a2"


@pytest.mark.parametrize(
    ("waiting", "newcomer", "evicted"),
    [
        ("a1 a2 b1", "c1", "a2"),  # the last one of the client with the most
        ("a1 a2 a3 b1", "b2", "a3"),
        ("a1 a2 b1", "b2", None),  # a would have fewer than b
        ("a1 a2 b1", "a3", None),
        ("a1 b1 c1", "d1", None),  # each has one
        ("", "a1", None),
        ("a1 a2:low a3", "b1", "a2"),  # the least important one first
        ("a1:high a2:high a3:high b1 b2", "c1", "b2"),  # none that is more important
        ("a1:high a2:high", "b1", None),
        ("a1:high a2 b1 b2", "c1:high", "b2"),  # the later of two
    ],
)
def test_full_queue_evicts_the_last_item_of_the_client_with_the_most(
    desk: Desk, waiting: str, newcomer: str, evicted: str | None
) -> None:
    def item(text: str) -> Request:
        name, _, priority = text.partition(":")
        return Request(name, 100.0, name[0], Priority[priority.upper()] if priority else NORMAL)

    for text in waiting.split():
        made = item(text)
        desk.comes(made.name, made.priority)
    found = desk.queue.to_evict(item(newcomer))
    assert (None if found is None else found.name) == evicted


def test_full_queue_evicts_no_requeued_item(desk: Desk) -> None:
    desk.come("a1 a2 a3")
    first, second, third = (desk.queue.pop() for _ in range(3))
    for item in (first, second, third):
        desk.queue.add(item)
    assert desk.queue.to_evict(Request("b1", 100.0, "b", NORMAL)) is None


def test_requeued_item_has_its_old_position_and_turn(desk: Desk) -> None:
    desk.come("a1 a2 b1 b2 c1")
    first, second = desk.queue.pop(), desk.queue.pop()
    assert (first.name, second.name) == ("a1", "b1")
    desk.queue.add(second)  # in whatever order they come back
    desk.queue.add(first)
    assert desk.all() == "a1 b1 c1 a2 b2"


def test_requeued_last_item_of_a_client_goes_first(desk: Desk) -> None:
    only = desk.comes("a1")
    desk.comes("b1")
    assert desk.queue.pop() is only
    desk.queue.add(only)
    assert desk.all() == "a1 b1"


def test_requeued_items_that_never_waited_go_first_in_order(desk: Desk) -> None:
    desk.comes("d1")
    for name in ("a1", "b1", "c1"):
        desk.queue.remove(desk.comes(name))
    for name, arrived_s in (("c", 0.3), ("a", 0.1), ("b", 0.2)):
        broken_off = Request(f"{name}0", arrived_s, name, NORMAL)
        broken_off.turn = 0
        desk.queue.add(broken_off)
    assert desk.all() == "a0 b0 c0 d1"


def test_removed_item_does_not_change_the_order_of_others(desk: Desk) -> None:
    waiting = [desk.comes(name) for name in ("a1", "a2", "b1", "c1")]
    desk.queue.remove(waiting[0])
    desk.queue.remove(waiting[3])
    assert (len(desk.queue), sorted(each.name for each in desk.queue)) == (2, ["a2", "b1"])
    assert desk.all() == "a2 b1"


# --- requests that suit the free server


def test_request_that_suits_the_server_goes_first(desk: Desk) -> None:
    desk.come("a1 a2 b1 c1")
    assert desk.queue.pop(suits=lambda request: request.name in ("a2", "c1")).name == "c1"
    assert desk.queue.pop(suits=lambda request: request.name == "a2").name == "a2"
    assert desk.all() == "b1 a1"  # client a has had a turn
    desk.come("a1 b1 a2 a3")
    assert desk.queue.pop(suits=lambda request: request.name == "a3").name == "a3"


def test_first_request_goes_if_none_of_the_next_ones_suits(desk: Desk) -> None:
    for number in range(LOOKAHEAD + 1):
        desk.comes(f"a{number}")
    assert desk.queue.pop(suits=lambda request: request.name == f"a{LOOKAHEAD}").name == "a0"
    assert desk.queue.pop(suits=lambda request: request.name == f"a{LOOKAHEAD}").name == f"a{LOOKAHEAD}"


def test_request_is_passed_over_a_few_times_only(desk: Desk) -> None:
    desk.comes("a1")
    order = []
    for number in range(MAX_PASSED + 1):
        desk.comes(f"b{number}")
        order.append(desk.queue.pop(suits=lambda request: request.client == "b").name)
    assert order == [*(f"b{number}" for number in range(MAX_PASSED)), "a1"]


def test_request_that_comes_back_is_not_passed_over(desk: Desk) -> None:
    first = desk.comes("a1")
    desk.come("b1 c1")
    assert desk.queue.pop() is first
    desk.queue.add(first)
    assert desk.queue.pop(suits=lambda request: request.client == "c") is first


def test_request_of_a_client_that_got_more_does_not_go_first(desk: Desk) -> None:
    desk.comes("a1")
    for number in range(2 * MAX_LEAD):
        desk.comes(f"b{number}")
    for number in range(MAX_LEAD):
        assert desk.queue.pop(suits=lambda request: request.client == "b").name == f"b{number}"
    desk.queue.remove(next(each for each in desk.queue if each.client == "a"))
    desk.comes("a2")  # it has not been passed over, but its client has
    order = [desk.queue.pop(suits=lambda request: request.client == "b").name for _ in range(2)]
    assert order == [f"b{MAX_LEAD}", "a2"]  # in turn


def test_request_that_may_not_be_passed_over_ends_the_search(desk: Desk) -> None:
    desk.comes("a1")
    back = desk.comes("b1")
    for _ in range(MAX_LEAD):
        desk.queue.remove(back)
        back.turn = None
        desk.queue.add(back)
        assert desk.queue.pop(suits=lambda request: request.client == "b") is back
        desk.queue.add(back)
    desk.comes("c1")
    assert desk.queue.pop(suits=lambda request: request.client == "c").name == "a1"


@settings(max_examples=examples(20))
@given(st.integers(0, 1 << 32), st.sampled_from(["ab", "abcd"]), st.integers(1, 4), st.sampled_from([1, 4]))
def test_clients_have_equal_shares_whatever_suits_the_servers(
    seed: int, clients: str, waiting: int, servers_of_a: int
) -> None:
    """Each request has its cache on one of four servers. With ``waiting`` 1, each client leaves the queue
    before its next request comes.
    """
    random = Random(seed)
    desk = Desk()
    homes: dict[Request, int] = {}
    served = Counter(dict.fromkeys(clients, 0))

    def comes(client: str) -> None:
        homes[desk.comes(client)] = random.randrange(servers_of_a if client == "a" else 4)

    for client in clients * waiting:
        comes(client)
    for _ in range(1000):
        free = random.randrange(4)
        request = desk.queue.pop(suits=lambda request, free=free: homes[request] == free)  # type: ignore[misc]
        assert request.passed <= 2 * MAX_PASSED
        served[request.client] += 1
        comes(request.client)
        assert max(served.values()) - min(served.values()) <= 2 * MAX_LEAD


@pytest.mark.parametrize("clients", ["a", "ab", "abc", "abcdefgh"])
def test_most_requests_go_where_they_suit_with_any_number_of_clients(clients: str) -> None:
    random = Random(1)
    desk = Desk()
    homes = {desk.comes(client): random.randrange(4) for client in clients * 8}
    suited = 0
    for _ in range(2000):
        free = random.randrange(4)
        request = desk.queue.pop(suits=lambda request, free=free: homes[request] == free)  # type: ignore[misc]
        suited += homes.pop(request) == free
        homes[desk.comes(request.client)] = random.randrange(4)
    assert suited > 1000  # 500 by chance


@pytest.mark.parametrize("jobs", [2, 4])
def test_clients_with_larger_requests_get_no_more_permits_whatever_suits(desk: Desk, jobs: int) -> None:
    random = Random(1)
    permits = Counter(a=0, b=0)
    for _ in range(8):
        desk.comes("a")
        heavy(desk, "b", jobs)
    for _ in range(2000):
        request = desk.queue.pop(4, lambda request: random.random() < 0.5)
        permits[request.client] += request.jobs
        heavy(desk, request.client, request.jobs)
    assert abs(permits["a"] - permits["b"]) <= 4 * jobs


def test_what_clients_got_is_forgotten_in_time(desk: Desk) -> None:
    for number in range(MAX_REMEMBERED + 2):
        request = Request(str(number), float(number), str(number), NORMAL)
        desk.queue.add(request)
        assert desk.queue.pop() is request
    assert len(desk.queue._permits) == MAX_REMEMBERED


def heavy(desk: Desk, name: str, jobs: int) -> Request:
    request = desk.comes(name)
    request.jobs = jobs
    return request


def test_a_request_of_several_jobs_uses_as_many_turns(desk: Desk) -> None:
    heavy(desk, "a1", 3)
    heavy(desk, "a2", 3)
    desk.come("b1 b2 b3 b4 c1 c2 c3 c4")
    order = " ".join(desk.queue.pop(8).name for _ in range(len(desk.queue)))
    assert order == "a1 b1 c1 b2 c2 b3 c3 a2 b4 c4"


def test_request_uses_at_most_as_many_turns_as_permits(desk: Desk) -> None:
    heavy(desk, "a1", 3000)
    desk.come("a2 b1 b2 b3")
    assert " ".join(desk.queue.pop(2).name for _ in range(len(desk.queue))) == "a1 b1 b2 a2 b3"


def test_used_turns_count_when_a_client_returns(desk: Desk) -> None:
    heavy(desk, "a1", 3)
    desk.come("b1 b2 b3 b4")
    assert desk.queue.pop(4).name == "a1"
    heavy(desk, "a2", 3)
    assert [desk.queue.pop(4).name for _ in range(4)] == ["b1", "b2", "b3", "a2"]
    desk.comes("c1")
    desk.queue.remove(desk.comes("a3"))
    assert desk.queue.pop().name == "b4"
    assert desk.queue.pop().name == "c1"
    heavy(desk, "d1", 2)
    desk.comes("e1")
    desk.queue.pop(4)  # what was owed long ago is dropped
    desk.comes("a4")
    assert desk.all() == "e1 a4"


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_clients_with_larger_requests_get_no_more_permits(desk: Desk, jobs: int) -> None:
    """Both always have one request that waits. The share is that of jobs."""
    got = Counter[str]()
    heavy(desk, "a", jobs)
    desk.comes("b")
    for _ in range(400):
        item = desk.queue.pop(4)
        got[item.client] += item.jobs
        heavy(desk, item.client, item.jobs)
    assert 0.9 < got["a"] / got["b"] < 1.1, got


def test_pop_from_an_empty_queue_raises(desk: Desk) -> None:
    with pytest.raises(IndexError, match="empty queue"):
        desk.queue.pop()


@pytest.mark.parametrize(
    ("asked", "best", "gets"),
    [
        (None, NORMAL, NORMAL),
        (None, HIGH, NORMAL),
        (HIGH, HIGH, HIGH),
        (HIGH, NORMAL, NORMAL),
        (NORMAL, HIGH, NORMAL),
        (LOW, HIGH, LOW),
        (LOW, NORMAL, LOW),
        (None, LOW, LOW),
    ],
)
def test_request_gets_its_priority_up_to_the_limit(
    asked: Priority | None, best: Priority, gets: Priority
) -> None:
    assert granted(asked, best) is gets


# --- whatever comes

ARRIVALS = st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(Priority)), max_size=60)


@given(ARRIVALS)
def test_position_counts_the_items_that_go_first(
    arrivals: list[tuple[str, Priority]],
) -> None:
    desk = Desk()
    for client, _ in arrivals:
        desk.comes(client)
    told = {request: desk.queue.position(request) for request in desk.queue}
    order = [desk.queue.pop() for _ in range(len(desk.queue))]
    assert [told[request] for request in order] == list(range(1, len(order) + 1))


def test_position_counts_all_higher_classes(desk: Desk) -> None:
    desk.comes("a1", HIGH)
    desk.comes("b1", HIGH)
    desk.comes("a2")
    assert desk.queue.position(desk.comes("b2")) == 4
    assert desk.queue.position(desk.comes("c1", LOW)) == 5


# One step: somebody comes, the next is served, somebody leaves, or the last one served is put back.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("comes"), st.sampled_from("abcd"), st.sampled_from(Priority)),
        st.tuples(st.sampled_from(["serve", "serve", "leave", "put back"])),
    ),
    max_size=200,
)


@given(STEPS)
def test_requests_of_a_client_keep_their_order(
    steps: list[tuple[object, ...]],
) -> None:
    desk = Desk()
    served: list[Request] = []
    waiting: set[Request] = set()
    for step in steps:
        match step:
            case ("comes", str(client), Priority() as priority):
                waiting.add(desk.comes(client, priority))
            case ("serve",) if waiting:
                request = desk.queue.pop()
                waiting.remove(request)
                served.append(request)
                same = (each for each in waiting if (each.client, each.priority) == _line(request))
                assert all(request.arrived_s < each.arrived_s for each in same)
            case ("leave",) if waiting:
                leaves = max(waiting, key=lambda each: each.arrived_s)
                desk.queue.remove(leaves)
                waiting.remove(leaves)
            case ("put back",) if served:
                request = served.pop()
                desk.queue.add(request)
                waiting.add(request)
            case _:
                pass
        assert set(desk.queue) == waiting
        assert len(desk.queue) == len(waiting)


def _line(request: Request) -> tuple[str, Priority]:
    return request.client, request.priority


@settings(max_examples=examples(5))
@given(st.integers(0, 1 << 32), st.integers(2, 6))
def test_no_client_starves_and_turns_differ_by_one_at_most(seed: int, clients: int) -> None:
    """Clients who come at very different rates, in all classes, for 3,000 services."""
    random = Random(seed)
    desk = Desk()
    names = "abcdef"[:clients]
    rates = {(name, priority): random.choice((0.02, 0.3, 1.0)) for name in names for priority in TAKING_TURNS}
    lengths: Counter[tuple[str, Priority]] = Counter()
    since: dict[frozenset[tuple[str, Priority]], Counter[tuple[str, Priority]]] = {}
    skipped: Counter[Priority] = Counter()
    services = 0
    for _ in range(3000):
        for line, rate in rates.items():
            if random.random() < rate and lengths[line] < 20:
                desk.comes(*line)
                lengths[line] += 1
        if not len(desk.queue):
            continue
        before = {line for line, length in lengths.items() if length}
        request = desk.queue.pop()
        services += 1
        served = _line(request)
        lengths[served] -= 1
        # Every class in which somebody waits has a turn again and again.
        for priority in {line[1] for line in before}:
            skipped[priority] = 0 if priority is request.priority else skipped[priority] + 1
            assert skipped[priority] <= PASSES + 2
        for priority in set(Priority) - {line[1] for line in before}:
            skipped[priority] = 0
        # Of two clients in one class who both waited all the time, neither gets ahead by more than a turn.
        for pair in _pairs(names, request.priority):
            turns = since.setdefault(pair, Counter())
            if not pair <= before:
                turns.clear()
            elif served in pair:
                turns[served] += 1
                first, second = pair
                assert abs(turns[first] - turns[second]) <= 1
    assert services > 1000


def _pairs(names: str, priority: Priority) -> list[frozenset[tuple[str, Priority]]]:
    return [frozenset({(a, priority), (b, priority)}) for a in names for b in names if a < b]


def test_shares_of_three_busy_classes(desk: Desk) -> None:
    served: dict[Priority, int] = defaultdict(int)
    for priority in Priority:
        desk.comes("a", priority)
    for _ in range(10_000):
        request = desk.queue.pop()
        served[request.priority] += 1
        desk.comes("a", request.priority)
    assert served[HIGH] > 7500
    assert min(served[NORMAL], served[LOW]) > 10_000 / (PASSES + 3)


def test_batch_has_no_turn_while_another_class_waits() -> None:
    desk = Desk()
    desk.comes("batch", BATCH)
    for _ in range(100):
        desk.comes("low", LOW)
    served = [desk.queue.pop().priority for _ in range(101)]
    assert served == [LOW] * 100 + [BATCH]
