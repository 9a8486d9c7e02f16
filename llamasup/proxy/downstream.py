"""The client's side: one connection, its requests parsed, bounded, judged and answered in order."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

import httptools

from llamasup.core.http import HttpError, RawHeaders, error_response, read_head
from llamasup.proxy import local
from llamasup.proxy.door import CONTROL_PREFIX, Door
from llamasup.proxy.exchange import Exchange
from llamasup.proxy.request import UNREAD, Request, record_of
from llamasup.runtime.endpoint import Lease, Unavailable

if TYPE_CHECKING:
    from llamasup.proxy.listener import Proxy

__all__ = ["Downstream"]

NEVER: Final = float("inf")
_IDLE, _HEAD, _BODY, _BUSY = range(4)
_RESET = struct.pack("ii", 1, 0)  # linger for no time: unsent bytes are dropped and the other side is told
_log = logging.getLogger("llamasup.proxy")


class Downstream(asyncio.Protocol):
    """One client's connection. At most one exchange runs; what is pipelined behind it waits, bounded."""

    __slots__ = (
        "_begun",
        "_closing",
        "_door",
        "_exchange",
        "_fed",
        "_headers",
        "_held",
        "_held_bytes",
        "_known_head",
        "_known_key",
        "_length",
        "_local_host",
        "_parser",
        "_phase",
        "_progress",
        "_queue",
        "_read_bytes",
        "_reading",
        "_request",
        "_resume",
        "_resuming",
        "_target",
        "_unsent",
        "_unsent_since",
        "deadline",
        "paused",
        "proxy",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, proxy: Proxy, door: Door) -> None:
        self.proxy = proxy
        self.paused = False  # the client takes no more for now
        self.deadline = NEVER
        self._door = door
        self._parser = httptools.HttpRequestParser(self)
        self._exchange: Exchange | None = None
        self._request: Request | None = None  # its head is read, its body not yet
        self._queue: deque[Request] = deque()  # parsed in one read: at most that read's bytes
        self._held: list[bytes] = []  # read while an exchange runs, not parsed yet
        self._held_bytes = 0
        self._reading = True
        self._closing = False
        self._target = b""
        self._headers: RawHeaders = []
        self._length: int | None = None
        # The last head that was admitted: a client that keeps its connection repeats itself.
        self._known_key: tuple[bytes, bytes, str, RawHeaders] | None = None
        self._known_head = UNREAD
        self._begun = False  # a request's first byte was seen, its last was not
        self._fed = 0  # bytes of earlier reads since the parser last got on
        self._read_bytes = 0  # of the read being parsed
        self._progress = False
        self._resume = b""  # the framing of a body that the parser leaves unread behind an offered upgrade
        self._resuming = False  # while a new parser is shown that framing
        self._phase = _IDLE
        self._local_host = ""
        self._unsent = 0
        self._unsent_since = 0.0

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are no subclasses of it
        limits = self.proxy.limits
        self.transport.set_write_buffer_limits(high=limits.write_buffer_bytes)
        address = transport.get_extra_info("sockname")
        self._local_host = address[0] if isinstance(address, tuple) else ""
        self.deadline = monotonic() + limits.head_s
        self.proxy.joined(self)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._exchange is not None or self._queue:
            self._hold(data)
        else:
            self._feed(data)
            if self._queue:
                self._serve_queue()
            else:
                self._wait_for_more()

    def eof_received(self) -> None:
        """A half-closed client counts as gone, as for nginx and llama-server. The transport closes itself."""
        self._gone()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone()
        self.proxy.left(self)
        del self._parser  # holds our methods: without this the pair would wait for the cycle collector

    def pause_writing(self) -> None:
        self.paused = True
        self._unsent = 0
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self.paused = False
        if self._exchange is not None:
            self._exchange.resume()
        elif not self._closing:
            self._serve_queue()

    # --- httptools

    def on_message_begin(self) -> None:
        self._begun = True

    def on_url(self, url: bytes) -> None:
        if not self._resuming:
            self._target += url  # in pieces when reads split it

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._resuming:
            return
        lower = name.lower()
        if lower == b"content-length":
            self._length = int(value)  # digits, and below 2^64: llhttp has seen to that
        else:
            self._headers.append((lower, value))

    def on_headers_complete(self) -> None:
        self._progress = True
        if self._resuming:
            return
        parser = self._parser
        method: bytes = parser.get_method()
        version: str = parser.get_http_version()
        key = (method, self._target, version, self._headers)
        self._target = b""
        self._headers = []
        refusal = None
        if key == self._known_key:
            head = self._known_head
        else:
            read = self._too_large(key) or read_head(*key)
            if isinstance(read, HttpError):
                self._refuse(read)
                return
            head = read
            refusal = self._door.admit(head, self._local_host)
            if refusal is None:
                self._known_key, self._known_head = key, head
        proxy = self.proxy
        self._request = request = Request(
            head,
            head.request_id or proxy.next_id(),
            keep_alive=parser.should_keep_alive(),
            http_1_0=version == "1.0",
        )
        if refusal is None and self._length is not None and self._length > proxy.limits.body_bytes:
            refusal = self._body_too_large()
        request.refusal = refusal
        if head.upgrades and parser.should_upgrade():
            if head.chunked:
                self._resume = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            elif self._length:
                self._resume = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % self._length
        if head.origin is not None and refusal is None and self._door.allows_origin(head.origin):
            request.response_lines += b"Access-Control-Allow-Origin: " + head.origin + b"\r\nVary: Origin\r\n"

    def on_body(self, body: bytes) -> None:
        self._progress = True
        request = self._request
        if request is not None:
            request.add(body)
            if request.body_bytes > self.proxy.limits.body_bytes and request.refusal is None:
                request.refusal = self._body_too_large()

    def on_message_complete(self) -> None:
        if self._resume:
            return  # only the parser believes that it has no body
        request, self._request = self._request, None
        self._length = None
        if self._headers:  # trailers: nobody here reads them
            self._headers = []
        self._begun = False
        self._progress = True
        if request is not None:
            request.received_at = monotonic()
            request.complete()
            self._queue.append(request)

    # --- reading

    def _feed(self, data: bytes) -> None:
        """Parse; whole requests end up in the queue, and so does the refusal of bytes that are none."""
        self._read_bytes = len(data)
        self._progress = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError:
            _log.exception("our own parser callback failed")
            self._refuse(HttpError(500, "llamasup failed to read the request", "server_error", close=True))
        except httptools.HttpParserError as error:
            self._refuse(HttpError(400, f"malformed request: {error}", close=True))
        if self._progress:
            self._fed = 0
        else:
            # A head, a trailer or a chunk's extensions that do not come to an end.
            self._fed += len(data)
            if self._fed > self.proxy.limits.head_bytes:
                self._refuse(_unbounded(self.proxy.limits.head_bytes))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Go on in HTTP/1.1, as RFC 9110 §7.8 lets us: Java's client offers h2c with its first request.

        The parser leaves off behind the head of such a request, its body unread. A new one is shown the body's
        framing and reads on from there.
        """
        self._parser = httptools.HttpRequestParser(self)
        if self._resume:
            resume, self._resume = self._resume, b""
            self._resuming = True
            self._parser.feed_data(resume)
            self._resuming = False
        if rest:
            self._feed(rest)

    def _refuse(self, error: HttpError) -> None:
        """Queue the refusal of something that is not a whole request; the connection ends with it."""
        request = self._request or Request(UNREAD, self.proxy.next_id(), keep_alive=False)
        self._request = None
        request.refusal = error
        request.keep_alive = False
        if not self._queue or self._queue[-1].keep_alive:
            self._queue.append(request)

    def _hold(self, data: bytes) -> None:
        """Keep what came early; too much of it, and the client has to wait."""
        self._held.append(data)
        self._held_bytes += len(data)
        if self._reading and self._held_bytes > self.proxy.limits.pipelined_bytes:
            self._reading = False
            self.transport.pause_reading()

    def _serve_queue(self) -> None:
        """Answer in order, as far as it goes without waiting."""
        while self._exchange is None and not self._closing and not self.paused:
            if self._queue:
                self._serve(self._queue.popleft())
            elif self._held:
                data = b"".join(self._held)
                self._held.clear()
                self._held_bytes = 0
                if not self._reading:
                    self._reading = True
                    self.transport.resume_reading()
                self._feed(data)
            else:
                self._wait_for_more()
                return

    def _wait_for_more(self) -> None:
        """Nothing is whole: say what the client waits for, and until when we wait for it."""
        request, limits = self._request, self.proxy.limits
        if request is not None and request.refusal is not None:  # answered before its body is here
            request.keep_alive = False
            self._request = None
            self._serve(request)
        elif request is not None:
            self._phase = _BODY
            self.deadline = monotonic() + limits.body_idle_s
            if request.expects_continue:
                request.expects_continue = False
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif self._begun:
            if self._phase != _HEAD:  # counted from its first byte, however slowly the others follow
                self._phase = _HEAD
                self.deadline = monotonic() + limits.head_s
        elif self._phase != _IDLE:
            self._phase = _IDLE
            self.deadline = monotonic() + limits.keepalive_s

    # --- answering

    def keeps_alive(self, request: Request) -> bool:
        return request.keep_alive and not self.proxy.draining

    def _serve(self, request: Request) -> None:
        self._phase = _BUSY
        self.deadline = NEVER
        if request.refusal is not None:
            self._refused(request, request.refusal)
            return
        head = request.head
        if head.path in local.LOCAL_PATHS:
            close = not self.keeps_alive(request)
            status, answer = local.answer(head, self.proxy.backend, request.response_lines, close=close)
            self._answer_locally(request, status, answer)
        elif head.origin is not None and self._door.is_preflight(head):
            close = not self.keeps_alive(request)
            self._answer_locally(request, 204, local.preflight(head, request.response_lines, close=close))
        else:
            lease = self._lease_for(request)
            if isinstance(lease, Unavailable):
                error = local.as_error(lease)
                self.proxy.tell(record_of(request, error.status, "unavailable"))
                self._answer_error(request, error)
            else:
                self._exchange = exchange = Exchange(self, request, lease)
                exchange.start()

    def _lease_for(self, request: Request) -> Lease | Unavailable:
        path = request.head.path
        if path in local.CONTROL_PATHS or path.startswith(CONTROL_PREFIX):
            control = self.proxy.control
            if control is None or control.closed:
                return Unavailable(404, "there is no control API here", type="not_found_error")
            return control.lease()
        return self.proxy.backend.lease(request.model() if self.proxy.config.route_by_model else None)

    def _answer_locally(self, request: Request, status: int, answer: bytes) -> None:
        self.transport.write(answer)
        self.proxy.tell(record_of(request, status, "local", bytes_out=len(answer)))
        self._after(request)

    def _refused(self, request: Request, error: HttpError) -> None:
        if error.close:
            request.keep_alive = False
        self.proxy.tell(record_of(request, error.status, "refused"))
        self._answer_error(request, error)

    def _answer_error(self, request: Request, error: HttpError) -> None:
        """Answer with an error object; nothing of a response may have gone out before."""
        close = not self.keeps_alive(request)
        method = request.head.method
        self.transport.write(error_response(error, request.response_lines, method=method, close=close))
        self._after(request)

    def exchange_failed(self, request: Request, error: HttpError) -> None:
        """The exchange has ended before any byte of a response."""
        self._exchange = None
        self._answer_error(request, error)
        if not self._closing:
            self._serve_queue()

    def exchange_over(self, request: Request) -> None:
        """The exchange has ended and all that it wrote is whole."""
        self._exchange = None
        self._after(request)
        if not self._closing:
            self._serve_queue()

    def _after(self, request: Request) -> None:
        """Close behind a response that was the connection's last."""
        if not self._closing and not self.keeps_alive(request):
            self.close(linger=request.refusal is not None)

    # --- the end

    def close(self, *, linger: bool = False) -> None:
        """Send what is written and close. ``linger``: a client that still sends gets to read it first."""
        if self._closing:
            return
        self._closing = True
        self._forget()
        self.deadline = monotonic() + self.proxy.limits.linger_s
        if linger and self.transport.can_write_eof():
            self.transport.write_eof()
            if not self._reading:
                self._reading = True
                self.transport.resume_reading()
        else:
            self.transport.close()

    def abort(self) -> None:
        """Break the connection, visibly: for a response that cannot be completed.

        With a reset, because a body without length or chunks would look complete behind an orderly end.
        """
        self._gone()
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def close_if_idle(self) -> None:
        """For a drain: a connection between two requests has no claim to be kept."""
        if self._phase == _IDLE and not self._closing:
            self.close()

    def sweep(self, now: float) -> None:
        """Called every ``Limits.sweep_s``: time-outs."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self.paused or self._closing):
            if unsent != self._unsent:
                self._unsent = unsent
                self._unsent_since = now
            elif now - self._unsent_since >= self.proxy.limits.send_stall_s:
                self.transport.abort()
        elif now < self.deadline:
            return
        elif self._closing:
            self.transport.abort()
        elif self._phase == _IDLE:
            self.close()
        else:
            what = "head" if self._phase == _HEAD else "body"
            self._refuse(
                HttpError(408, f"the request's {what} took too long", cause="slow_request", close=True)
            )
            self._serve_queue()

    def _gone(self) -> None:
        self._closing = True
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cancel()
        self._forget()

    def _forget(self) -> None:
        self._queue.clear()
        self._held.clear()
        self._request = None

    # --- sizes

    def _too_large(self, key: tuple[bytes, bytes, str, RawHeaders]) -> HttpError | None:
        limits = self.proxy.limits
        _, target, _, headers = key
        if len(headers) > limits.headers:
            return HttpError(431, f"{len(headers)} headers; at most {limits.headers} are read", close=True)
        if self._fed + self._read_bytes <= limits.head_bytes:
            return None  # all that came since the last request is no more than this
        if len(target) + sum(len(name) + len(value) + 4 for name, value in headers) <= limits.head_bytes:
            return None
        return _unbounded(limits.head_bytes)

    def _body_too_large(self) -> HttpError:
        limit = self.proxy.limits.body_bytes
        return HttpError(413, f"the body is larger than {limit} bytes", cause="body_limit", close=True)


def _unbounded(limit: int) -> HttpError:
    return HttpError(431, f"the head is larger than {limit} bytes", cause="head_limit", close=True)
