"""Two processes of one model behind the proxy: who gets what, and what clients see of a crash (nothing)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamasup.models.access import ResolvedModel
from llamasup.pool.replicas.replica_set import ReplicaSet
from llamasup.queueing.endpoint import Lease, Unavailable
from llamasup.queueing.wait_queue import RequestQueue
from llamasup.supervision.states import Policy
from tests.pool.replicas.replica_sets import LOADING, Replica, served_model
from tests.pool.replicas.test_replica_set import talk
from tests.proxy.rig import CHAT, STREAM_HEAD, Rig, Wire, answer, chunk, post, status

EVENT = chunk(b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n')


class Backend:
    """One model with two processes."""

    def __init__(self, served: ReplicaSet) -> None:
        self.served = served

    def lease(self, model: str | None, *, infers: bool = False, body: bytes = b"") -> Lease | Unavailable:
        return self.served.lease(infers=infers, body=body)

    def room(self, model: str | None) -> RequestQueue:
        return self.served.queue

    def readiness(self) -> Unavailable | None:
        state = self.served.serving()
        return state if isinstance(state, Unavailable) else None

    def meant(self, model: str | None) -> ResolvedModel:
        return ResolvedModel(("tiny",))

    def listing(self) -> None:
        return None


class Pair:
    """The rig's proxy before two children, each of which is this test."""

    def __init__(
        self, rig: Rig, folder: Path, *, max_concurrent: int = 2, policy: Policy | None = None
    ) -> None:
        self.rig = rig
        self.served = served_model(policy)
        self.replicas: list[Replica] = []
        self._sockets = []
        for n in (0, 1):
            path = str(folder / f"replica-{n}.sock")
            self._sockets.append(rig.listen(path))
            self.replicas.append(Replica(self.served, path, max_concurrent=max_concurrent))
        rig.call(self._serve)

    def _serve(self) -> None:
        self.rig.proxy.backend = Backend(self.served)
        for replica in self.replicas:
            replica.becomes_ready()

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()

    def ask(self, body: bytes) -> Wire:
        client = self.rig.connect()
        client.send(post(CHAT, body))
        return client

    def accept(self, which: int) -> Wire:
        """The proxy's next connection to this one."""
        return self.rig.keep(Wire(self._sockets[which].accept()[0]))

    def asks_and_is_answered_by(self, which: int, body: bytes) -> None:
        client = self.ask(body)
        child = self.accept(which)
        assert child.message()[1] == body
        child.send(answer(b"%d" % which, b"Connection: close"))
        assert client.message()[1] == b"%d" % which
        client.close()

    def crashes(self, which: int) -> None:
        self.rig.call(lambda: self.replicas[which].becomes(LOADING))


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(rig: Rig, tmp_path: Path) -> Iterator[MakePair]:
    made: list[Pair] = []

    def make(**options: Any) -> Pair:
        made.append(Pair(rig, tmp_path, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    return make_pair()


def test_what_has_no_answer_yet_is_answered_by_the_other_one(pair: Pair) -> None:
    client = pair.ask(b"{}")
    pair.accept(0).message()
    pair.crashes(0)
    second = pair.accept(1)
    assert second.message()[1] == b"{}"
    second.send(answer(b"by the other"))
    head, body = client.message()
    assert (status(head), body) == (200, b"by the other")
    record = pair.rig.record()
    assert (record.outcome, record.status, record.replayed) == ("ok", 200, True)
    assert record.waited_s == 0.0  # one served all the while


def test_the_end_of_a_connection_is_enough(pair: Pair) -> None:
    """It is mostly seen before the end of the process: the other one has the request by then."""
    client = pair.ask(b"{}")
    dying = pair.accept(0)
    dying.message()
    dying.close()
    second = pair.accept(1)
    second.message()
    second.send(answer(b"by the other"))
    assert client.message()[1] == b"by the other"


def test_all_that_one_had_in_flight_goes_to_the_other_as_it_has_places(pair: Pair) -> None:
    clients = [pair.ask(b"%d" % n) for n in range(4)]
    lost = [pair.accept(0).message()[1] for _ in range(2)]
    kept = [pair.accept(1) for _ in range(2)]
    bodies = [child.message()[1] for child in kept]
    pair.crashes(0)
    assert sorted(lost + bodies) == [b"0", b"1", b"2", b"3"]
    while pair.rig.call(lambda: len(pair.served.queue)) != 2:
        pass  # the other one is full
    for child, body in zip(kept, bodies, strict=True):
        child.send(answer(body))
    for child in kept:  # whose connections are used again, in whatever order
        body = child.message()[1]
        assert body in lost
        child.send(answer(body))
    assert [client.message()[1] for client in clients] == [b"0", b"1", b"2", b"3"]


def test_a_client_that_leaves_is_noticed_by_the_process_that_took_over(make_pair: MakePair) -> None:
    """With one place each, the place that the first one loses is what has the other one take over at once."""
    pair = make_pair(max_concurrent=1)
    client = pair.ask(b"{}")
    pair.accept(0).message()
    pair.crashes(0)
    second = pair.accept(1)
    second.message()
    client.close()
    assert second.sees_the_end()
    assert pair.rig.record().outcome == "client_gone"
    assert pair.rig.call(lambda: pair.served.in_flight) == 0


def test_a_request_that_ends_both_is_not_sent_a_third_time(pair: Pair) -> None:
    client = pair.ask(b"poison")
    pair.accept(0).message()
    pair.crashes(0)
    pair.accept(1).message()
    pair.crashes(1)
    head, _ = client.message()
    assert status(head) == 503


def test_a_stream_that_breaks_in_the_middle_ends_as_it_does_with_one(pair: Pair) -> None:
    client = pair.ask(b'{"stream":true}')
    child = pair.accept(0)
    child.message()
    child.send(STREAM_HEAD + EVENT)
    client.head()
    client.until(EVENT)
    pair.crashes(0)
    rest = client.rest()
    assert b'"generation_ended"' in rest
    assert not rest.endswith(b"0\r\n\r\n")


def test_one_that_crashed_gets_requests_again_when_it_serves_again(pair: Pair) -> None:
    pair.crashes(0)
    pair.asks_and_is_answered_by(1, b"{}")
    pair.asks_and_is_answered_by(1, b"{}")
    pair.rig.call(pair.replicas[0].becomes_ready)
    pair.asks_and_is_answered_by(0, b"{}")


def test_a_conversation_finds_the_process_that_has_its_beginning(pair: Pair) -> None:
    pair.asks_and_is_answered_by(0, talk("llamas " * 10))
    pair.asks_and_is_answered_by(1, talk("alpacas " * 10))
    pair.asks_and_is_answered_by(1, talk("alpacas " * 10, "yes", "and?"))
    pair.asks_and_is_answered_by(1, talk("alpacas " * 10, "yes", "and?", "so", "on"))
    pair.asks_and_is_answered_by(0, talk("llamas " * 10, "no", "but?"))


def test_with_both_full_the_next_waits_for_whichever_is_free_first(make_pair: MakePair) -> None:
    pair = make_pair(max_concurrent=1)
    clients = [pair.ask(b"0"), pair.ask(b"1")]
    children = [pair.accept(0), pair.accept(1)]
    for child in children:
        child.message()
    waits = pair.ask(b"2")
    while pair.rig.call(lambda: len(pair.served.queue)) != 1:
        pass
    children[1].send(answer(b"done"))
    assert children[1].message()[1] == b"2"
    children[1].send(answer(b"served"))
    assert waits.message()[1] == b"served"
    children[0].send(answer(b"done"))
    assert {client.message()[1] for client in clients} == {b"done"}


def test_without_waiting_a_crash_is_as_little_seen(make_pair: MakePair) -> None:
    pair = make_pair(policy=Policy(wait_timeout_s=0.0))
    client = pair.ask(b"{}")
    pair.accept(0).message()
    pair.crashes(0)
    second = pair.accept(1)
    second.message()
    second.send(answer(b"by the other"))
    assert client.message()[1] == b"by the other"
