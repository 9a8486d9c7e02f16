"""llama-server's side: one keep-alive connection, and the pool of idle ones that each endpoint has.

What llama-server does (b11434): closes a connection after 5 s idle, after 100 requests, and after every status
≥ 400. A build with a fixed number of HTTP threads serves a new connection only when an old one closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

import httptools

from llamasup.core.address import UnixAddress
from llamasup.runtime.endpoint import Endpoint

if TYPE_CHECKING:
    from llamasup.proxy.exchange import Exchange
    from llamasup.proxy.tasks import Tasks

__all__ = ["Pool", "Upstream"]

IDLE_S: Final = (
    4.0  # llama-server closes at 5 s: leave before it does, so that no request meets a closing door
)
REQUESTS_PER_CONNECTION: Final = 100
PATIENCE_S: Final = 0.25
MAX_IDLE: Final = (
    64  # a llama-server thread sits behind each; more slots than this are not run on one machine
)
COPY_BYTES: Final = 64 * 1024  # below it, copying a body behind its head is cheaper than a second system call
MAX_HEAD_BYTES: Final = 64 * 1024

_HEAD, _LENGTH, _CHUNKED, _UNTIL_CLOSE = range(4)

# Framing and persistence are ours; CORS is decided at our door (X3), not by llama-server, which answers every Origin.
_DROPPED = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"te",
        b"trailer",
        b"upgrade",
        b"x-request-id",
        b"access-control-allow-origin",
        b"access-control-allow-credentials",
        b"access-control-allow-methods",
        b"access-control-allow-headers",
    }
)


class Upstream(asyncio.Protocol):
    """One connection to a child, serving one exchange at a time.

    The body is relayed as it was read; the parser only finds its end (no ``on_body``, so nothing is copied).
    """

    __slots__ = (
        "_chunked_te",
        "_complete",
        "_content_length",
        "_excess",
        "_feed",
        "_headers_complete",
        "_keep_alive",
        "_mode",
        "_parser",
        "_partial_head",
        "_paused",
        "_remaining",
        "exchange",
        "idle_since",
        "lines",
        "pool",
        "proven",
        "served",
        "status",
        "streams_events",
        "transport",
    )

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.exchange: Exchange | None = None
        self.transport: asyncio.Transport | None = None
        self.served = 0
        self.proven = False  # it has answered at least once
        self.idle_since = 0.0
        self.status = 0
        self.lines: list[bytes] = []
        self.streams_events = False
        self._parser = httptools.HttpResponseParser(self)
        self._feed: Callable[[bytes], None] = self._parser.feed_data
        self._mode = _HEAD
        self._partial_head = b""
        self._paused = False
        self._reset()

    def _reset(self) -> None:
        self._mode = _HEAD
        self._content_length: bytes | None = None
        self._chunked_te = False
        self._headers_complete = False
        self._complete = False
        self._excess = False
        self._keep_alive = False
        self._remaining = 0
        self.lines = []
        self.streams_events = False

    # --- what the exchange asks for

    def send(self, exchange: Exchange) -> None:
        """Write the request of ``exchange`` and relay the answer to it."""
        self.exchange = exchange
        self.served += 1
        if not self.proven:
            self.pool.waits(self, exchange.sent_at)
        transport = self.transport
        assert transport is not None  # noqa: S101 - only connected ones are handed out
        head, body = exchange.upstream_head, exchange.body
        if len(body) < COPY_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    def pause(self) -> None:
        """Read no more until ``resume``: the client does not keep up."""
        if not self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def abort(self) -> None:
        """Let go at once: the child sees the end of the connection and cancels."""
        self._detach()
        if self.transport is not None:
            self.transport.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop"s are no subclasses of it

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # bytes that nobody asked for: this connection cannot be trusted
            self.abort()
            return
        mode = self._mode
        if mode == _CHUNKED:
            try:
                self._feed(data)
            except httptools.HttpParserError:
                self._broken(exchange, "sent a malformed chunk")
                return
            if not self._complete:
                exchange.relay(data)
            elif self._ends_cleanly(exchange, data):
                exchange.relay(data)
                self._finish(exchange)
            else:
                self._broken(exchange, "sent more than its response")
        elif mode == _HEAD:
            self._head_received(exchange, data)
        elif mode == _LENGTH:
            self._remaining -= len(data)
            if self._remaining < 0:
                self._broken(exchange, "sent more than its Content-Length")
                return
            exchange.relay(data)
            if not self._remaining:
                # The parser has seen the head alone: feed it no further, and let the next request have a fresh one.
                self._renew_parser()
                self._finish(exchange)
        else:
            exchange.relay(data)

    def eof_received(self) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        if self._mode == _UNTIL_CLOSE:
            self._keep_alive = False
            self._finish(exchange)
        else:
            self._broken(exchange, "closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        exchange = self.exchange
        if exchange is not None:
            self._broken(exchange, f"closed the connection ({exc})" if exc else "closed the connection")
        self.pool.forget(self)
        # The parser holds our methods: without this the pair would wait for the cycle collector.
        del self._feed, self._parser

    # --- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headers_complete:
            return  # a trailer; it passes with the body's bytes
        lower = name.lower()
        if lower in _DROPPED:
            return
        if lower == b"content-length":
            self._content_length = value
        elif lower == b"transfer-encoding":
            self._chunked_te = value.strip().lower() == b"chunked"
            self._excess |= not self._chunked_te  # a coding that we cannot follow
        else:
            if lower == b"content-type" and value.startswith(b"text/event-stream"):
                self.streams_events = True
            self.lines.append(name + b": " + value + b"\r\n")

    def on_headers_complete(self) -> None:
        if self._headers_complete:
            self._excess = True  # a second response
        self._headers_complete = True
        self.status = self._parser.get_status_code()
        self._keep_alive = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        self._complete = True

    # --- the head, and the end

    def _head_received(self, exchange: Exchange, data: bytes) -> None:
        exchange.answered = True
        if self._partial_head:
            data, self._partial_head = self._partial_head + data, b""
        end = data.find(b"\r\n\r\n") + 4
        while data.startswith(b"HTTP/1.1 1") and end > 3:  # 100, 102, 103: nobody waits for them here
            if data.startswith(b"HTTP/1.1 101"):
                self._broken(exchange, "switched protocols unasked")
                return
            data = data[end:]
            end = data.find(b"\r\n\r\n") + 4
        if end == 3:
            if len(data) > MAX_HEAD_BYTES:
                self._broken(exchange, "sent a head of more than 64 KiB")
                return
            self._partial_head = data
            return
        try:
            self._feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._broken(exchange, f"sent a malformed response ({error})")
            return
        if not self._headers_complete or self._excess:
            self._broken(exchange, "sent a malformed response")
            return
        if not self.proven:
            self.proven = True
            self.pool.waits_no_more(self)
        self._begin(exchange, data[end:])

    def _begin(self, exchange: Exchange, body: bytes) -> None:
        """Choose the framing, hand the head on, and with it the first bytes of the body."""
        if exchange.is_head or self.status in (204, 304):
            length = self._content_length if self.status != 204 else None
            if body:
                self._broken(exchange, "sent a body where none may be")
                return
            if exchange.is_head:
                self._keep_alive = False  # the parser waits for a body that a HEAD does not have
            framing = b"" if length is None else b"Content-Length: " + length + b"\r\n"
            exchange.begin(self, framing, b"")
            self._finish(exchange)
        elif self._chunked_te:
            if self._complete and not self._ends_cleanly(exchange, body):
                self._broken(exchange, "sent more than its response")
                return
            self._mode = _CHUNKED
            exchange.begin(self, b"Transfer-Encoding: chunked\r\n", body)
            if self._complete:
                self._finish(exchange)
        elif self._content_length is not None:
            remaining = int(self._content_length) - len(body)
            if remaining < 0:
                self._broken(exchange, "sent more than its Content-Length")
                return
            self._mode = _LENGTH
            self._remaining = remaining
            exchange.begin(self, b"Content-Length: " + self._content_length + b"\r\n", body)
            if not remaining:
                self._finish(exchange)
        else:
            self._mode = _UNTIL_CLOSE
            exchange.begin(self, None, body)

    def _ends_cleanly(self, exchange: Exchange, data: bytes) -> bool:
        """Whether a chunked body that the parser found complete ends where ``data`` ends.

        A last chunk or trailer ends in one empty line; the parser would skip stray CRLFs and start on a next response.
        """
        end = data if len(data) >= 5 else exchange.last_bytes() + data
        return not self._excess and end.endswith(b"\r\n\r\n") and end[-5:-4] not in b"\r\n"

    def _renew_parser(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data

    def _finish(self, exchange: Exchange) -> None:
        """The response is whole: give the connection back, then let the exchange go on."""
        self.exchange = None
        if self._paused:
            self.resume()
        transport = self.transport
        reusable = (
            self._keep_alive
            and self.status < 400
            and self.served < REQUESTS_PER_CONNECTION
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()  # answered before it had read the whole request
        )
        self._reset()
        if not reusable or not self.pool.give(self):
            if transport is not None:
                transport.abort()
        exchange.finished()

    def _broken(self, exchange: Exchange, what: str) -> None:
        self.abort()
        exchange.upstream_broke(what)

    def _detach(self) -> None:
        if self.exchange is not None:
            self.exchange = None
            self.pool.waits_no_more(self)


class Pool:
    """The idle connections to one endpoint, last in first out, and the making of new ones."""

    __slots__ = ("_clock", "_connect_s", "_endpoint", "_idle", "_loop", "_tasks", "_waiting")

    def __init__(
        self,
        endpoint: Endpoint,
        loop: asyncio.AbstractEventLoop,
        tasks: Tasks,
        clock: Callable[[], float],
        connect_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._loop = loop
        self._tasks = tasks
        self._clock = clock
        self._connect_s = connect_s
        self._idle: list[Upstream] = []
        self._waiting: dict[Upstream, float] = {}  # since when new ones wait for their first answer, oldest first

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, now: float) -> Upstream | None:
        """The connection that was idle for the shortest time, if it is young enough to be trusted."""
        idle = self._idle
        while idle:
            upstream = idle.pop()
            transport = upstream.transport
            if transport is not None and not transport.is_closing():
                if now - upstream.idle_since < IDLE_S:
                    return upstream
                transport.abort()
        return None

    def give(self, upstream: Upstream) -> bool:
        """Keep an idle connection for the next request; False if it should be closed instead.

        Once a new connection has waited for its first answer for a while, those that come free are closed: in
        builds with a fixed number of HTTP threads an idle connection holds the very thread that it waits for.
        """
        now = self._clock()
        if self._endpoint.closed or len(self._idle) >= MAX_IDLE or self._someone_waits(now):
            return False
        upstream.idle_since = now
        self._idle.append(upstream)
        return True

    def waits(self, upstream: Upstream, now: float) -> None:
        self._waiting[upstream] = now

    def waits_no_more(self, upstream: Upstream) -> None:
        self._waiting.pop(upstream, None)

    def _someone_waits(self, now: float) -> bool:
        return bool(self._waiting) and now - next(iter(self._waiting.values())) > PATIENCE_S

    def forget(self, upstream: Upstream) -> None:
        if upstream in self._idle:
            self._idle.remove(upstream)

    def connect(self, exchange: Exchange) -> None:
        """Make a connection for ``exchange``; it hears ``connected`` or ``connect_failed``."""
        self._tasks.start(self._connect(exchange), f"connect to {self._endpoint.address.url}")

    async def _connect(self, exchange: Exchange) -> None:
        address = self._endpoint.address
        try:
            async with asyncio.timeout(self._connect_s):
                if isinstance(address, UnixAddress):
                    _, upstream = await self._loop.create_unix_connection(
                        lambda: Upstream(self), address.path
                    )
                else:
                    _, upstream = await self._loop.create_connection(
                        lambda: Upstream(self), address.host, address.port
                    )
        except (OSError, TimeoutError) as error:
            exchange.connect_failed(error)
            return
        if exchange.over or self._endpoint.closed:  # its client left, or the generation went
            upstream.abort()
        else:
            exchange.connected(upstream)

    def sweep(self, now: float) -> None:
        """Close what has been idle for too long."""
        young_s = 0.0 if self._someone_waits(now) else IDLE_S
        while self._idle and now - self._idle[0].idle_since >= young_s:
            upstream = self._idle.pop(0)
            if upstream.transport is not None:
                upstream.transport.abort()

    def close(self) -> None:
        for upstream in self._idle:
            if upstream.transport is not None:
                upstream.transport.abort()
        self._idle.clear()
