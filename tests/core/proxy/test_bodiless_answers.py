"""Responses without a body, whatever their head announces, leave no bytes for the next request (S20)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamasup.core.proxy import ProxyConfig
from tests.core.proxy.rig import Rig, Wire, answer, get, status
from tests.security.circuit import Circuit

STATUSES = {
    "100": b"100 Continue",
    "101": b"101 Switching Protocols",
    "102": b"102 Processing",
    "103": b"103 Early Hints",
    "204": b"204 No Content",
    "205": b"205 Reset Content",
    "304": b"304 Not Modified",
    "HEAD": b"200 OK",
}
FRAMINGS = {
    "nothing": b"",
    "a length of 0": b"Content-Length: 0\r\n",
    "a length of 5": b"Content-Length: 5\r\n",
    "chunks": b"Transfer-Encoding: chunked\r\n",
    "both": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
}
WRONG = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"
BODIES = {
    "no body": b"",
    "five bytes": b"hello",
    "a last chunk": b"0\r\n\r\n",
    "a response": WRONG,
}


@pytest.fixture
def circuit(tmp_path: Path) -> Iterator[Circuit]:
    made = Circuit(tmp_path, ProxyConfig())
    yield made
    made.close()


@pytest.mark.check("X9", "the next answer is complete and correct")
@pytest.mark.parametrize("framing", FRAMINGS.values(), ids=FRAMINGS)
@pytest.mark.parametrize("code", STATUSES)
def test_no_announced_body_of_a_bodiless_response_reaches_the_next_request(
    circuit: Circuit, code: str, framing: bytes
) -> None:
    head = b"HTTP/1.1 " + STATUSES[code] + b"\r\n" + framing + b"\r\n"
    final = answer(b"final") if code.startswith("1") else b""
    keeps = code in ("204", "304") and framing in (FRAMINGS["nothing"], FRAMINGS["a length of 0"])
    cuts = [(head + WRONG + final, at) for at in range(len(head))]
    for body in BODIES.values():
        cuts += [(head + body + final, at) for at in range(len(head), len(head + body + final) + 1)]
    for raw, at in cuts:
        # Late bytes arrive with the second request, or while the connection would be idle. If the head
        # announces no body, late bytes differ from an answer only in the second case.
        for idle in (True, False)[: 1 if keeps else 2] if at >= len(head) else (keeps,):
            _, second = circuit.send_two(b"HEAD" if code == "HEAD" else b"GET", raw[:at], raw[at:], idle=idle)
            head_of_second, _, body_of_second = second.told.partition(b"\r\n\r\n")
            found = (raw[:at], raw[at:], second.told)
            assert status(head_of_second) == 200, found
            assert body_of_second == b"1", found


@pytest.mark.check("X9", "the connection to llama-server is closed")
@pytest.mark.parametrize("body", [b"", b"0\r\n\r\n"], ids=["later", "with its head"])
def test_204_that_announces_chunks_is_forwarded(rig: Rig, body: bytes) -> None:
    client = rig.connect()
    for _ in range(3):
        client.send(get())
        child = rig.accept()
        child.head()
        child.send(b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        head = client.head()
        assert status(head) == 204
        assert b"ransfer-" not in head
        assert child.sees_the_end()


def test_final_answer_after_interim_one_is_forwarded_and_its_connection_closed(rig: Rig) -> None:
    client = rig.connect()
    for body in (b"first", b"other"):  # of the same length, so that the pool knows the head
        client.send(get())
        child = rig.accept()
        child.head()
        child.send(b"HTTP/1.1 103 Early Hints\r\nContent-Length: 5\r\n\r\n")
        child.send(answer(body))
        assert client.message()[1] == body
        assert child.sees_the_end()


@pytest.mark.check("X9", "the request is sent on another connection")
def test_bytes_that_arrive_with_a_request_are_not_its_answer(rig: Rig) -> None:
    """Both are in the kernel before the loop reads, the request first."""
    client, first = rig.begin(get())
    first.send(answer())
    client.message()
    rig.record()
    with paused_loop(rig):
        client.send(get())
        first.send(WRONG)
    second = rig.accept()
    second.head()
    second.send(answer(b"right"))
    assert client.message()[1] == b"right"
    assert first.sees_the_end()


def test_connection_closed_just_before_request_is_not_used(rig: Rig) -> None:
    client, first = rig.begin(get())
    first.send(answer())
    client.message()
    rig.record()
    with paused_loop(rig):
        client.send(get())
        first.close()
    second: Wire = rig.accept()
    second.head()
    second.send(answer(b"right"))
    assert client.message()[1] == b"right"


class paused_loop:
    """Stops the event loop of the proxy."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._holds, self._go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=rig.call, args=(self._hold,))

    def _hold(self) -> None:
        self._holds.set()
        self._go_on.wait(60.0)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._holds.wait(60.0)

    def __exit__(self, *_: object) -> None:
        self._go_on.set()
        self._thread.join(60.0)
