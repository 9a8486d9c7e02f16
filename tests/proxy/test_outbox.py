"""When bytes are written: at once, or at the end of the loop's round; and always in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llamasup.proxy.outbox import BUSY_PER_S, LOOK_EVERY, ROUNDS, WRITES_PER_ROUND, Outbox
from llamasup.proxy.settings import Limits, ProxyConfig
from tests.proxy.conftest import MakeRig
from tests.proxy.rig import CHAT, EVENT, STREAM_HEAD, Rig, answer, chunk, eventually, get, post, status

BODY = b'{"model":"tiny"}'


class Transport:
    def __init__(self, name: str, written: list[tuple[str, bytes]]) -> None:
        self._name = name
        self._written = written
        self.closing = False

    def write(self, data: bytes) -> None:
        self._written.append((self._name, data))

    def is_closing(self) -> bool:
        return self.closing


class Rounds:
    """A loop whose rounds the test ends, and a clock that it sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.written: list[tuple[str, bytes]] = []
        self._soon: list[Callable[[], None]] = []
        self.outbox = Outbox(self._soon.append, lambda: self.now_s)
        self.one, self.other = Transport("one", self.written), Transport("other", self.written)

    def end(self) -> int:
        """End the round; returns the number of its callbacks."""
        soon = self._soon[:]
        self._soon.clear()
        for callback in soon:
            callback()
        return len(soon)

    def write_at(self, per_s: float) -> None:
        """Write so many times that the outbox looks at the clock twice."""
        for _ in range(2 * LOOK_EVERY):
            self.outbox.put(self.one, b".")
            self.now_s += 1 / per_s
        self.written.clear()


def test_quiet_proxy_writes_at_once() -> None:
    rounds = Rounds()
    rounds.write_at(BUSY_PER_S * 0.9)
    assert not rounds.outbox.collects
    rounds.outbox.put(rounds.one, b"now")
    assert rounds.written == [("one", b"now")]
    assert rounds.end() == 0


def test_busy_proxy_writes_at_the_end_of_the_round() -> None:
    rounds = Rounds()
    rounds.write_at(BUSY_PER_S * 1.1)
    rounds.end()
    rounds.written.clear()
    for transport, data in ((rounds.one, b"a"), (rounds.other, b"b"), (rounds.one, b"c")):
        rounds.outbox.put(transport, data)
    assert rounds.written == []
    assert rounds.end() == 1
    assert rounds.written == [("one", b"a"), ("other", b"b"), ("one", b"c")]


def test_flush_writes_what_waits_and_ends_nothing() -> None:
    rounds = Rounds()
    rounds.write_at(BUSY_PER_S * 1.1)
    rounds.end()
    rounds.written.clear()
    rounds.outbox.put(rounds.one, b"a")
    rounds.outbox.flush()
    rounds.outbox.flush()
    rounds.outbox.put(rounds.one, b"b")
    assert rounds.written == [("one", b"a")]
    rounds.end()
    assert rounds.written == [("one", b"a"), ("one", b"b")]
    assert rounds.outbox.collects


def test_nothing_is_written_to_a_transport_that_has_closed_since() -> None:
    rounds = Rounds()
    rounds.write_at(BUSY_PER_S * 1.1)
    rounds.end()
    rounds.written.clear()
    rounds.outbox.put(rounds.one, b"a")
    rounds.outbox.put(rounds.other, b"b")
    rounds.one.closing = True
    rounds.end()
    assert rounds.written == [("other", b"b")]


@pytest.mark.parametrize(("writes", "collects"), [(WRITES_PER_ROUND - 1, False), (WRITES_PER_ROUND, True)])
def test_rounds_of_few_writes_end_the_collecting(writes: int, *, collects: bool) -> None:
    rounds = Rounds()
    rounds.write_at(BUSY_PER_S * 1.1)
    rounds.end()
    for _ in range(ROUNDS):
        assert rounds.outbox.collects
        for _ in range(writes):
            rounds.outbox.put(rounds.one, b".")
        rounds.end()
    assert rounds.outbox.collects is collects
    rounds.written.clear()
    rounds.outbox.put(rounds.one, b"now")
    assert rounds.written == ([] if collects else [("one", b"now")])


@pytest.fixture
def busy(make_rig: MakeRig) -> Rig:
    """A proxy that collects its writes, and looks no further."""
    return collecting(make_rig(ProxyConfig(route_by_model=False, limits=Limits(stream_above_bytes=1000))))


def collecting(rig: Rig) -> Rig:
    outbox = rig.proxy.outbox
    outbox.collects = True
    outbox._rounds = ROUNDS + 1
    return rig


def test_collected_answers_stay_in_order(busy: Rig) -> None:
    client = busy.send(post(CHAT, BODY) + get(b"/livez") + post(CHAT, BODY) + get(b"/nowhere", b"Host: x"))
    child = busy.accept()
    for body in (b"first", b"second"):
        child.message()
        child.send(answer(body))
    assert client.message()[1] == b"first"
    assert client.message()[1] == b'{"status":"ok"}'
    assert client.message()[1] == b"second"
    assert status(client.head()) == 400
    assert busy.proxy.outbox.collects


def test_collected_stream_is_complete_before_its_connection_closes(busy: Rig) -> None:
    client, child = busy.begin(post(CHAT, BODY, b"Connection: close"))
    child.send(STREAM_HEAD + EVENT)
    client.until(EVENT)
    child.send(EVENT, EVENT, b"0\r\n\r\n")
    assert client.rest() == EVENT + EVENT + b"0\r\n\r\n"


def test_collected_head_precedes_the_body_that_is_forwarded(busy: Rig) -> None:
    body = b'{"model":"tiny","prompt":"' + b"x" * 5000 + b'"}'
    client = busy.send(post(CHAT, body)[:3000])
    child = busy.accept()
    child.head()
    client.send(post(CHAT, body)[3000:])
    assert child.receive(len(body)) == body
    child.send(answer(b"done"))
    assert client.message()[1] == b"done"


def test_client_that_leaves_a_busy_proxy_frees_its_slot(busy: Rig) -> None:
    client, child = busy.begin(post(CHAT, BODY))
    client.close()
    assert child.sees_the_end()
    child.close()
    eventually(lambda: busy.in_flight() == 0)


def test_broken_stream_of_a_busy_proxy_ends_with_its_event(busy: Rig) -> None:
    client, child = busy.begin(post(CHAT, BODY))
    child.send(STREAM_HEAD + chunk(b'data: {"a":1}\n\n'))
    client.until(b"\n\n\r\n")
    child.close()
    assert b'"error"' in client.rest()
