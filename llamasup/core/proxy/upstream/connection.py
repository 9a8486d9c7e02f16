"""A keep-alive connection to llama-server, which serves one exchange at a time.

llama-server (b11434) closes a connection after 5 s without a request, after 100 requests, and after every
status ≥ 400. A build with a fixed number of HTTP threads serves a new connection only when an old one closes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol, cast

import httptools

from llamasup.core.http.head_cache import KnownHead, compile_head
from llamasup.core.http.heads import HeadRules, RawHeaders
from llamasup.core.http.response_heads import (
    CHUNKED,
    EMPTY,
    LENGTH,
    UNTIL_CLOSE,
    WITHOUT_BODY,
    Framing,
    ends_with_body,
    framing_of,
    read_response_headers,
)
from llamasup.core.proxy.outbox import Outbox
from llamasup.core.proxy.stages import ResponseReceiver
from llamasup.core.system.native import native

REQUESTS_PER_CONNECTION: Final = 100  # of llama-server
COPY_BYTES: Final = 64 * 1024  # a smaller body is copied to its head: cheaper than a second system call
MAX_HEAD_BYTES: Final = 64 * 1024
_BODY_DECIDES: Final = (500, 503)  # a shared context is full; a node refuses a request that ends servers
LAST_READS: Final = 16  # of COPY_BYTES each, from a closed connection: more than the kernel buffers
_STATUSES_WITHOUT_BODY: Final = tuple(b"%d" % status for status in WITHOUT_BODY)


class ConnectionPool(Protocol):
    """Keeps idle upstream connections, and the last response head of their server."""

    outbox: Outbox
    rules: HeadRules
    requests_per_connection: int
    known_head: KnownHead | None
    known_headers: RawHeaders
    known_lines: bytes
    known_streams_events: bool

    def opened(self, upstream: Upstream) -> None:
        """The connection is made."""
        ...

    def closed(self, upstream: Upstream) -> None:
        """The connection is closed."""
        ...

    def awaits_first_answer(self, upstream: Upstream) -> None:
        """A new connection has sent its first request."""
        ...

    def first_answer_over(self, upstream: Upstream) -> None:
        """The first response has begun, or the connection ends without it."""
        ...

    def give(self, upstream: Upstream) -> bool:
        """Keep an idle connection for the next request; False if it should be closed instead."""
        ...


class Upstream(asyncio.Protocol):
    """One connection to a child. Relays a body as it was read: the parser only finds its end."""

    transport: asyncio.Transport
    complete: bool
    """Whether the last byte of the response has arrived."""
    has_unread: Callable[[int], object]
    """Whether the kernel holds bytes or an end of file that the loop has not read. The argument is 0."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self.exchange: ResponseReceiver | None = None
        self.idle_since = 0.0
        self.status = 0
        self.lines = b""
        self.streams_events = False
        self._served = 0
        self._partial_head = b""
        self._paused = False
        self._keep_alive = False
        self._remaining = 0
        self._untrusted = False  # more than one response came for one request
        self._interim = False  # a 1xx response came before the final one
        self._renew_parser()
        self._reset()

    def __repr__(self) -> str:
        return f"<Upstream, {self._served} requests so far, with {self.exchange!r}>"

    def _reset(self) -> None:
        self._framing: Framing | None = None  # of the body that is read next; None: a head is read next
        self._head_held = False
        self._held_body = b""
        self._headers: RawHeaders = []
        self._content_length: bytes | None = None
        self._transfer_coding: bytes | None = None
        self._headers_complete = False
        self.complete = False

    def _renew_parser(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._feed: Callable[[bytes], None] = self._parser.feed_data

    # --- from the exchange

    @property
    def is_fresh(self) -> bool:
        """Whether it has carried no request before this one."""
        return self._served <= 1

    def send(self, exchange: ResponseReceiver, head: bytes, body: bytes) -> None:
        """Write a request and relay the answer to its exchange."""
        self.exchange = exchange
        self._is_head = head[:5] == b"HEAD "  # its response has no body
        self._served += 1
        if self._served == 1:
            self.pool.awaits_first_answer(self)
        outbox = self.pool.outbox
        if len(body) < COPY_BYTES:
            outbox.put(self.transport, head + body)
        else:
            outbox.put(self.transport, head)
            outbox.put(self.transport, body)

    def disable_keepalive(self) -> None:
        """Close after this response: the server answered before it had the complete request."""
        self._keep_alive = False

    def pause(self) -> None:
        """Stop reading until ``resume``: the client does not keep up."""
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def abort(self) -> None:
        """Close at once: the child sees the end of the connection and cancels."""
        self.exchange = None
        self.pool.first_answer_over(self)
        self.transport.abort()

    @property
    def request_sent(self) -> bool:
        """Whether the request was sent to its last byte, so that the child may work on it."""
        return not (self.transport.is_closing() or self.transport.get_write_buffer_size())

    def abandon(self, abandoned: ResponseReceiver) -> None:
        """Half-close the connection: the child sees a disconnect, and its close shows that the slot is free.

        No other request uses this connection.
        """
        self.exchange = abandoned
        self.pool.first_answer_over(self)
        self._served = self.pool.requests_per_connection
        self.resume()
        if not self.transport.can_write_eof():  # TLS has no half-close; a node frees its slot by itself
            self.transport.close()
            return
        with suppress(OSError):  # the child has closed the connection, which the next read reports
            self.transport.write_eof()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports are not subclasses
        self.has_unread = native.unread(transport.get_extra_info("socket"))
        self.pool.opened(self)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # bytes without a request: this connection cannot be trusted
            self.transport.abort()
        elif self._framing is CHUNKED:
            try:
                self._feed(data)
            except httptools.HttpParserError:
                self._broken(exchange, "sent a malformed chunk")
                return
            if not self.complete:
                exchange.relay(data)
            elif self._ends_cleanly(exchange, data):
                exchange.relay(data)
                self._finish(exchange)
            else:
                self._broken(exchange, "sent more than its response")
        elif self._framing is None and self._head_held:
            self._release_head(exchange, data)
        elif self._framing is None:
            known = self.pool.known_head
            if known is None or self._partial_head or self._is_head:
                self._head_received(exchange, data)
            elif (body := known.body_of(data)) is not None:
                self._known_received(exchange, b"%d" % len(body), body)
            elif digits := known.length_in(data):
                self._known_received(exchange, digits, data[known.bytes_beside_digits + len(digits) :])
            else:
                self._head_received(exchange, data)
        elif self._framing is LENGTH:
            self._remaining -= len(data)
            if self._remaining < 0:
                self._broken(exchange, "sent more than its Content-Length")
                return
            exchange.relay(data)
            if not self._remaining:
                if self._headers_complete:
                    self._renew_parser()  # the rest of the body has bypassed the old one
                self._finish(exchange)
        else:
            exchange.relay(data)

    def eof_received(self) -> None:
        exchange = self.exchange
        if exchange is not None and self._framing is UNTIL_CLOSE:
            self._keep_alive = False
            self._finish(exchange)
        elif exchange is not None:
            self._broken(exchange, "closed the connection", closed=True)

    def connection_lost(self, exc: Exception | None) -> None:
        is_encrypted = self.transport.get_extra_info("ssl_object") is not None
        if self.exchange is not None and exc is not None and not is_encrypted:
            self._read_unread()
        if self.exchange is not None:
            why = f"closed the connection ({exc})" if exc else "closed the connection"
            self._broken(self.exchange, why, closed=True)
        self.pool.closed(self)
        # The parser holds our methods, a cycle for the garbage collector.
        del self._feed, self._parser

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.upload_pauses()

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.upload_resumes()

    # --- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-length":
            self._content_length = value
        elif lower == b"transfer-encoding":
            coding = self._transfer_coding
            self._transfer_coding = value if coding is None else coding + b"," + value
        elif not self._headers_complete:  # else a trailer in the same read as the head
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._headers_complete:
            self._untrusted = True
        self._headers_complete = True
        parser = self._parser
        self.status = parser.get_status_code()
        # RFC 9112 §9.3. By its semantics a 205 has no body, by its framing it may have one: servers differ.
        self._keep_alive = parser.should_keep_alive() and self.status != 205

    def on_message_complete(self) -> None:
        self.complete = True

    # --- the head

    def _head_received(self, exchange: ResponseReceiver, data: bytes) -> None:
        exchange.answered = True
        data, self._partial_head = self._partial_head + data, b""
        end = data.find(b"\r\n\r\n")
        while data.startswith(b"HTTP/1.1 1") and end >= 0:  # 100, 102 and 103 are ignored (RFC 9110 §15.2)
            if data.startswith(b"HTTP/1.1 101"):
                self._broken(exchange, "switched protocols without a request for it")
                return
            self._interim = True
            data = data[end + 4 :]
            end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > MAX_HEAD_BYTES:
                self._broken(exchange, "sent a head of more than 64 KiB")
            else:
                self._partial_head = data
            return
        if not data.startswith(b"HTTP/1."):  # the parser takes other versions, and empty lines before it
            self._broken(exchange, "sent a malformed response (it does not begin with HTTP/1)")
            return
        # The parser would treat bytes after a head without a body as the next response.
        ends_with_head = self._is_head or data[9:12] in _STATUSES_WITHOUT_BODY
        try:
            self._feed(data[: end + 4] if ends_with_head else data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._broken(exchange, f"sent a malformed response ({error})")
            return
        if self._served == 1:
            self.pool.first_answer_over(self)
        self._read_headers(data)
        self._begin(exchange, data[end + 4 :])

    def _known_received(self, exchange: ResponseReceiver, digits: bytes, body: bytes) -> None:
        """A known head, and its body, bypass the parser."""
        exchange.answered = True
        pool = self.pool
        if self._served == 1:
            pool.first_answer_over(self)
        self.status = 200
        self._keep_alive = True
        self.lines = pool.known_lines
        self.streams_events = pool.known_streams_events
        self._begin_with_length(exchange, digits, body)

    def _read_headers(self, data: bytes) -> None:
        pool, headers = self.pool, self._headers
        if headers != pool.known_headers:
            pool.known_lines, pool.known_streams_events = read_response_headers(headers, pool.rules)
            pool.known_headers = headers.copy()
            pool.known_head = None
        elif self._is_repeatable():
            pool.known_head = compile_head(data)
        self.lines = pool.known_lines
        self.streams_events = pool.known_streams_events

    def _begin(self, exchange: ResponseReceiver, body: bytes) -> None:
        """Forward the head with the first bytes of the body, or hold it back.

        llama-server sends the head of a stream once a slot takes the request, and then nothing until the
        prompt is done (b11434: 7.6 s of 8 s in a measured request). The request can be sent again until the
        client has received a byte (S10). For some errors, the whole body decides whether the client gets it.
        """
        if not self._headers_complete or self._untrusted or self.status < 200:
            self._broken(exchange, "sent a malformed response")
            return
        length = self._content_length
        framing = framing_of(self.status, self._transfer_coding, length, is_head=self._is_head)
        if isinstance(framing, str):
            self._broken(exchange, framing)
        elif framing is CHUNKED:
            if self.streams_events and not body and exchange.is_replayable:
                self._head_held = True
            else:
                self._begin_chunked(exchange, body)
        elif framing is LENGTH and length is not None:
            if self.status in _BODY_DECIDES and len(body) < int(length) <= COPY_BYTES:
                self._head_held, self._held_body = True, body
            else:
                self._begin_with_length(exchange, length, body)
        elif framing is EMPTY:
            self._begin_without_body(exchange, body)
        else:
            self._framing = UNTIL_CLOSE
            self.complete = False
            exchange.begin(self, None, body)

    def _is_repeatable(self) -> bool:
        """Whether the bytes of this head can be recognized next time: a 200 whose body has a length."""
        return (
            self._headers_complete  # else the status is of the previous response
            and not self._untrusted  # else it is of a second response after these bytes
            and self.status == 200
            and self._keep_alive
            and self._content_length is not None
            and self._transfer_coding is None
        )

    def _begin_with_length(self, exchange: ResponseReceiver, length: bytes, body: bytes) -> None:
        self._remaining = remaining = int(length) - len(body)
        if remaining < 0:
            self._broken(exchange, "sent more than its Content-Length")
            return
        self._framing = LENGTH
        self.complete = not remaining
        exchange.begin(self, b"Content-Length: " + length + b"\r\n", body)
        if not remaining:
            self._finish(exchange)

    def _release_head(self, exchange: ResponseReceiver, body: bytes) -> None:
        if self._transfer_coding is None:  # an error
            self._begin(exchange, self._held_body + body)
            return
        try:
            self._feed(body)
        except httptools.HttpParserError:
            self._broken(exchange, "sent a malformed chunk")
        else:
            self._begin_chunked(exchange, body)

    def _begin_chunked(self, exchange: ResponseReceiver, body: bytes) -> None:
        if self.complete and not self._ends_cleanly(exchange, body):
            self._broken(exchange, "sent more than its response")
            return
        self._framing = CHUNKED
        exchange.begin(self, b"Transfer-Encoding: chunked\r\n", body)
        if self.complete:
            self._finish(exchange)

    def _begin_without_body(self, exchange: ResponseReceiver, body: bytes) -> None:
        """The response ends with its head. If the head announces a body, close the connection.

        Some servers send such a body: ``/cors-proxy`` of b11434 sends a last chunk after a 204. On a reused
        connection these bytes would begin the answer to the next request.
        """
        announced = self._transfer_coding is not None or (self._content_length or b"").strip(b"0")
        if body and not announced:
            self._broken(exchange, "sent a body with a response that has none")
            return
        framing = b""
        if self._content_length is not None and self.status != 204:
            framing = b"Content-Length: " + self._content_length + b"\r\n"
        if announced or self._is_head:  # after HEAD, the parser would also wait for a body
            self._keep_alive = False
        exchange.begin(self, framing, b"")
        self._finish(exchange)

    # --- the end

    def _read_unread(self) -> None:
        """Read the rest of the answer if a failed write has ended the connection.

        llama-server (b11434) refuses a request by its head (401, 404), and closes without reading the body.
        The event loop then drops the connection because of the failed write, with the answer unread. On
        Windows, os.read reads no sockets: the loop may have dropped a part that it had read, so the rest is
        of no use.
        """
        sock = self.transport.get_extra_info("socket")
        with suppress(OSError):
            for _ in range(LAST_READS):
                if self.exchange is None or not (rest := os.read(sock.fileno(), COPY_BYTES)):
                    return
                self.data_received(rest)

    def _ends_cleanly(self, exchange: ResponseReceiver, data: bytes) -> bool:
        """Whether a chunked body that the parser found complete ends where ``data`` ends."""
        end = data if len(data) >= 5 else exchange.last_bytes() + data
        return not self._untrusted and ends_with_body(end)

    def _finish(self, exchange: ResponseReceiver) -> None:
        """The response is complete: return the connection to the pool, then finish the exchange."""
        self.exchange = None
        if self._paused:
            self.resume()
        transport = self.transport
        if not (
            self._keep_alive
            and not self._interim  # it may have announced a body, which would follow the response
            and self.status < 400
            and self._served < self.pool.requests_per_connection
            and not transport.is_closing()
            and not transport.get_write_buffer_size()  # else it answered before it had read the request
            and self.pool.give(self)
        ):
            transport.abort()
        self._reset()
        exchange.finished()

    def _broken(self, exchange: ResponseReceiver, reason: str, *, closed: bool = False) -> None:
        self.abort()
        exchange.upstream_broke(reason, closed=closed)
