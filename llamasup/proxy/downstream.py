"""The client's side: one connection whose requests are answered in order, one at a time."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from time import monotonic
from typing import Final, cast

from llamasup.http.heads import HttpError, error_body, error_response
from llamasup.proxy.body_rules import judge_body
from llamasup.proxy.connections import host_of
from llamasup.proxy.exchange import Exchange
from llamasup.proxy.gate import AccessPolicy
from llamasup.proxy.interfaces import ProxyContext
from llamasup.proxy.local import answer_to
from llamasup.proxy.reader import RequestReader
from llamasup.proxy.request import Request, record_of
from llamasup.proxy.routing import lease_for
from llamasup.proxy.upload import Upload, may_upload
from llamasup.proxy.waiting import CLIENT_GONE, Waiting
from llamasup.queueing.endpoint import Lease, Unavailable

__all__ = ["Downstream"]

TURN: Final = 32  # requests answered on the spot before other connections have their turn
NEVER: Final = float("inf")
_IDLE, _HEAD, _BODY, _BUSY = range(4)
_REFUSALS = frozenset({400, 403, 404})  # of what was asked for; whatever else stands in its way may pass
_log = logging.getLogger("llamasup.proxy")
_FAILED = HttpError(
    500, "llamasup failed to serve the request", "server_error", remedy="see llamasup's log", close=True
)
_RESET = struct.pack("ii", 1, 0)  # linger for no time: unsent bytes are dropped and the other side is told


class Downstream(asyncio.Protocol):
    """One client's connection. At most one exchange runs; what is pipelined behind it waits, bounded."""

    __slots__ = (
        "_body_base",
        "_body_since",
        "_closing",
        "_deadline",
        "_door",
        "_exchange",
        "_held",
        "_idle",
        "_idle_of_client",
        "_is_stranger",
        "_phase",
        "_reader",
        "_reading",
        "_unsent",
        "_unsent_since",
        "_upload",
        "paused",
        "proxy",
        "transport",
    )

    transport: asyncio.Transport
    _reader: RequestReader

    def __init__(self, proxy: ProxyContext, door: AccessPolicy) -> None:
        self.proxy = proxy
        self.paused = False  # the client takes no more for now
        self._door = door
        self._exchange: Exchange | Waiting | None = None  # what runs: it has a generation, or waits for one
        self._upload: Upload | None = None  # of the exchange's request
        self._held = bytearray()  # read while an exchange runs, not parsed yet
        self._idle = self._idle_of_client = proxy.clients.idle
        self._is_stranger = door.needs_key  # until it sends a valid key
        self._reading = True
        self._closing = False
        self._phase = _IDLE
        self._deadline = NEVER
        self._body_since = 0.0  # when the current body began, without pauses; 0: no body
        self._body_base = 0  # how many of its bytes had arrived by then
        self._unsent = 0
        self._unsent_since = 0.0

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are no subclasses of it
        proxy = self.proxy
        local_host = host_of(transport.get_extra_info("sockname"))
        peer = host_of(transport.get_extra_info("peername"))
        self._reader = RequestReader(proxy.limits, self._door, local_host, proxy.next_id, peer)
        self.transport.set_write_buffer_limits(high=proxy.limits.write_buffer_bytes)
        self._deadline = monotonic() + proxy.limits.head_s
        try:
            refusal = proxy.on_connect(self, peer, stranger=self._is_stranger)
        except ConnectionAbortedError:
            self.abort()
            return
        self._idle_of_client = proxy.clients.idle_of_client(self)
        if refusal is not None:
            self._reader.refuse(refusal)
            self._serve_ready()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._exchange is not None or self._held or self._reader.ready:
            upload = self._upload
            if upload is not None:
                self._reader.feed(data)
                upload.received(self._reader.ready)
            else:
                self._hold(data)
        else:
            self._reader.feed(data)
            self._serve_ready()

    def eof_received(self) -> None:
        """A half-closed client counts as gone, as for nginx and llama-server. The transport closes itself."""
        self._gone()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone()
        self._reader.close()
        self.proxy.on_disconnect(self)

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
            self._serve_ready()

    # --- reading

    def _hold(self, data: bytes) -> None:
        """Keep what came early; too much of it, and the client has to wait."""
        self._held += data
        if len(self._held) > self.proxy.limits.pipelined_bytes:
            self._stop_reading()

    def _stop_reading(self) -> None:
        if self._reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()

    def _go_on_reading(self) -> None:
        if not self._reading and not self.transport.is_closing():
            self._reading = True
            self.transport.resume_reading()

    def _serve_ready(self) -> None:
        """Answer in order, as far as it goes without waiting."""
        reader = self._reader
        for _ in range(TURN):
            if self._exchange is not None or self._closing or self.paused:
                return
            if reader.ready:
                self._serve(reader.ready.popleft())
            elif self._held:
                data = bytes(self._held)
                self._held.clear()
                self._go_on_reading()
                reader.feed(data)
            else:
                self._wait_for_more()
                return
        self.proxy.call_soon(self._serve_ready)

    def _wait_for_more(self) -> None:
        """Nothing is whole: say what the client waits for, and until when we wait for it."""
        reader, limits = self._reader, self.proxy.limits
        request = reader.partial
        if self._phase == _IDLE and reader.begun:
            self._idle.pop(self, None)
            self._idle_of_client.pop(self, None)
        if request is not None and request.key is not None and self._is_stranger:
            self._trust()
        if request is not None and request.refusal is not None:  # answered before its body is here
            request.keep_alive = False
            self._serve(request)
        elif request is not None and may_upload(request, self._door, self.proxy):
            self._begin_upload(request)
        elif request is not None and self._may_go_on(request):
            self._await_body(request)
            if request.expects_continue:
                request.expects_continue = False
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif reader.begun:
            if self._phase != _HEAD:  # counted from its first byte, however slowly the others follow
                self._phase = _HEAD
                self._deadline = monotonic() + limits.head_s
        elif self._phase != _IDLE:
            if not self._is_stranger:
                self._idle[self] = self._idle_of_client[self] = None
            self._phase = _IDLE
            self._deadline = monotonic() + limits.keepalive_s

    # --- a body that is read

    def _may_go_on(self, request: Request) -> bool:
        """Whether more of the body may be read; the request is refused if not. Checks the limits of the key
        once; then the request counts.
        """
        refusal = self.proxy.keys.enter(request) or self.proxy.bodies.hold(request, self._reader.length)
        if refusal is None:
            return True
        request.refusal = refusal
        request.keep_alive = False
        request.take_body()
        self._serve(request)
        return False

    def _await_body(self, request: Request) -> None:
        """Wait for the next piece, with a time-out for each piece and a minimum rate for the whole body."""
        now, limits = monotonic(), self.proxy.limits
        if not self._body_since:
            self._body_since = now
            self._body_base = request.body_bytes
        self._phase = _BODY
        came_s = (request.body_bytes - self._body_base) / limits.body_rate_bytes
        self._deadline = min(now, self._body_since + came_s) + limits.body_idle_s

    # --- a body that is sent on as it comes

    def _begin_upload(self, request: Request) -> None:
        """Send on what is here of it if a generation serves; else it is read whole, and waits then."""
        lease = lease_for(request, self._door, self.proxy)
        if isinstance(lease, Unavailable):
            request.buffered = True
            if self._may_go_on(request):
                self._await_body(request)
            return
        if refusal := self.proxy.keys.enter(request):
            lease.release()
            request.refusal = refusal
            request.keep_alive = False
            self._serve(request)
            return
        lease.cancel_permit()  # it takes one when it is whole: nobody waits for a client that sends slowly
        request.received_at = monotonic()
        self.proxy.bodies.drop(request)
        self._exchange = exchange = Exchange(self, request, lease)
        self._upload = exchange.upload = upload = Upload(self, exchange, request, self._reader.length)
        upload.pause()  # until there is a connection
        exchange.start()

    def hold_upload(self) -> None:
        """The child takes no more of it for now, or is not there: that is not the client's fault."""
        self._phase = _BODY
        self._deadline = NEVER
        self._stop_reading()

    def upload_over(self) -> None:
        """Whether it is whole or not: from here on a client that leaves is to be noticed."""
        self._upload = None
        self._phase = _BUSY
        self._deadline = NEVER
        self._body_since = 0.0
        self._go_on_reading()

    def read_on(self, request: Request, paused_s: float = 0.0) -> None:
        """Go on with the body of ``request``, which was not read for ``paused_s``."""
        if self._body_since:
            self._body_since += paused_s
        self._await_body(request)
        self._go_on_reading()

    # --- answering

    def keeps_alive(self, request: Request) -> bool:
        return request.keep_alive and not self.proxy.draining

    def _serve(self, request: Request) -> None:
        if self._phase == _IDLE:
            self._idle.pop(self, None)
            self._idle_of_client.pop(self, None)
        if self._is_stranger and request.key is not None:
            self._trust()
        self._phase = _BUSY
        self._deadline = NEVER
        self._body_since = 0.0
        if request.refusal is not None:
            self._refused(request, request.refusal)
            return
        proxy = self.proxy
        answered = answer_to(request, self._door, proxy.backend, draining=proxy.draining)
        if answered is not None:
            self._answer_locally(request, *answered)
            return
        try:
            if (
                (request.key is not None and (refusal := proxy.keys.enter(request)))
                or (
                    request.body_bytes > proxy.limits.small_body_bytes
                    and not request.held_bytes  # it came with one read
                    and (refusal := proxy.bodies.hold(request, None))
                )
                or (refusal := judge_body(request, proxy.config, proxy.keys))
            ):
                self._refused(request, refusal)
                return
            lease = lease_for(request, self._door, proxy)
            if isinstance(lease, Unavailable):
                self._wait(request, lease)
            else:
                self._exchange = exchange = Exchange(self, request, lease)
                exchange.start()
        except Exception:
            _log.exception("a request failed in llamasup")
            self._failed(request)

    def _failed(self, request: Request) -> None:
        """End a request after an error of ours, so that it no longer counts for its key."""
        if self._exchange is not None:
            self.abort()
        else:
            self._refused(request, _FAILED)

    def _trust(self) -> None:
        """From now on, it may be closed for a new connection only while it is idle."""
        self._is_stranger = False
        self.proxy.clients.trust(self)

    def _wait(self, request: Request, why: Unavailable) -> None:
        """Let it wait for a generation that serves, or say why not."""
        if why.status in _REFUSALS:
            self._refused(request, why.as_error())
            return
        backend = self.proxy.backend
        meant = backend.meant(request.named)
        model = "" if meant is None else meant.id
        if why.queueable and request.may_wait:
            self._exchange = waiting = Waiting(self, request, backend.room(request.named), model)
            refusal = waiting.enter()
            if refusal is None:
                return
            self._exchange = None
            why = refusal
        self.proxy.record_request(request, record_of(request, why.status, "unavailable", model=model))
        self._answer_error(request, why.as_error())

    def _answer_locally(self, request: Request, status: int, answer: bytes) -> None:
        self.transport.write(answer)
        self.proxy.record_request(request, record_of(request, status, "local"))
        self._after(request)

    def _refused(self, request: Request, error: HttpError) -> None:
        if error.close:
            request.keep_alive = False
        self.proxy.record_request(request, record_of(request, error.status, "refused"))
        self._answer_error(request, error)

    def _answer_error(self, request: Request, error: HttpError) -> None:
        """Answer with an error object; nothing of a response may have gone out before."""
        if request is self._reader.partial:  # the rest of its body may still come
            request.keep_alive = False
        if request.early is not None:
            request.early.fail(error_body(error))
            self._after(request)
            return
        close = not self.keeps_alive(request)
        method = request.head.method
        self.transport.write(error_response(error, request.response_lines, method=method, close=close))
        self._after(request)

    def wait_over(self, waiting: Waiting, request: Request, lease: Lease) -> None:
        """A generation serves the request that waited."""
        self._exchange = exchange = Exchange(self, request, lease, waiting)
        exchange.start()

    def exchange_waits(self, waiting: Waiting) -> None:
        """The exchange has ended without a byte of a response, and its request waits for another."""
        self._exchange = waiting

    def exchange_reads_on(self, request: Request) -> None:
        """The exchange has ended before its request's body was here: that is read whole, and served then."""
        self._exchange = None
        self.read_on(request)

    def exchange_failed(self, request: Request, error: HttpError) -> None:
        """The exchange has ended before any byte of a response."""
        self._exchange = None
        self._answer_error(request, error)
        if not self._closing:
            self._serve_ready()

    def exchange_over(self, request: Request) -> None:
        """The exchange has ended and all that it wrote is whole."""
        self._exchange = None
        self._after(request)
        if not self._closing:
            self._serve_ready()

    def _after(self, request: Request) -> None:
        """Close behind a response that was the connection's last."""
        if not self._closing and not self.keeps_alive(request):
            self.close(linger=request.refusal is not None or request is self._reader.partial)

    # --- the end

    def close(self, *, linger: bool = False) -> None:
        """Send what is written and close. ``linger``: a client that still sends gets to read it first."""
        if self._closing:
            return
        self._closing = True
        self._held.clear()
        self._deadline = monotonic() + self.proxy.limits.linger_s
        if not linger:
            self.transport.close()
            return
        if self.transport.can_write_eof():  # TLS has no such thing: there, only the sweep closes
            self.transport.write_eof()
        self._go_on_reading()

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
        if self._exchange is not None:
            self._exchange.sweep(now)
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self.paused or self._closing):
            if unsent != self._unsent:
                self._unsent = unsent
                self._unsent_since = now
            elif now - self._unsent_since >= self.proxy.limits.send_stall_s:
                self.transport.abort()
        elif now < self._deadline:
            return
        elif self._closing:
            if self.transport.is_closing():
                self.transport.abort()
            else:
                self.transport.close()  # it has lingered
        elif self._phase == _IDLE:
            self.close()
        else:
            what = "head" if self._phase == _HEAD else "body"
            self._reader.refuse(
                HttpError(408, f"the request's {what} took too long", cause="slow_request", close=True)
            )
            if self._upload is not None:
                self._upload.received(self._reader.ready)
            else:
                self._serve_ready()

    def _gone(self) -> None:
        self._closing = True
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cancel()
        # One whose generation ended in the middle of its body has no exchange, and still counts for its key.
        for request in (self._reader.partial, *self._reader.ready):
            if request is not None and request.quota is not None:
                self.proxy.record_request(request, record_of(request, CLIENT_GONE, "client_gone"))
            elif request is not None:
                self.proxy.bodies.drop(request)
        self._held.clear()
