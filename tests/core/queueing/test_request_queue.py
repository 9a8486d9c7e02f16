"""The request queue on a manual clock: order of service, timeouts, rejections and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from llamasup.core.http.address import UnixAddress
from llamasup.core.http.heads import HttpError
from llamasup.core.queueing.endpoint import BUSY, UNLIMITED, Endpoint, Lease, Serving, generation_ended
from llamasup.core.queueing.request_queue import GRACE_S, MAX_BYTES, QueueEntry, RequestQueue

LOADING = HttpError(503, "Loading model", cause="loading", retry_after_s=1.0, queueable=True)
FAILED = HttpError(503, "it crashed too often", cause="killed", remedy="see the log", retry_after_s=30.0)
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


class QueueRig:
    """A queue, its endpoint, and the outcomes of its requests."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S, max_waiting: int = 256) -> None:
        self.clock = Clock()
        self.state: Endpoint | HttpError = LOADING
        self.queue = RequestQueue(
            lambda: serving(self.state),
            timeout_s=timeout_s,
            max_waiting=max_waiting,
            clock=self.clock.read,
            call_later=self.clock.call_later,
        )
        self.served: list[str] = []
        self.leases: dict[str, Lease] = {}
        self.refused: list[tuple[str, HttpError]] = []

    def request(self, name: str, *, body_bytes: int = 0, needs_permit: bool = True) -> QueueEntry:
        self.clock.now_s += 0.001  # no two arrive at the same time
        return QueueEntry(Client(self, name), self.clock.now_s, body_bytes, needs_permit=needs_permit)

    def serves(self, number: int, *, max_concurrent: int = UNLIMITED) -> Endpoint:
        """A generation that reports its free permits to the queue."""
        made = with_permits(number, max_concurrent)
        made.on_permit_free = self.queue.permit_freed
        return made

    def enter(self, name: str, *, body_bytes: int = 0) -> QueueEntry:
        entry = self.request(name, body_bytes=body_bytes)
        assert self.queue.enter(entry) is None
        return entry

    def becomes(self, state: Endpoint | HttpError) -> None:
        self.state = state
        self.queue.changed()


def serving(state: Endpoint | HttpError) -> Serving:
    return state if isinstance(state, HttpError) else (state,)


class Client:
    body = b""

    def __init__(self, rig: QueueRig, name: str) -> None:
        self.rig, self.name = rig, name

    def served(self, lease: Lease) -> None:
        self.rig.served.append(f"{self.name} by {lease.endpoint.generation}")
        self.rig.leases[self.name] = lease

    def refused(self, why: HttpError) -> None:
        self.rig.refused.append((self.name, why))


def generation(number: int) -> Endpoint:
    return Endpoint("tiny", number, UnixAddress(f"/run/{number}.sock"))


def ended(number: int, *, crashed: bool = True) -> Endpoint:
    made = generation(number)
    made.close(generation_ended("it ended"), crashed=crashed)
    return made


@pytest.fixture
def rig() -> QueueRig:
    return QueueRig()


def test_requests_are_served_in_order_of_arrival(rig: QueueRig) -> None:
    for name in "abc":
        rig.enter(name)
    rig.becomes(LOADING)
    assert (len(rig.queue), rig.served) == (3, [])
    ready = generation(1)
    rig.becomes(ready)
    assert rig.served == ["a by 1", "b by 1", "c by 1"]
    assert (len(rig.queue), ready.in_flight, rig.clock.timers) == (0, 3, [])


def test_closed_generation_serves_no_request(rig: QueueRig) -> None:
    rig.enter("a")
    gone = generation(1)
    gone.close(generation_ended("it died"))
    rig.becomes(gone)
    assert (len(rig.queue), rig.served) == (1, [])


def test_failed_instance_rejects_all_waiting_requests(rig: QueueRig) -> None:
    rig.enter("a")
    rig.enter("b")
    rig.becomes(FAILED)
    assert rig.refused == [("a", FAILED), ("b", FAILED)]
    assert (len(rig.queue), rig.clock.timers) == (0, [])


def test_failed_instance_rejects_new_requests(rig: QueueRig) -> None:
    rig.state = FAILED
    assert rig.queue.enter(rig.request("a")) is FAILED


def test_each_request_times_out_with_its_own_deadline(rig: QueueRig) -> None:
    rig.enter("a")
    rig.clock.pass_time(50)
    rig.enter("b")
    rig.clock.pass_time(TIMEOUT_S - 50)
    ((name, why),) = rig.refused
    assert name == "a"
    assert why.message == "Loading model; this request has waited for 120 s"
    assert (why.status, why.cause, why.retry_after_s) == (503, "loading", 1.0)
    assert "--wait-timeout" in why.remedy
    rig.clock.pass_time(50)
    assert [name for name, _ in rig.refused] == ["a", "b"]


def test_one_timer_serves_the_whole_queue(rig: QueueRig) -> None:
    for n in range(100):
        rig.enter(str(n))
    assert len(rig.clock.timers) == 1


def test_rejection_of_a_full_queue_names_the_number_of_requests() -> None:
    rig = QueueRig(max_waiting=1)
    rig.enter("a")
    why = rig.queue.enter(rig.request("b"))
    assert why is not None
    assert why.message == "Loading model; 1 request waits for it already"


def test_number_of_requests_is_limited(rig: QueueRig) -> None:
    rig = QueueRig(max_waiting=2)
    rig.enter("a")
    first_leaves = rig.enter("b")
    why = rig.queue.enter(rig.request("c"))
    assert why is not None
    assert (why.status, why.cause, why.retry_after_s) == (503, "waiting_room_full", 1.0)
    assert "2 requests wait for it already" in why.message
    assert not rig.queue.requeue(rig.request("d"), generation(1), sent=False)
    rig.queue.leave(first_leaves)
    rig.enter("e")


def test_bytes_of_bodies_are_limited(rig: QueueRig) -> None:
    rig.enter("a", body_bytes=MAX_BYTES - 1)
    rig.enter("b", body_bytes=1)
    why = rig.queue.enter(rig.request("c", body_bytes=1))
    assert why is not None
    assert why.cause == "waiting_room_full"
    rig.becomes(generation(1))
    rig.state = LOADING
    rig.enter("d", body_bytes=MAX_BYTES)


def test_timeout_of_zero_queues_no_request() -> None:
    rig = QueueRig(timeout_s=0.0)
    assert rig.queue.enter(rig.request("a")) is LOADING
    assert not rig.queue.requeue(rig.request("b"), generation(1), sent=True)


def test_client_that_left_is_neither_served_nor_rejected(rig: QueueRig) -> None:
    rig.enter("a")
    entry = rig.enter("b")
    rig.queue.leave(entry)
    rig.queue.leave(entry)
    assert len(rig.queue) == 1
    rig.becomes(generation(1))
    assert rig.served == ["a by 1"]


def test_empty_queue_has_no_timer(rig: QueueRig) -> None:
    rig.queue.leave(rig.enter("a"))
    assert rig.clock.timers == []


def test_client_that_leaves_during_rejections_gets_none(rig: QueueRig) -> None:
    """A client's pipelined requests, say: refusing one ends the connection, and with it the other."""
    entries = [rig.enter("a"), rig.enter("b")]

    class Leaver(Client):
        def refused(self, why: HttpError) -> None:
            rig.queue.leave(entries[1])

        def served(self, lease: Lease) -> None:
            rig.queue.leave(entries[1])

    entries[0].listener = Leaver(rig, "a")
    rig.becomes(FAILED)
    assert (rig.refused, len(rig.queue)) == ([], 0)
    for entry in entries:
        rig.state = LOADING
        assert rig.queue.enter(entry) is None
    rig.becomes(generation(1))
    assert (rig.served, len(rig.queue)) == ([], 0)


def test_served_listener_may_change_the_serving_endpoint(rig: QueueRig) -> None:
    """The first of them is the one that a model was waiting for to be changed, say."""
    entries = [rig.enter("a"), rig.enter("b")]

    class Changer(Client):
        def served(self, lease: Lease) -> None:
            super().served(lease)
            rig.becomes(LOADING)

    entries[0].listener = Changer(rig, "a")
    rig.becomes(generation(1))
    assert (rig.served, len(rig.queue)) == (["a by 1"], 1)
    rig.becomes(generation(2))
    assert rig.served == ["a by 1", "b by 2"]


# --- put back


def test_broken_requests_go_before_later_ones(rig: QueueRig) -> None:
    first, second = rig.request("first"), rig.request("second")
    late = rig.enter("late")
    assert rig.queue.requeue(second, generation(1), sent=True)
    assert rig.queue.requeue(first, generation(1), sent=True)
    assert (rig.queue.outlook(second).position, rig.queue.outlook(late).position) == (2, 3)
    rig.becomes(rig.serves(2))
    assert rig.served == ["first by 2"]
    rig.leases["first"].release()
    assert rig.served == ["first by 2", "second by 2"]
    rig.leases["second"].release()
    assert rig.served == ["first by 2", "second by 2", "late by 2"]
    assert (first.replayed, second.replayed, late.replayed) == (True, True, False)


def test_requeued_request_avoids_the_generation_that_broke_it(rig: QueueRig) -> None:
    """The end of the child may be seen a moment later than the end of its connections."""
    rig.state = dying = generation(1)
    assert rig.queue.requeue(rig.request("a"), dying, sent=True)
    rig.queue.changed()
    assert rig.served == []
    rig.becomes(LOADING)
    rig.clock.pass_time(GRACE_S * 2)
    assert rig.served == []
    rig.becomes(generation(2))
    assert rig.served == ["a by 2"]


def test_surviving_generation_gets_the_request_after_its_ejection(rig: QueueRig) -> None:
    rig.state = alive = generation(1)
    assert rig.queue.requeue(rig.request("a"), alive, sent=True)
    rig.clock.pass_time(GRACE_S * 0.9)
    assert rig.served == []
    rig.clock.pass_time(GRACE_S * 0.2)
    assert rig.served == ["a by 1"]


def test_next_generation_gets_the_request_at_once_after_requeue(rig: QueueRig) -> None:
    rig.state = generation(2)
    assert rig.queue.requeue(rig.request("a"), generation(1), sent=True)
    assert rig.served == []
    rig.clock.pass_time(0.0)
    assert rig.served == ["a by 2"]


def test_request_is_sent_again_once_after_ends_that_were_requested(rig: QueueRig) -> None:
    entry = rig.request("a")
    assert rig.queue.requeue(entry, ended(1, crashed=False), sent=True)
    rig.becomes(generation(2))
    rig.state = LOADING
    assert not rig.queue.requeue(entry, ended(2, crashed=False), sent=True)
    assert (entry.ends, entry.replayed) == ((), True)


def test_request_that_has_filled_a_shared_context_is_sent_again_once_alone(rig: QueueRig) -> None:
    server = rig.serves(1)
    rig.state = server
    crowded, other = rig.request("crowded"), rig.request("other")
    beside = server.lease(infers=True)
    assert rig.queue.isolate(crowded)
    assert rig.queue.enter(other) is None
    rig.clock.pass_time(0.0)
    assert (rig.served, crowded.replayed, crowded.ends) == ([], True, ())
    beside.release()
    assert rig.served == ["crowded by 1"]
    assert rig.leases["crowded"].alone
    assert not rig.queue.isolate(crowded)
    rig.leases["crowded"].release()
    assert rig.served == ["crowded by 1", "other by 1"]


def test_request_is_not_sent_again_alone_where_none_may_wait(rig: QueueRig) -> None:
    rig.state = FAILED
    assert not rig.queue.isolate(rig.request("a"))
    rig.state = generation(1)
    rig.queue.set_limits(timeout_s=0.0, max_waiting=4)
    assert not rig.queue.isolate(rig.request("a"))


def test_suspect_that_was_alone_is_not_sent_a_third_time(rig: QueueRig) -> None:
    entry = rig.request("poison")
    assert rig.queue.requeue(entry, ended(1), sent=True)
    second = rig.serves(2)
    rig.becomes(second)
    lease = rig.leases["poison"]
    assert (lease.alone, second.is_explained) == (True, True)
    second.close(generation_ended("it died"), crashed=True)
    assert second.is_explained
    rig.state = LOADING
    assert not rig.queue.requeue(entry, second, sent=True, alone=lease.alone)


def test_suspect_beside_an_upload_is_sent_a_third_time_but_no_fourth_time(rig: QueueRig) -> None:
    entry = rig.request("a")
    for number in (1, 2):
        rig.state = LOADING
        assert rig.queue.requeue(entry, ended(number), sent=True)
        serving = rig.serves(number + 1)
        upload = serving.lease()
        rig.becomes(serving)
        upload.acquire_permit()  # its body has arrived, and it takes a permit, free or not
        assert not rig.leases["a"].alone
        assert not serving.is_explained
    assert not rig.queue.requeue(entry, ended(3), sent=True)


def test_nothing_gets_a_permit_beside_a_suspect(rig: QueueRig) -> None:
    rig.enter("late")
    assert rig.queue.requeue(rig.request("suspect"), ended(1), sent=True)
    assert rig.queue.requeue(rig.request("tokenize", needs_permit=False), ended(1), sent=True)
    server = rig.serves(2, max_concurrent=4)
    rig.becomes(server)
    assert rig.served == ["suspect by 2"]
    assert server.taken == 1
    assert server.lease_if_free(infers=True) is BUSY
    rig.leases["suspect"].release()
    assert rig.served[1:] == ["tokenize by 2"]
    rig.leases["tokenize"].release()
    assert rig.served[2:] == ["late by 2"]
    assert isinstance(server.lease_if_free(infers=True), Lease)


def test_suspect_waits_until_a_busy_server_is_free_and_others_wait_with_it(rig: QueueRig) -> None:
    """The server has broken a connection, but has not ended."""
    rig.state = server = rig.serves(1, max_concurrent=4)
    running = [server.lease(infers=True) for _ in range(2)]
    assert rig.queue.requeue(rig.request("suspect"), server, sent=True)
    rig.clock.pass_time(GRACE_S * 2)
    rig.enter("late")
    rig.clock.pass_time(0.0)
    assert rig.served == []
    running[0].release()
    assert (rig.served, server.reserved) == ([], True)
    running[1].release()
    assert (rig.served, server.reserved) == (["suspect by 1"], False)
    rig.leases["suspect"].release()
    assert (rig.served[1:], server.taken) == (["late by 1"], 1)


@pytest.mark.parametrize("leaves", [True, False])
def test_reserved_server_serves_others_when_the_suspect_is_gone(rig: QueueRig, *, leaves: bool) -> None:
    rig.state = server = rig.serves(1, max_concurrent=4)
    server.lease(infers=True)
    suspect = rig.request("suspect")
    assert rig.queue.requeue(suspect, server, sent=True)
    rig.clock.pass_time(GRACE_S * 2)
    assert server.reserved
    if leaves:
        rig.enter("late")
        rig.queue.leave(suspect)
    else:
        rig.clock.pass_time(TIMEOUT_S - GRACE_S * 2 - 0.1)
        rig.enter("late")
        rig.clock.pass_time(0.2)
        assert [name for name, _ in rig.refused] == ["suspect"]
    assert (rig.served, server.reserved) == (["late by 1"], False)


def test_suspects_do_not_time_out_while_they_wait_for_another_suspect(rig: QueueRig) -> None:
    for name in "ab":
        assert rig.queue.requeue(rig.request(name), ended(1), sent=True, ran_s=TIMEOUT_S)
    rig.becomes(rig.serves(2))
    late = rig.enter("late")
    rig.clock.pass_time(TIMEOUT_S * 1.5)
    assert ([name for name, _ in rig.refused], late.waits) == (["late"], False)
    rig.leases["a"].release()
    assert rig.served == ["a by 2", "b by 2"]


@pytest.mark.parametrize("comes_later", [False, True])
def test_suspect_that_runs_longer_than_before_shares_its_server(rig: QueueRig, *, comes_later: bool) -> None:
    assert rig.queue.requeue(rig.request("a"), ended(1), sent=True, ran_s=30.0)
    server = rig.serves(2, max_concurrent=4)
    rig.becomes(server)
    if not comes_later:
        rig.enter("late")
    rig.clock.pass_time(59.0)
    if comes_later:
        rig.enter("late")
        rig.clock.pass_time(0.0)
    assert rig.served == ["a by 2"]
    rig.clock.pass_time(2.0)
    assert rig.served == ["a by 2", "late by 2"]
    assert (server.taken, server.is_explained, rig.leases["a"].alone) == (2, False, False)
    rig.leases["a"].release()
    assert (server.busy, isinstance(server.lease_if_free(infers=True), Lease)) == (1, True)


def test_suspect_takes_an_idle_server_while_the_others_serve() -> None:
    busy, idle = with_permits(1, max_concurrent=2), with_permits(2, max_concurrent=2)
    busy.lease(infers=True)
    rig = several(busy, idle)
    for name in "ab":
        assert rig.queue.requeue(rig.request(name), ended(3), sent=True)
    rig.clock.pass_time(0.0)
    rig.enter("late")
    rig.clock.pass_time(0.0)
    assert rig.served == ["a by 2", "late by 1"]  # b waits for a, and keeps no other server free
    rig.leases["a"].release()
    assert rig.served[2:] == ["b by 2"]


def test_unsent_request_may_be_requeued_until_its_deadline(rig: QueueRig) -> None:
    entry = rig.request("a")
    rig.state = unreachable = generation(1)
    began_s = rig.clock.now_s
    returns = 0
    while rig.queue.requeue(entry, unreachable, sent=False):
        returns += 1
        rig.clock.pass_time(GRACE_S)
        assert len(rig.served) == returns
    assert rig.clock.now_s - began_s == pytest.approx(TIMEOUT_S, abs=GRACE_S)
    assert not entry.replayed


def test_timeout_reports_an_unreachable_server(rig: QueueRig) -> None:
    rig.state = unreachable = generation(1)
    entry = rig.request("a")
    entry.deadline_s = rig.clock.now_s + GRACE_S / 2
    assert rig.queue.requeue(entry, unreachable, sent=False)
    rig.clock.pass_time(GRACE_S)
    ((_, why),) = rig.refused
    assert (why.cause, why.retry_after_s) == ("upstream_unreachable", 1.0)


def test_retry_has_the_full_wait_timeout(rig: QueueRig) -> None:
    entry = rig.enter("a")
    rig.clock.pass_time(TIMEOUT_S * 0.9)
    rig.becomes(generation(1))
    rig.state = LOADING
    assert rig.queue.requeue(entry, generation(1), sent=True)
    rig.clock.pass_time(TIMEOUT_S * 0.9)
    assert rig.refused == []
    rig.becomes(generation(2))
    assert entry.waited_s == pytest.approx(TIMEOUT_S * 1.8)


def test_request_is_not_requeued_without_a_next_generation(rig: QueueRig) -> None:
    rig.state = FAILED
    assert not rig.queue.requeue(rig.request("a"), generation(1), sent=True)


# --- several generations that serve


def several(*endpoints: Endpoint) -> QueueRig:
    rig = QueueRig()
    rig.queue = RequestQueue(
        lambda: endpoints,
        timeout_s=TIMEOUT_S,
        clock=rig.clock.read,
        call_later=rig.clock.call_later,
    )
    for endpoint in endpoints:
        endpoint.on_permit_free = rig.queue.permit_freed
    return rig


def with_permits(number: int, max_concurrent: int) -> Endpoint:
    return Endpoint("tiny", number, UnixAddress(f"/run/{number}.sock"), max_concurrent=max_concurrent)


def test_only_the_endpoint_that_broke_a_request_is_ejected() -> None:
    dying, alive = with_permits(1, max_concurrent=2), with_permits(2, max_concurrent=1)
    rig = several(dying, alive)
    assert rig.queue.requeue(rig.request("a"), dying, sent=True)
    assert rig.queue.requeue(rig.request("b"), dying, sent=True)
    rig.clock.pass_time(0.0)
    assert rig.served == ["a by 2"]  # the other one, at once, and then it is full
    rig.clock.pass_time(GRACE_S * 0.9)
    assert rig.served == ["a by 2"]
    rig.clock.pass_time(GRACE_S * 0.2)
    assert rig.served == ["a by 2", "b by 1"]


def test_timeout_reports_busy_endpoint_not_ejected_one() -> None:
    dying, busy = with_permits(1, max_concurrent=1), with_permits(2, max_concurrent=1)
    busy.lease(infers=True)
    rig = several(dying, busy)
    entry = rig.request("a")
    entry.deadline_s = rig.clock.now_s + GRACE_S / 2
    assert rig.queue.requeue(entry, dying, sent=False)
    rig.clock.pass_time(GRACE_S / 2)
    ((_, why),) = rig.refused
    assert (why.cause, why.message.partition(";")[0]) == ("busy", "The model is busy with 1 request")


def test_oldest_wait_counts_from_the_start_of_each_wait(
    rig: QueueRig,
) -> None:
    assert rig.queue.oldest_s == float("inf")
    old = rig.request("old")
    rig.clock.pass_time(50.0)
    young = rig.enter("young")
    began_s = rig.clock.now_s
    rig.clock.pass_time(1.0)
    assert rig.queue.requeue(old, generation(1), sent=True)
    assert rig.queue.oldest_s == began_s
    rig.queue.set_limits(timeout_s=1.0, max_waiting=1)  # those who wait stay, and for as long as they could
    rig.clock.pass_time(10.0)
    assert (rig.refused, rig.queue.oldest_s) == ([], began_s)
    rig.queue.leave(young)
    assert rig.queue.oldest_s == began_s + 1.0


def test_default_clock_is_that_of_the_running_loop(rig: QueueRig) -> None:
    async def run() -> None:
        told = asyncio.Event()

        class Told(Client):
            def served(self, lease: Lease) -> None:
                super().served(lease)
                told.set()

        rig.state = generation(1)
        room = RequestQueue(lambda: serving(rig.state), timeout_s=1.0)
        assert room.requeue(QueueEntry(Told(rig, "a"), 0.0, 0), generation(1), sent=True)
        await told.wait()

    asyncio.run(run())
    assert rig.served == ["a by 1"]


# --- its model becomes another one


def test_transferred_requests_keep_their_deadlines(rig: QueueRig) -> None:
    successor = QueueRig(max_waiting=1)
    successor.clock = rig.clock
    successor.queue = RequestQueue(
        lambda: serving(successor.state),
        timeout_s=1.0,
        max_waiting=1,
        clock=rig.clock.read,
        call_later=rig.clock.call_later,
    )
    successor.enter("there")
    first, second = rig.enter("a"), rig.enter("b")
    rig.queue.transfer_to(successor.queue)
    assert (len(rig.queue), len(successor.queue)) == (0, 3)
    rig.clock.pass_time(2.0)
    assert [name for name, _ in successor.refused] == ["there"]
    rig.queue.leave(second)
    assert len(successor.queue) == 1
    successor.becomes(generation(1))
    assert rig.served == ["a by 1"]
    assert first.waited_s == pytest.approx(2.0, abs=0.01)


def test_requeued_request_goes_to_the_successor(rig: QueueRig) -> None:
    successor = QueueRig()
    broken = generation(1)
    rig.becomes(broken)
    entry = rig.enter("a")
    rig.clock.pass_time(0.0)
    assert rig.served == ["a by 1"]
    rig.state = FAILED
    rig.queue.transfer_to(successor.queue)
    assert rig.queue.unqueueable_reason() is None
    assert rig.queue.requeue(entry, broken, sent=True)
    assert len(successor.queue) == 1
    late = rig.request("b")
    assert rig.queue.enter(late) is None
    successor.state = FAILED
    successor.queue.changed()
    assert [name for name, _ in rig.refused] == ["a", "b"]
