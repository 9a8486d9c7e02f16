"""When bytes are written: at once, or at the end of the loop's round; and always in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llamasup.core.proxy.downstream import Downstream
from llamasup.core.proxy.outbox import LATE_BYTES, ROUNDS, TRY_EVERY, WRITES_PER_ROUND, Outbox
from llamasup.core.proxy.settings import Limits, ProxyConfig
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.rig import CHAT, EVENT, STREAM_HEAD, Rig, answer, chunk, eventually, get, post, status

BODY = b'{"model":"tiny"}'


class Transport:
    def __init__(self, name: str, written: list[tuple[str, bytes]]) -> None:
        self._name = name
        self._written = written
        self.closing = False
        self.fails = False

    def write(self, data: bytes) -> None:
        if self.fails:
            raise RuntimeError(self._name)
        self._written.append((self._name, data))

    def abort(self) -> None:
        self._written.append((self._name, b"(aborted)"))

    def is_closing(self) -> bool:
        return self.closing


class Rounds:
    """A loop whose rounds the test ends."""

    def __init__(self) -> None:
        self.written: list[tuple[str, bytes]] = []
        self._soon: list[Callable[[], None]] = []
        self.outbox = Outbox(self._soon.append)
        self.one, self.other = Transport("one", self.written), Transport("other", self.written)

    def end(self) -> int:
        """End the round; returns the number of its callbacks."""
        soon = self._soon[:]
        self._soon.clear()
        for callback in soon:
            callback()
        return len(soon)

    def put(self, count: int) -> None:
        for _ in range(count):
            self.outbox.put(self.one, b".")


def collecting_rounds() -> Rounds:
    rounds = Rounds()
    rounds.put(TRY_EVERY)
    assert rounds.outbox.collects
    rounds.written.clear()
    return rounds


def test_writes_are_made_at_once() -> None:
    rounds = Rounds()
    rounds.put(TRY_EVERY - 1)
    assert not rounds.outbox.collects
    assert rounds.written == [("one", b".")] * (TRY_EVERY - 1)
    assert rounds.end() == 0


def test_collected_writes_are_made_at_the_end_of_the_round() -> None:
    rounds = collecting_rounds()
    for transport, data in ((rounds.one, b"a"), (rounds.other, b"b"), (rounds.one, b"c")):
        rounds.outbox.put(transport, data)
    assert rounds.written == []
    assert rounds.end() == 1
    assert rounds.written == [("one", b"a"), ("other", b"b"), ("one", b"c")]


def test_large_piece_is_written_at_once_and_after_the_earlier_ones() -> None:
    rounds = collecting_rounds()
    large = b"x" * (LATE_BYTES + 1)
    rounds.outbox.put(rounds.one, b"a")
    rounds.outbox.put(rounds.one, large)
    rounds.outbox.put(rounds.one, large[1:])
    assert rounds.written == [("one", b"a"), ("one", large)]
    rounds.end()
    assert rounds.written[2:] == [("one", large[1:])]


def test_flush_writes_what_waits_and_ends_nothing() -> None:
    rounds = collecting_rounds()
    rounds.outbox.put(rounds.one, b"a")
    rounds.outbox.flush()
    rounds.outbox.flush()
    rounds.outbox.put(rounds.one, b"b")
    assert rounds.written == [("one", b"a")]
    rounds.end()
    assert rounds.written == [("one", b"a"), ("one", b"b")]
    assert rounds.outbox.collects


def test_nothing_is_written_to_a_transport_that_has_closed_since() -> None:
    rounds = collecting_rounds()
    rounds.outbox.put(rounds.one, b"a")
    rounds.outbox.put(rounds.other, b"b")
    rounds.one.closing = True
    rounds.end()
    assert rounds.written == [("other", b"b")]


def test_failed_write_ends_only_its_own_connection(caplog: pytest.LogCaptureFixture) -> None:
    rounds = collecting_rounds()
    rounds.outbox.put(rounds.one, b"a")
    rounds.outbox.put(rounds.other, b"b")
    rounds.one.fails = True
    rounds.end()
    assert rounds.written == [("one", b"(aborted)"), ("other", b"b")]
    assert "failed to write" in caplog.text


@pytest.mark.parametrize(("writes", "collects"), [(WRITES_PER_ROUND - 1, False), (WRITES_PER_ROUND, True)])
def test_rounds_of_few_writes_end_the_collecting(writes: int, *, collects: bool) -> None:
    rounds = collecting_rounds()
    for _ in range(ROUNDS):
        assert rounds.outbox.collects
        rounds.put(writes)
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


def only_connection(rig: Rig) -> Downstream:
    eventually(lambda: len(rig.proxy.clients) == 1)
    (connection,) = rig.proxy.clients
    assert isinstance(connection, Downstream)
    return connection


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


@pytest.mark.both_loops
def test_half_close_in_the_round_of_an_answer_does_not_drop_it(busy: Rig) -> None:
    client = busy.connect()
    connection = only_connection(busy)

    def one_round() -> None:  # the calls of the loop for two events of one round
        connection.data_received(get(b"/livez"))
        connection.eof_received()
        connection.transport.close()

    busy.call(one_round)
    assert client.rest().endswith(b'{"status":"ok"}')


def test_busy_proxy_pauses_the_child_of_a_client_that_does_not_read(busy: Rig) -> None:
    client = busy.connect(receive_buffer=1 << 14)
    client.send(post(CHAT, BODY))
    child = busy.accept()
    child.message()
    child.send(STREAM_HEAD)
    child.sock.setblocking(False)
    sent, event = 0, chunk(b"data: " + b"x" * 8000 + b"\n\n")
    unsent = event
    connection = only_connection(busy)
    while not busy.call(lambda: connection.paused):
        try:
            size = child.sock.send(unsent)
        except BlockingIOError:
            continue
        unsent = unsent[size:] or event
        sent += size
        assert sent < 32 << 20
    client.close()
    eventually(lambda: busy.in_flight() == 0)


@pytest.mark.usefixtures("no_cause")
def test_broken_stream_of_a_busy_proxy_ends_with_its_event(busy: Rig) -> None:
    client, child = busy.begin(post(CHAT, BODY))
    child.send(STREAM_HEAD + chunk(b'data: {"a":1}\n\n'))
    client.until(b"\n\n\r\n")
    child.close()
    assert b'"error"' in client.rest()
