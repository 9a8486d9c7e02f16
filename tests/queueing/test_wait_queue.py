"""The waiting room on a clock of the test's own: who is served, in which order, and who is told what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from llamasup.http.address import UnixAddress
from llamasup.queueing.endpoint import Endpoint, Lease, Serving, Unavailable
from llamasup.queueing.retry_budget import RetryPolicy
from llamasup.queueing.wait_queue import GRACE_S, MAX_BYTES, QueueEntry, RequestQueue

LOADING = Unavailable(503, "Loading model", cause="loading", retry_after_s=1.0, queueable=True)
FAILED = Unavailable(503, "it crashed too often", cause="killed", remedy="see the log", retry_after_s=30.0)
TIMEOUT_S = 120.0


class Clock:
    """Time that moves when the test says so, and the calls that are due by then."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.timers: list[Timer] = []

    def read(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self, self.now_s + delay_s, callback)
        self.timers.append(timer)
        return timer

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while due := [timer for timer in self.timers if timer.at_s <= end_s]:
            first = min(due, key=lambda timer: timer.at_s)
            self.timers.remove(first)
            self.now_s = max(self.now_s, first.at_s)
            first.callback()
        self.now_s = end_s


class Timer:
    def __init__(self, clock: Clock, at_s: float, callback: Callable[[], None]) -> None:
        self.clock, self.at_s, self.callback = clock, at_s, callback

    def cancel(self) -> None:
        if self in self.clock.timers:
            self.clock.timers.remove(self)


class Place:
    """A room, the instance behind it, and what those who wait were told."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S, max_waiting: int = 256, floor: float = 64.0) -> None:
        self.clock = Clock()
        self.state: Endpoint | Unavailable = LOADING
        self.queue = RequestQueue(
            lambda: serving(self.state),
            timeout_s=timeout_s,
            max_waiting=max_waiting,
            policy=RetryPolicy(floor=floor),
            clock=self.clock.read,
            call_later=self.clock.call_later,
        )
        self.served: list[str] = []
        self.refused: list[tuple[str, Unavailable]] = []

    def request(self, name: str, *, body_bytes: int = 0) -> QueueEntry:
        self.clock.now_s += 0.001  # no two arrive at the same time
        return QueueEntry(Client(self, name), self.clock.now_s, body_bytes)

    def enter(self, name: str, **options: int) -> QueueEntry:
        entry = self.request(name, **options)
        assert self.queue.enter(entry) is None
        return entry

    def becomes(self, state: Endpoint | Unavailable) -> None:
        self.state = state
        self.queue.changed()


def serving(state: Endpoint | Unavailable) -> Serving:
    return state if isinstance(state, Unavailable) else (state,)


class Client:
    body = b""

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.name = place, name

    def served(self, lease: Lease) -> None:
        self.place.served.append(f"{self.name} by {lease.endpoint.generation}")

    def refused(self, why: Unavailable) -> None:
        self.place.refused.append((self.name, why))


def generation(number: int) -> Endpoint:
    return Endpoint("tiny", number, UnixAddress(f"/run/{number}.sock"))


@pytest.fixture
def place() -> Place:
    return Place()


def test_those_who_wait_are_served_in_the_order_in_which_they_came(place: Place) -> None:
    for name in "abc":
        place.enter(name)
    place.becomes(LOADING)
    assert (len(place.queue), place.served) == (3, [])
    ready = generation(1)
    place.becomes(ready)
    assert place.served == ["a by 1", "b by 1", "c by 1"]
    assert (len(place.queue), ready.in_flight, place.clock.timers) == (0, 3, [])


def test_nobody_is_served_by_a_generation_that_went_meanwhile(place: Place) -> None:
    place.enter("a")
    gone = generation(1)
    gone.close("it died")
    place.becomes(gone)
    assert (len(place.queue), place.served) == (1, [])


def test_when_the_instance_gives_up_all_are_told_why(place: Place) -> None:
    place.enter("a")
    place.enter("b")
    place.becomes(FAILED)
    assert place.refused == [("a", FAILED), ("b", FAILED)]
    assert (len(place.queue), place.clock.timers) == (0, [])


def test_there_is_nothing_to_wait_for_where_the_instance_gave_up(place: Place) -> None:
    place.state = FAILED
    assert place.queue.enter(place.request("a")) is FAILED


def test_each_waits_for_its_own_time_and_is_then_told_how_long_it_was(place: Place) -> None:
    place.enter("a")
    place.clock.pass_time(50)
    place.enter("b")
    place.clock.pass_time(TIMEOUT_S - 50)
    ((name, why),) = place.refused
    assert name == "a"
    assert why.message == "Loading model; this request has waited for 120 s"
    assert (why.status, why.cause, why.retry_after_s) == (503, "loading", 1.0)
    assert "--wait-timeout" in why.remedy
    place.clock.pass_time(50)
    assert [name for name, _ in place.refused] == ["a", "b"]


def test_one_timer_serves_the_whole_room(place: Place) -> None:
    for n in range(100):
        place.enter(str(n))
    assert len(place.clock.timers) == 1


def test_the_room_holds_no_more_than_it_may(place: Place) -> None:
    place = Place(max_waiting=2)
    place.enter("a")
    first_leaves = place.enter("b")
    why = place.queue.enter(place.request("c"))
    assert why is not None
    assert (why.status, why.cause, why.retry_after_s) == (503, "waiting_room_full", 1.0)
    assert "2 requests wait for it already" in why.message
    assert not place.queue.requeue(place.request("d"), generation(1), sent=False)
    place.queue.leave(first_leaves)
    place.enter("e")


def test_the_room_holds_no_more_bytes_than_it_may(place: Place) -> None:
    place.enter("a", body_bytes=MAX_BYTES - 1)
    place.enter("b", body_bytes=1)
    why = place.queue.enter(place.request("c", body_bytes=1))
    assert why is not None
    assert why.cause == "waiting_room_full"
    place.becomes(generation(1))
    place.state = LOADING
    place.enter("d", body_bytes=MAX_BYTES)


def test_with_no_time_to_wait_nobody_waits() -> None:
    place = Place(timeout_s=0.0)
    assert place.queue.enter(place.request("a")) is LOADING
    assert not place.queue.requeue(place.request("b"), generation(1), sent=True)


def test_who_leaves_is_neither_served_nor_told(place: Place) -> None:
    place.enter("a")
    entry = place.enter("b")
    place.queue.leave(entry)
    place.queue.leave(entry)
    assert len(place.queue) == 1
    place.becomes(generation(1))
    assert place.served == ["a by 1"]


def test_the_last_to_leave_leaves_no_timer(place: Place) -> None:
    place.queue.leave(place.enter("a"))
    assert place.clock.timers == []


def test_one_who_leaves_while_others_are_told_is_not_told(place: Place) -> None:
    """A client's pipelined requests, say: refusing one ends the connection, and with it the other."""
    entries = [place.enter("a"), place.enter("b")]

    class Leaver(Client):
        def refused(self, why: Unavailable) -> None:
            place.queue.leave(entries[1])

        def served(self, lease: Lease) -> None:
            place.queue.leave(entries[1])

    entries[0].listener = Leaver(place, "a")
    place.becomes(FAILED)
    assert (place.refused, len(place.queue)) == ([], 0)
    for entry in entries:
        place.state = LOADING
        assert place.queue.enter(entry) is None
    place.becomes(generation(1))
    assert (place.served, len(place.queue)) == ([], 0)


def test_whoever_is_served_may_change_what_serves(place: Place) -> None:
    """The first of them is the one that a model was waiting for to be changed, say."""
    entries = [place.enter("a"), place.enter("b")]

    class Changer(Client):
        def served(self, lease: Lease) -> None:
            super().served(lease)
            place.becomes(LOADING)

    entries[0].listener = Changer(place, "a")
    place.becomes(generation(1))
    assert (place.served, len(place.queue)) == (["a by 1"], 1)
    place.becomes(generation(2))
    assert place.served == ["a by 1", "b by 2"]


# --- put back


def test_what_a_generation_broke_off_comes_before_what_came_later(place: Place) -> None:
    first, second = place.request("first"), place.request("second")
    place.enter("late")
    assert place.queue.requeue(second, generation(1), sent=True)
    assert place.queue.requeue(first, generation(1), sent=True)
    place.becomes(generation(2))
    assert place.served == ["first by 2", "second by 2", "late by 2"]
    assert (first.replayed, second.replayed) == (True, True)


def test_it_keeps_away_from_the_generation_that_broke_it_off(place: Place) -> None:
    """The end of the child may be seen a moment later than the end of its connections."""
    place.state = dying = generation(1)
    assert place.queue.requeue(place.request("a"), dying, sent=True)
    place.queue.changed()
    assert place.served == []
    place.becomes(LOADING)
    place.clock.pass_time(GRACE_S * 2)
    assert place.served == []
    place.becomes(generation(2))
    assert place.served == ["a by 2"]


def test_a_generation_that_goes_on_gets_it_again_after_a_moment(place: Place) -> None:
    place.state = alive = generation(1)
    assert place.queue.requeue(place.request("a"), alive, sent=True)
    place.clock.pass_time(GRACE_S * 0.9)
    assert place.served == []
    place.clock.pass_time(GRACE_S * 0.2)
    assert place.served == ["a by 1"]


def test_a_later_generation_that_serves_already_gets_it_at_once_but_not_before_it_waits(place: Place) -> None:
    place.state = generation(2)
    assert place.queue.requeue(place.request("a"), generation(1), sent=True)
    assert place.served == []
    place.clock.pass_time(0.0)
    assert place.served == ["a by 2"]


def test_a_request_is_sent_again_once(place: Place) -> None:
    entry = place.request("poison")
    assert place.queue.requeue(entry, generation(1), sent=True)
    place.becomes(generation(2))
    place.state = LOADING
    assert not place.queue.requeue(entry, generation(2), sent=True)


def test_what_never_reached_a_server_may_come_back_until_its_time_is_up(place: Place) -> None:
    entry = place.request("a")
    place.state = unreachable = generation(1)
    began_s = place.clock.now_s
    returns = 0
    while place.queue.requeue(entry, unreachable, sent=False):
        returns += 1
        place.clock.pass_time(GRACE_S)
        assert len(place.served) == returns
    assert place.clock.now_s - began_s == pytest.approx(TIMEOUT_S, abs=GRACE_S)
    assert not entry.replayed


def test_what_waits_for_a_server_that_cannot_be_reached_is_told_so(place: Place) -> None:
    place.state = unreachable = generation(1)
    entry = place.request("a")
    entry.deadline_s = place.clock.now_s + GRACE_S / 2
    assert place.queue.requeue(entry, unreachable, sent=False)
    place.clock.pass_time(GRACE_S)
    ((_, why),) = place.refused
    assert (why.cause, why.retry_after_s) == ("upstream_unreachable", 1.0)


def test_a_replay_has_the_whole_time_to_wait(place: Place) -> None:
    entry = place.enter("a")
    place.clock.pass_time(TIMEOUT_S * 0.9)
    place.becomes(generation(1))
    place.state = LOADING
    assert place.queue.requeue(entry, generation(1), sent=True)
    place.clock.pass_time(TIMEOUT_S * 0.9)
    assert place.refused == []
    place.becomes(generation(2))
    assert entry.waited_s == pytest.approx(TIMEOUT_S * 1.8)


def test_nothing_is_put_back_where_no_next_generation_comes(place: Place) -> None:
    place.state = FAILED
    assert not place.queue.requeue(place.request("a"), generation(1), sent=True)


def test_no_more_are_put_back_than_the_budget_allows() -> None:
    place = Place(floor=2.0)
    entries = [place.request(name) for name in "abc"]
    dead = generation(1)
    assert [place.queue.requeue(entry, dead, sent=True) for entry in entries] == [True, True, False]
    assert not entries[2].replayed
    assert place.queue.requeue(entries[2], dead, sent=False)  # this costs none
    dead.answered = 5
    assert place.queue.requeue(place.request("d"), dead, sent=True)
    assert not place.queue.requeue(place.request("e"), dead, sent=True)


# --- several generations that serve


def several(*endpoints: Endpoint, floor: float = 64.0) -> Place:
    place = Place(floor=floor)
    place.queue = RequestQueue(
        lambda: endpoints,
        timeout_s=TIMEOUT_S,
        policy=RetryPolicy(floor=floor),
        clock=place.clock.read,
        call_later=place.clock.call_later,
    )
    for endpoint in endpoints:
        endpoint.on_permit_free = place.queue.permit_freed
    return place


def with_places(number: int, max_concurrent: int) -> Endpoint:
    return Endpoint("tiny", number, UnixAddress(f"/run/{number}.sock"), max_concurrent=max_concurrent)


def test_of_several_only_the_one_that_broke_something_off_gets_nothing_for_a_moment() -> None:
    dying, alive = with_places(1, max_concurrent=2), with_places(2, max_concurrent=1)
    place = several(dying, alive)
    assert place.queue.requeue(place.request("a"), dying, sent=True)
    assert place.queue.requeue(place.request("b"), dying, sent=True)
    place.clock.pass_time(0.0)
    assert place.served == ["a by 2"]  # the other one, at once, and then it is full
    place.clock.pass_time(GRACE_S * 0.9)
    assert place.served == ["a by 2"]
    place.clock.pass_time(GRACE_S * 0.2)
    assert place.served == ["a by 2", "b by 1"]


def test_two_that_have_the_same_number_are_told_apart() -> None:
    dying, alive = with_places(1, max_concurrent=1), with_places(1, max_concurrent=1)
    place = several(dying, alive, floor=1.0)
    dying.answered = alive.answered = 10
    for name, broken, taken in (
        ("a", dying, True),
        ("b", dying, True),
        ("c", dying, True),
        ("d", alive, True),
    ):
        assert place.queue.requeue(place.request(name), broken, sent=True) is taken
    # One at the floor, two fifths of ten answers of each; what one answered is not counted twice.
    assert place.queue.requeue(place.request("e"), alive, sent=True)
    assert not place.queue.requeue(place.request("f"), alive, sent=True)


def test_who_waits_too_long_hears_of_the_busy_one_and_not_of_the_one_that_broke_something_off() -> None:
    dying, busy = with_places(1, max_concurrent=1), with_places(2, max_concurrent=1)
    busy.lease(infers=True)
    place = several(dying, busy)
    entry = place.request("a")
    entry.deadline_s = place.clock.now_s + GRACE_S / 2
    assert place.queue.requeue(entry, dying, sent=False)
    place.clock.pass_time(GRACE_S / 2)
    ((_, why),) = place.refused
    assert (why.cause, why.message.partition(";")[0]) == ("busy", "The model is busy with 1 request")


def test_the_oldest_is_the_one_who_has_waited_longest_and_a_wait_that_is_new_counts_from_its_beginning(
    place: Place,
) -> None:
    assert place.queue.oldest_s == float("inf")
    old = place.request("old")
    place.clock.pass_time(50.0)
    young = place.enter("young")
    began_s = place.clock.now_s
    place.clock.pass_time(1.0)
    assert place.queue.requeue(old, generation(1), sent=True)
    assert place.queue.oldest_s == began_s
    place.queue.set_limits(timeout_s=1.0, max_waiting=1)  # those who wait stay, and for as long as they could
    place.clock.pass_time(10.0)
    assert (place.refused, place.queue.oldest_s) == ([], began_s)
    place.queue.leave(young)
    assert place.queue.oldest_s == began_s + 1.0


def test_by_default_it_keeps_the_time_of_the_running_loop(place: Place) -> None:
    async def run() -> None:
        told = asyncio.Event()

        class Told(Client):
            def served(self, lease: Lease) -> None:
                super().served(lease)
                told.set()

        place.state = generation(1)
        room = RequestQueue(lambda: serving(place.state), timeout_s=1.0)
        assert room.requeue(QueueEntry(Told(place, "a"), 0.0, 0), generation(1), sent=True)
        await told.wait()

    asyncio.run(run())
    assert place.served == ["a by 1"]


# --- its model becomes another one


def test_who_waits_is_handed_over_with_the_time_that_is_left(place: Place) -> None:
    successor = Place(max_waiting=1)
    successor.clock = place.clock
    successor.queue = RequestQueue(
        lambda: serving(successor.state),
        timeout_s=1.0,
        max_waiting=1,
        clock=place.clock.read,
        call_later=place.clock.call_later,
    )
    successor.enter("there")
    first, second = place.enter("a"), place.enter("b")
    place.queue.transfer_to(successor.queue)
    assert (len(place.queue), len(successor.queue)) == (0, 3)
    place.clock.pass_time(2.0)
    assert [name for name, _ in successor.refused] == ["there"]
    place.queue.leave(second)
    assert len(successor.queue) == 1
    successor.becomes(generation(1))
    assert place.served == ["a by 1"]
    assert first.waited_s == pytest.approx(2.0, abs=0.01)


def test_who_would_come_back_comes_back_to_the_heir(place: Place) -> None:
    successor = Place()
    broken = generation(1)
    place.becomes(broken)
    entry = place.enter("a")
    place.clock.pass_time(0.0)
    assert place.served == ["a by 1"]
    place.state = FAILED
    place.queue.transfer_to(successor.queue)
    assert place.queue.unqueueable_reason() is None
    assert place.queue.requeue(entry, broken, sent=True)
    assert len(successor.queue) == 1
    late = place.request("b")
    assert place.queue.enter(late) is None
    successor.state = FAILED
    successor.queue.changed()
    assert [name for name, _ in place.refused] == ["a", "b"]
