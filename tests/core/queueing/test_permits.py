"""Permits: how many requests a generation serves, which request gets one, and what the others see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count

import pytest

from llamasup.core.http.address import UnixAddress
from llamasup.core.http.heads import HttpError, Priority
from llamasup.core.queueing.endpoint import BUSY, Endpoint, Lease
from llamasup.core.queueing.request_queue import GRACE_S, MAX_BYTES, QueueEntry, RequestQueue
from tests.core.queueing.test_request_queue import LOADING, TIMEOUT_S, Clock, serving


class Model:
    """An endpoint with permits, its queue, and clients that enter, hold leases and leave."""

    def __init__(
        self, max_concurrent: int = 1, *, timeout_s: float = TIMEOUT_S, max_waiting: int = 256
    ) -> None:
        self.clock = Clock()
        self.max_concurrent = max_concurrent
        self.state: Endpoint | HttpError = LOADING
        self.queue = RequestQueue(
            lambda: serving(self.state),
            timeout_s=timeout_s,
            max_waiting=max_waiting,
            clock=self.clock.read,
            call_later=self.clock.call_later,
        )
        self.held: dict[str, Lease] = {}
        self.order: list[str] = []
        self.refused: dict[str, HttpError] = {}
        self.entries: dict[str, QueueEntry] = {}
        self.generation(1)

    def generation(self, number: int) -> Endpoint:
        address = UnixAddress(f"/run/{number}.sock")
        endpoint = Endpoint(
            "tiny",
            number,
            address,
            max_concurrent=self.max_concurrent,
            on_permit_free=self.queue.permit_freed,
        )
        self.becomes(endpoint)
        return endpoint

    def becomes(self, state: Endpoint | HttpError) -> None:
        self.state = state
        self.queue.changed()

    def comes(self, name: str, *, infers: bool = True, priority: Priority = Priority.NORMAL) -> str:
        """As the proxy does it: served, queued, or refused. ``a1`` is of client ``a``."""
        self.clock.now_s += 0.001
        lease = self.state if isinstance(self.state, HttpError) else self.state.lease_if_free(infers=infers)
        if isinstance(lease, Lease):
            self.served(name, lease)
            return "served"
        assert lease.queueable
        listener = QueueListener(self, name)
        entry = QueueEntry(
            listener, self.clock.now_s, 0, client=name[0], priority=priority, needs_permit=infers
        )
        refusal = self.queue.enter(entry)
        if refusal is not None:
            self.refused[name] = refusal
            return "refused"
        self.entries[name] = entry
        return "queued"

    def come(self, names: str) -> None:
        for name in names.split():
            self.comes(name)

    def served(self, name: str, lease: Lease) -> None:
        self.order.append(name)
        self.held[name] = lease

    def done(self, name: str) -> None:
        self.held.pop(name).release()


class QueueListener:
    body = b""

    def __init__(self, model: Model, name: str) -> None:
        self.model, self.name = model, name
        self.then: Callable[[Lease], None] | None = None

    def served(self, lease: Lease) -> None:
        self.model.served(self.name, lease)
        if self.then is not None:
            self.then(lease)

    def refused(self, why: HttpError) -> None:
        self.model.refused[self.name] = why


def test_at_most_max_concurrent_requests_are_served() -> None:
    model = Model(max_concurrent=2)
    assert [model.comes(name) for name in ("a1", "a2", "a3", "a4")] == [
        "served",
        "served",
        "queued",
        "queued",
    ]
    model.done("a2")
    assert model.order == ["a1", "a2", "a3"]
    model.done("a1")
    model.done("a3")
    assert (model.order[3:], len(model.queue), model.clock.timers) == (["a4"], 0, [])


def test_free_permit_goes_to_the_queue_before_new_requests() -> None:
    model = Model()
    model.come("a1 b1")
    model.done("a1")
    assert model.comes("c1") == "queued"
    assert model.order == ["a1", "b1"]


def test_permits_go_to_clients_in_turn_and_by_priority() -> None:
    model = Model()
    model.come("a1 a2 a3 b1 c1")
    model.comes("d1", priority=Priority.HIGH)
    model.comes("a4", priority=Priority.LOW)
    for _ in range(7):
        model.done(model.order[-1])
    assert model.order == ["a1", "d1", "a2", "b1", "c1", "a3", "a4"]


def test_only_inference_needs_a_permit() -> None:
    model = Model()
    model.come("a1 a2")
    assert model.comes("b1", infers=False) == "served"
    model.becomes(LOADING)
    assert model.comes("b2", infers=False) == "queued"
    model.generation(2)
    assert model.order == ["a1", "b1", "b2", "a2"]


def test_full_queue_is_429_with_retry_after() -> None:
    model = Model(max_concurrent=2, max_waiting=3)
    endpoint = model.state
    assert isinstance(endpoint, Endpoint)
    for number in range(5):
        model.comes(f"a{number}")
    endpoint.held_s = 30.0
    assert model.comes("a5") == "refused"
    why = model.refused["a5"]
    assert (why.status, why.cause, why.type, why.queueable) == (429, "queue_full", "rate_limit_error", False)
    assert why.message == "The model is busy with 2 requests, and 3 more wait"
    assert why.retry_after_s == 15.0  # of two permits, one is free every 15 s, and gives room to one request


def test_client_with_fewer_requests_takes_the_place_of_the_last_one_of_a_greedy_client() -> None:
    model = Model(max_waiting=3)
    for number in range(4):
        model.comes(f"a{number}")
    assert model.comes("b1") == "queued"
    assert (model.refused["a3"].status, model.refused["a3"].cause) == (429, "queue_full")
    assert model.refused["a3"].message == "The model is busy with 1 request, and 3 more wait"
    assert model.comes("b2") == "refused"  # a has two as well, then
    assert model.comes("a4") == "refused"
    assert model.comes("c1") == "queued"
    assert sorted(model.refused) == ["a2", "a3", "a4", "b2"]
    assert len(model.queue) == 3


def test_greedy_client_makes_room_in_the_queue_for_a_load_too() -> None:
    model = Model(max_waiting=2)
    model.becomes(LOADING)
    for name in ("a1", "a2", "b1"):
        assert model.comes(name) == "queued"
    assert (model.refused["a2"].status, model.refused["a2"].cause) == (503, "waiting_room_full")


def test_request_too_large_for_the_room_of_another_evicts_none() -> None:
    model = Model(max_waiting=2)
    model.come("a1 a2 a3")
    large = QueueEntry(QueueListener(model, "b1"), model.clock.now_s, MAX_BYTES + 1, client="b")
    assert model.queue.enter(large) is not None
    assert len(model.queue) == 2


@pytest.mark.parametrize(("limit", "comes"), [(1, "queued"), (0, "refused")])
def test_greedy_client_makes_room_in_a_queue_past_its_limit_too(limit: int, comes: str) -> None:
    model = Model(max_waiting=2)
    model.come("a1 a2 a3")
    model.queue.set_limits(timeout_s=TIMEOUT_S, max_waiting=limit)
    assert model.comes("b1") == comes
    assert len(model.queue) == 2


def test_no_client_waits_longer_because_another_retries_at_once() -> None:
    """One client keeps 60 requests on their way; two have one each, and one sends its only request late."""
    model = Model(max_concurrent=4, max_waiting=40)
    ages: dict[str, int] = {}
    numbers, longest = count(), 0

    def comes(client: str) -> str:
        name = f"{client}{next(numbers)}"
        model.comes(name)
        return name

    ours: dict[str, str] = {}
    for turn in range(200):
        for _ in range(60 - len(model.held) - len(model.queue)):
            comes("g")
        for client in ("p", "q", *("s" * (turn == 150))):
            if client not in ours:
                ours[client] = comes(client)
                ages[client] = turn
        done = next(iter(model.held))
        model.done(done)
        for client, name in tuple(ours.items()):
            if name in model.held:
                longest = max(longest, turn - ages[client])
            elif name == done:
                del ours[client]
    assert {name[0] for name in model.refused} == {"g"}
    assert longest <= 5  # two others, and four requests that are served
    served = Counter(name[0] for name in model.order)
    assert served["s"] == 1
    assert min(served["p"], served["q"]) >= 30


def test_retry_after_is_a_second_without_measurements() -> None:
    model = Model(max_waiting=0)
    model.comes("a1")
    assert model.comes("a2") == "refused"
    why = model.refused["a2"]
    assert (why.message, why.retry_after_s) == ("The model is busy with 1 request", 1.0)


def test_released_permits_update_the_mean_hold_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("llamasup.core.queueing.endpoint.monotonic", lambda: now_s)
    model = Model(max_waiting=0)
    endpoint = model.state
    assert isinstance(endpoint, Endpoint)
    model.comes("a1")
    now_s += 20.0
    model.done("a1")
    assert endpoint.held_s == 20.0
    model.comes("a2")
    model.held["a2"].cancel_permit()  # it never was inferred for
    assert (endpoint.busy, endpoint.held_s) == (0, 20.0)
    assert model.held["a2"].permit_s == 0.0
    model.held["a2"].acquire_permit()
    model.comes("a3")
    assert model.refused["a3"].retry_after_s == 20.0


def test_full_queue_is_503_while_the_model_loads() -> None:
    model = Model(max_waiting=1)
    model.becomes(LOADING)
    model.comes("a1")
    assert model.comes("a2") == "refused"
    assert (model.refused["a2"].status, model.refused["a2"].cause) == (503, "waiting_room_full")


def test_wait_for_a_permit_times_out_with_503() -> None:
    model = Model(max_concurrent=3)
    endpoint = model.state
    assert isinstance(endpoint, Endpoint)
    endpoint.held_s = 600.0
    for number in range(4):
        model.comes(f"a{number}")
    model.clock.pass_time(TIMEOUT_S)
    why = model.refused["a3"]
    assert (why.status, why.cause, why.type) == (503, "busy", "unavailable_error")
    assert why.message == "The model is busy with 3 requests; this request has waited for 120 s"
    assert why.retry_after_s == 400.0  # it is in the queue itself, and a new one would be the second
    assert "--wait-timeout" in why.remedy


def test_busy_model_is_429_at_once_without_wait_time() -> None:
    model = Model(timeout_s=0.0)
    model.comes("a1")
    assert model.comes("a2") == "refused"
    assert model.refused["a2"].status == 429


def test_waits_for_load_and_permit_are_counted_separately() -> None:
    model = Model()
    model.becomes(LOADING)
    model.come("a1 a2")
    model.clock.pass_time(10.0)
    model.generation(2)
    model.clock.pass_time(30.0)
    model.done("a1")
    waited = model.entries["a2"]
    assert model.order == ["a1", "a2"]
    assert waited.waited_s == pytest.approx(10.0, abs=0.01)  # the 30 s in between were waiting for a place
    assert (model.entries["a1"].position, waited.position) == (1, 2)


def test_after_a_crash_broken_requests_go_first_and_none_is_lost() -> None:
    model = Model(max_concurrent=2, max_waiting=2)
    model.come("a1 b1 c1 a2")
    dead = model.state
    assert isinstance(dead, Endpoint)
    model.becomes(LOADING)
    for name, arrived_s in (("b1", 0.2), ("a1", 0.1)):  # a full queue accepts them again
        assert model.queue.requeue(
            QueueEntry(QueueListener(model, name), arrived_s, 0, client=name[0]), dead, sent=True
        )
        model.done(name)
    assert (len(model.queue), model.comes("d1")) == (4, "refused")
    model.order.clear()
    model.generation(2)
    for number in range(4):
        model.done(model.order[number])
    assert model.order == ["a1", "b1", "c1", "a2"]


def test_waiting_requests_avoid_an_ejected_generation() -> None:
    """Its end is most likely a moment away; each of them would be sent there, and lose its one replay."""
    model = Model()
    model.come("a1 b1")
    dying = model.state
    assert isinstance(dying, Endpoint)
    entry = QueueEntry(QueueListener(model, "a1"), 0.0, 0, client="a")
    assert model.queue.requeue(entry, dying, sent=True)
    model.done("a1")
    assert model.order == ["a1"]
    model.clock.pass_time(GRACE_S)
    assert model.order == ["a1", "a1"]
    model.done("a1")
    assert model.order == ["a1", "a1", "b1"]


def test_requests_that_end_at_once_serve_the_whole_queue() -> None:
    """A client that left in the same moment: its place is free while it is being served."""
    model = Model()
    model.comes("a0")
    for number in range(250):
        name = f"b{number}"
        model.comes(name)
        listener = model.entries[name].listener
        assert isinstance(listener, QueueListener)
        listener.then = Lease.release
    model.done("a0")
    assert (len(model.queue), len(model.order), model.order[-1]) == (0, 251, "b249")


def test_permit_may_be_released_before_the_response_ends() -> None:
    model = Model()
    model.come("a1 b1")
    model.held["a1"].release_permit()
    assert model.order == ["a1", "b1"]
    endpoint = model.state
    assert isinstance(endpoint, Endpoint)
    assert (endpoint.busy, endpoint.in_flight) == (1, 2)
    model.done("a1")
    assert (endpoint.busy, endpoint.in_flight) == (1, 1)


def test_excess_request_takes_no_permit_from_waiting_ones() -> None:
    """An upload that was begun without a place takes one when it is whole, whether there is one or not."""
    model = Model()
    model.comes("a1")
    model.held["a1"].cancel_permit()
    model.comes("b1")
    model.held["a1"].acquire_permit()
    model.comes("c1")
    model.done("b1")
    assert model.order == ["a1", "b1"]
    model.done("a1")
    assert model.order == ["a1", "b1", "c1"]


def test_request_that_does_not_wait_gets_busy() -> None:
    endpoint = Endpoint("tiny", 1, UnixAddress("/run/1.sock"), max_concurrent=1)
    assert isinstance(endpoint.lease_if_free(infers=True), Lease)
    assert endpoint.lease_if_free(infers=True) is BUSY
    assert isinstance(endpoint.lease_if_free(infers=False), Lease)
