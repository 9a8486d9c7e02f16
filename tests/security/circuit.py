"""A client, the proxy and a child in one loop and one thread: the same bytes always take the same course.

Sockets are real, so that what is tested is what strangers reach, whatever lies behind it. ``send`` returns
when all has come to rest: nothing has moved in the last rounds of the loop. It waits for no time to pass.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import h11

from llamasup.core.http.address import UnixAddress
from llamasup.core.observability.counters import RequestRecord
from llamasup.core.proxy import Proxy, ProxyConfig
from llamasup.core.queueing.endpoint import Endpoint
from tests.core.proxy.rig import OneModel

__all__ = ["Answering", "Circuit", "Outcome", "Received"]

Answering = Callable[["Received"], bytes]
"""The bytes with which the child answers a request."""

_ROUNDS_AT_REST = 8  # a connection to the child takes three rounds in which no byte moves


@dataclass(frozen=True, slots=True)
class Received:
    """A request as a strict server reads it; ``headers`` without those that frame it."""

    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of some bytes: what the child was asked, in order, and what the client was told."""

    asked: tuple[Received, ...]
    told: bytes
    closed: bool


class Circuit:
    """Make one, talk to it as often as you like, close it."""

    def __init__(self, folder: Path, config: ProxyConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._answer: Answering = _ok
        self._closing = False
        self._late = b""
        self._first: asyncio.Transport | None = None
        self._front = str(folder / "front.sock")
        self.moved = 0
        self.asked: list[Received] = []
        self.malformed: list[str] = []
        self.records: list[RequestRecord] = []
        self._loop.run_until_complete(self._start(str(folder / "child.sock"), config))

    async def _start(self, path: str, config: ProxyConfig) -> None:
        self._child = await self._loop.create_unix_server(lambda: _Child(self), path)
        endpoint = Endpoint("tiny", 1, UnixAddress(path), "own-key")
        self._proxy = Proxy(
            OneModel(endpoint, wait_timeout_s=0.0, max_queued=0), config, on_finished=self.records.append
        )
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(self._front)
        listening.listen()
        await self._proxy.start([listening])

    def close(self) -> None:
        self._loop.run_until_complete(self._proxy.aclose())
        self._child.close()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def stop_clock(self) -> None:
        """No time passes any more for what keys may use in a minute."""
        self._proxy.keys.clock = lambda: 0.0

    def send(
        self, pieces: Iterable[bytes], answer: Answering | None = None, *, closing: bool = False
    ) -> Outcome:
        """What becomes of ``pieces`` on a connection of their own, each read by itself.

        ``answer`` is what the child says, which then keeps its connection unless it is ``closing``.
        """
        self.asked.clear()
        self.malformed.clear()
        self.records.clear()
        self._answer = answer or _ok
        self._closing = closing
        self._late = b""
        return self._loop.run_until_complete(self._send(pieces))

    def send_two(self, method: bytes, early: bytes, late: bytes, *, idle: bool) -> tuple[Outcome, Outcome]:
        """What two clients get, one after the other, where the child's first answer is ``early + late``.

        The child sends ``late`` before it answers the second request: when that request has arrived or, if
        ``idle``, before the second client sends it. It answers the second request correctly, with the body 1.
        """
        self.asked.clear()
        self.malformed.clear()
        self.records.clear()
        self._closing = False
        self._answer = lambda received: early if received.target == b"/first" else _ok(received)
        self._late = late
        return self._loop.run_until_complete(self._send_two(method, idle=idle))

    async def _send_two(self, method: bytes, *, idle: bool) -> tuple[Outcome, Outcome]:
        connections = []
        for target, head in ((b"/first", method + b" /first"), (b"/second", b"POST /second")):
            if idle and target == b"/second":
                self._send_late()
                await self._rest()
            transport, client = await self._loop.create_unix_connection(lambda: _Client(self), self._front)
            transport.write(head + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx")
            await self._rest()
            connections.append((transport, client))
        found = tuple(
            Outcome(tuple(self.asked), bytes(client.told), client.closed) for _, client in connections
        )
        for transport, _ in connections:
            transport.abort()
        await self._rest()
        return found[0], found[1]

    def _send_late(self) -> None:
        if self._late and self._first is not None:
            self._first.write(self._late)
        self._late = b""

    async def _send(self, pieces: Iterable[bytes]) -> Outcome:
        transport, client = await self._loop.create_unix_connection(lambda: _Client(self), self._front)
        for piece in pieces:
            if client.closed:
                break
            transport.write(piece)
            await self._rest()
        await self._rest()
        outcome = Outcome(tuple(self.asked), bytes(client.told), client.closed)
        transport.abort()
        await self._rest()
        return outcome

    async def _rest(self) -> None:
        quiet_rounds = 0
        while quiet_rounds < _ROUNDS_AT_REST:
            moved = self.moved
            await asyncio.sleep(0)
            quiet_rounds = quiet_rounds + 1 if self.moved == moved else 0

    def answer(self, request: Received, transport: asyncio.Transport) -> None:
        if request.target == b"/first":
            self._first = transport
        elif request.target == b"/second":
            self._send_late()
        transport.write(self._answer(request))
        if self._closing:
            transport.close()


def _ok(request: Received) -> bytes:
    body = b"" if request.method == b"HEAD" else b"%d" % len(request.body)
    length = 1 if request.method == b"HEAD" else len(body)
    return b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Length: %d\r\n\r\n%b" % (length, body)


class _Client(asyncio.Protocol):
    def __init__(self, circuit: Circuit) -> None:
        self._circuit = circuit
        self.told = bytearray()
        self.closed = False

    def data_received(self, data: bytes) -> None:
        self._circuit.moved += 1
        self.told += data

    def eof_received(self) -> bool:
        self._circuit.moved += 1
        self.closed = True
        return True  # what is still to be sent may be sent

    def connection_lost(self, exc: Exception | None) -> None:
        self._circuit.moved += 1
        self.closed = True


class _Child(asyncio.Protocol):
    """A server that reads with h11: what that refuses, no proxy may send."""

    transport: asyncio.Transport

    def __init__(self, circuit: Circuit) -> None:
        self._circuit = circuit
        self._reader = h11.Connection(h11.SERVER)
        self._request: h11.Request | None = None
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._circuit.moved += 1

    def data_received(self, data: bytes) -> None:
        self._circuit.moved += 1
        try:
            self._reader.receive_data(data)
            self._read_on()
        except h11.RemoteProtocolError as error:
            self._circuit.malformed.append(f"{error}: {data!r}")
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._circuit.moved += 1

    def _read_on(self) -> None:
        while True:
            event = self._reader.next_event()
            if isinstance(event, h11.Request):
                self._request, self._body = event, b""
            elif isinstance(event, h11.Data):
                self._body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self._complete(event)
                return
            else:
                return

    def _complete(self, end: h11.EndOfMessage) -> None:
        assert self._request is not None
        if left := self._reader.trailing_data[0]:
            self._circuit.malformed.append(f"more than a request: {left!r}")
        if end.headers:
            self._circuit.malformed.append(f"trailers: {end.headers!r}")
        request = self._request
        headers = tuple(
            (name, value)
            for name, value in request.headers
            if name not in (b"content-length", b"transfer-encoding")
        )
        received = Received(request.method, request.target, headers, self._body)
        self._circuit.asked.append(received)
        # A new reader instead of h11's own next cycle: the answers are not always what h11 would write.
        self._reader = h11.Connection(h11.SERVER)
        self._circuit.answer(received, self.transport)
