"""Two replicas of one model: which one gets a request, and a crash that clients do not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ResolvedModel
from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.supervision.states import Policy
from tests.core.pool.replicas.replica_sets import LOADING, Replica, served_model
from tests.core.pool.replicas.test_replica_set import talk
from tests.core.proxy.rig import CHAT, STREAM_HEAD, Rig, Wire, answer, chunk, post, status
from tests.kit.backends import Unlisted

EVENT = chunk(b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n')


class Backend(Unlisted):
    """One model with two replicas."""

    def __init__(self, served: ReplicaSet) -> None:
        self.served = served

    def readiness(self) -> HttpError | None:
        state = self.served.serving()
        return state if isinstance(state, HttpError) else None

    def resolve(self, model: str | None, *, create: bool = False, local: bool = False) -> Any:
        return SimpleNamespace(model=ResolvedModel(("tiny",)), served=self.served)


class Pair:
    """The proxy of the rig, and two children that the test plays."""

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
        return self.rig.send(post(CHAT, body))

    def accept(self, which: int) -> Wire:
        """The proxy's next connection to this child."""
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


def test_unanswered_request_is_sent_to_the_other_replica(pair: Pair) -> None:
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
    assert record.waited_s == 0.0  # one replica served all the time


def test_closed_connection_alone_moves_request_to_other_replica(pair: Pair) -> None:
    """The closed connection is usually noticed before the end of the process."""
    client = pair.ask(b"{}")
    dying = pair.accept(0)
    dying.message()
    dying.close()
    second = pair.accept(1)
    second.message()
    second.send(answer(b"by the other"))
    assert client.message()[1] == b"by the other"


def test_requests_of_crashed_replica_move_as_permits_are_free(pair: Pair) -> None:
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
    for child in kept:  # their connections are reused, in any order
        body = child.message()[1]
        assert body in lost
        child.send(answer(body))
    assert [client.message()[1] for client in clients] == [b"0", b"1", b"2", b"3"]


def test_disconnect_after_move_reaches_the_other_replica(make_pair: MakePair) -> None:
    """With one permit each, the permit that the first replica loses makes the other one take over at once."""
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


def test_request_that_crashes_both_replicas_is_not_sent_a_third_time(pair: Pair) -> None:
    client = pair.ask(b"poison")
    pair.accept(0).message()
    pair.crashes(0)
    pair.accept(1).message()
    pair.crashes(1)
    head, _ = client.message()
    assert status(head) == 503


def test_broken_stream_is_not_moved_to_other_replica(pair: Pair) -> None:
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


def test_restarted_replica_gets_requests_again(pair: Pair) -> None:
    pair.crashes(0)
    pair.asks_and_is_answered_by(1, b"{}")
    pair.asks_and_is_answered_by(1, b"{}")
    pair.rig.call(pair.replicas[0].becomes_ready)
    pair.asks_and_is_answered_by(0, b"{}")


def test_conversation_goes_to_replica_with_its_beginning(pair: Pair) -> None:
    pair.asks_and_is_answered_by(0, talk("llamas " * 10))
    pair.asks_and_is_answered_by(1, talk("alpacas " * 10))
    pair.asks_and_is_answered_by(1, talk("alpacas " * 10, "yes", "and?"))
    pair.asks_and_is_answered_by(1, talk("alpacas " * 10, "yes", "and?", "so", "on"))
    pair.asks_and_is_answered_by(0, talk("llamas " * 10, "no", "but?"))


def test_with_both_replicas_full_request_takes_the_first_free_permit(make_pair: MakePair) -> None:
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


def test_crash_without_wait_is_invisible_to_client(make_pair: MakePair) -> None:
    pair = make_pair(policy=Policy(wait_timeout_s=0.0))
    client = pair.ask(b"{}")
    pair.accept(0).message()
    pair.crashes(0)
    second = pair.accept(1)
    second.message()
    second.send(answer(b"by the other"))
    assert client.message()[1] == b"by the other"
