"""The connection of one client. Serves its requests in order, one at a time."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from time import monotonic
from typing import Final

from llamasup.core.auth.api_key import NO_LIMITS
from llamasup.core.http.heads import HttpError, Priority, error_body, error_response, response
from llamasup.core.observability.counters import GAVE_WAY, HeldSlots
from llamasup.core.proxy.access_policy import AccessPolicy
from llamasup.core.proxy.body_rules import judge_body
from llamasup.core.proxy.client_transport import BUSY, HEAD, IDLE, NEW, ClientTransport
from llamasup.core.proxy.connections import host_of
from llamasup.core.proxy.context import Dialect, ProxyContext
from llamasup.core.proxy.exchange import Exchange
from llamasup.core.proxy.live.state import InFlight, LivePhase, described
from llamasup.core.proxy.reader import RequestReader
from llamasup.core.proxy.request import Request, record_of
from llamasup.core.proxy.routing import (
    FORWARDED,
    Answerer,
    after_autoload,
    answer_locally,
    answer_unserved,
    answerer_of,
    lease_for,
    unknown_path,
)
from llamasup.core.proxy.stages import Stage
from llamasup.core.proxy.upload import Upload, may_upload, refused_file
from llamasup.core.proxy.waiting import CLIENT_GONE, Waiting
from llamasup.core.queueing.endpoint import Lease

ANSWERS_PER_TURN: Final = 32  # requests that are answered at once before other connections have their turn
_FINAL_STATUSES = frozenset({400, 403, 404})  # no wait can change these answers
_BATCH: Final = Priority.BATCH
_log = logging.getLogger("llamasup.proxy")
_INTERNAL_ERROR = HttpError(
    500, "llamasup failed to serve the request", "server_error", remedy="see llamasup's log", close=True
)


class Downstream(ClientTransport):
    """One client connection (``WaitingConnection``). At most one exchange runs; the bytes of pipelined
    requests wait, up to a limit.
    """

    _reader: RequestReader

    def __init__(self, proxy: ProxyContext, access: AccessPolicy) -> None:
        super().__init__(proxy, needs_key=access.needs_key)
        self._access = access
        self._exchange: Exchange | Waiting | None = None  # the current request, with a generation or waiting
        self._upload: Upload | None = None  # of the current exchange
        self._unparsed = bytearray()  # received while an exchange runs

    def __repr__(self) -> str:
        return f"<Downstream with {self._exchange!r}>"

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        proxy = self.proxy
        local_host = host_of(transport.get_extra_info("sockname"))
        peer = host_of(transport.get_extra_info("peername"))
        self._reader = RequestReader(proxy.limits, self._access, local_host, proxy.next_id, peer)
        # A proxy has the connections of all its clients, and is no client itself.
        client = "" if peer in self._access.proxies else peer
        try:
            refusal = proxy.on_connect(self, client, unauthenticated=self._unauthenticated)
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
        if self._phase is IDLE and not self.paused:  # nothing else waits to be read or written
            reader = self._reader
            reader.feed(data)
            if reader.ready:
                self._serve(reader.ready.popleft())
            if self._exchange is None:
                self._serve_ready()
        elif self._exchange is not None or self._unparsed or self._reader.ready:
            upload = self._upload
            if upload is not None:
                self._reader.feed(data)
                upload.received(self._reader.ready)
            else:
                self._unparsed += data  # pipelined
                if len(self._unparsed) > self.proxy.limits.pipelined_bytes:
                    self._pause_reading()
        else:
            self._reader.feed(data)
            self._serve_ready()

    def eof_received(self) -> None:
        """A half-close counts as a disconnect, as in nginx and llama-server. The transport closes itself."""
        self._outbox.flush()  # complete answers
        self._client_left()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client_left()
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

    def _serve_ready(self) -> None:
        """Serve pipelined requests in order until one has to wait."""
        reader = self._reader
        for _ in range(ANSWERS_PER_TURN):
            if self._exchange is not None or self._closing or self.paused:
                return
            if reader.ready:
                self._serve(reader.ready.popleft())
            elif self._unparsed:
                data = bytes(self._unparsed)
                self._unparsed.clear()
                self._resume_reading()
                reader.feed(data)
            else:
                self._wait_for_more()
                return
        self.proxy.call_soon(self._serve_ready)

    def _wait_for_more(self) -> None:
        """No request is complete: act on the part that has arrived, and set the deadline for the rest."""
        reader = self._reader
        request = reader.partial
        if reader.begun and self._phase in (IDLE, NEW):
            self._idle.pop(self, None)
            self._idle_of_client.pop(self, None)
        if request is not None and request.key is not None and self._unauthenticated:
            self._mark_authenticated()
        if request is not None and request.refusal is not None:  # refused before its body has arrived
            request.keep_alive = False
            self._serve(request)
        elif (
            request is not None
            and may_upload(request, self.proxy)
            and not self._speaks_dialect(request)
            and (answerer := answerer_of(request.head, self._access, self.proxy.backend)) in FORWARDED
        ):
            self._begin_upload(request, answerer)
        elif request is not None and self._accepts_body(request):
            self._await_body(request)
            if request.expects_continue:
                request.expects_continue = False
                self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif reader.begun:
            if self._phase is not HEAD:  # the time counts from the first byte of the head
                self._phase = HEAD
                self._since = monotonic()
        elif self._phase not in (IDLE, NEW):
            self._become_idle(monotonic())

    # --- a body that is buffered

    def _accepts_body(self, request: Request) -> bool:
        """Whether more of the body may be read; else refuses the request. Counts the request for its key."""
        refusal = self.proxy.keys.enter(request) or self.proxy.bodies.hold(request, self._reader.length)
        if refusal is None:
            return True
        request.take_body()
        self._refuse_early(request, refusal)
        return False

    def _refuse_early(self, request: Request, refusal: HttpError) -> None:
        """Refuse a request whose body has not arrived completely. The connection ends with the refusal."""
        request.refusal = refusal
        request.keep_alive = False
        self._serve(request)

    # --- a body that is forwarded while it arrives

    def _begin_upload(self, request: Request, answerer: Answerer) -> None:
        """Forward the received part if a generation serves; otherwise buffer the body."""
        if refusal := refused_file(request, self.proxy):
            self._refuse_early(request, refusal)
            return
        lease = lease_for(request, answerer, self.proxy)
        route = request.model_route
        # Whether its body is that of a suspect is known only at its end.
        is_checked = route is not None and bool(route.served.queue.suspects.known)
        if isinstance(lease, HttpError) or is_checked:
            if isinstance(lease, Lease):
                lease.cancel_permit()
                lease.release()
            elif request.head.route.of_batches:  # it may be larger than the memory
                self._refuse_early(request, lease)
                return
            request.buffered = True
            if self._accepts_body(request):
                self._await_body(request)
            return
        if refusal := self.proxy.keys.enter(request):
            lease.release()
            self._refuse_early(request, refusal)
            return
        if request.needs_permit:
            self.proxy.batches.enter(request, self, monotonic())
        lease.cancel_permit()  # it takes one when the body is complete, so that a slow client blocks no other
        request.received_at = monotonic()
        self.proxy.bodies.drop(request)
        self._exchange = exchange = Exchange(self, request, lease)
        self._upload = exchange.upload = upload = Upload(self, exchange, request, self._reader.length)
        upload.pause()  # until the upstream connection is made
        exchange.start()

    def upload_over(self) -> None:
        self._upload = None
        self._phase = BUSY
        self._body_since = 0.0
        self._resume_reading()  # so that a disconnect is noticed

    # --- answering

    def _serve(self, request: Request) -> None:
        if self._phase is IDLE or self._phase is NEW:
            self._idle.pop(self, None)
            self._idle_of_client.pop(self, None)
        if self._unauthenticated and request.key is not None:
            self._mark_authenticated()
        self._phase = BUSY
        self._body_since = 0.0
        if request.refusal is not None:
            self._refuse(request, request.refusal)
            return
        if self._access.dialect is not None and self._translate(request, self._access.dialect):
            return
        proxy = self.proxy
        answerer = answerer_of(request.head, self._access, proxy.backend)
        if answerer not in FORWARDED:
            close = not self.keeps_alive(request)
            found = answer_locally(answerer, request, self._access, proxy.backend, close=close)
            self._answered(request, *found)
            return
        try:
            if (
                (
                    (key := request.key) is not None
                    and key.limits is not NO_LIMITS
                    and (refusal := proxy.keys.enter(request))
                )
                or (
                    request.body_bytes > proxy.limits.small_body_bytes
                    and not request.held_bytes  # it arrived in one read
                    and (refusal := proxy.bodies.hold(request, None))
                )
                or (refusal := judge_body(request, proxy.config, proxy.keys))
            ):
                self._refuse(request, refusal)
                return
            if request.head.needs_permit and not request.in_lane:
                batches = proxy.batches
                if not batches.is_used and request.head.priority is not _BATCH:
                    request.in_lane = True  # as ``enter`` does, without a call for each request
                    batches.others += 1
                elif refusal := batches.enter(request, self, request.received_at):
                    self._refuse(request, refusal, GAVE_WAY)
                    return
            lease = lease_for(request, answerer, proxy)
            if type(lease) is HttpError:
                self._wait(request, lease)
            elif request.translation is not None and (error := _not_admitted(request.translation, lease)):
                self._refuse(request, error, "refused", lease.endpoint.model)
            else:
                self._exchange = exchange = Exchange(self, request, lease)
                exchange.start()
        except Exception:
            _log.exception("llamasup failed to serve a request")
            self._failed(request)

    # --- another API

    def _speaks_dialect(self, request: Request) -> bool:
        dialect = self._access.dialect
        return dialect is not None and (request.translation is not None or dialect.speaks(request.head))

    def _translate(self, request: Request, dialect: Dialect) -> bool:
        """Put a request in another API into llama-server's. Returns whether it has been answered instead."""
        if not dialect.speaks(request.head) or self._access.is_preflight(request.head):
            return False
        try:
            proxy = self.proxy
            found = (
                proxy.keys.enter(request)
                or proxy.bodies.hold(request, None)  # if it arrived in one read
                or dialect.translate(request, proxy.backend)
                or proxy.bodies.hold(request, None, size=len(request.body))  # it may have become larger
            )
            if found is None:
                return False
            if isinstance(found, HttpError):
                self._refuse(request, found)
            else:
                close = not self.keeps_alive(request)
                lines, method = (found.lines, request.response_lines), request.head.method
                answer = response(found.status, found.body, *lines, method=method, close=close, json=False)
                self._answered(request, found.status, answer)
        except Exception:
            _log.exception("llamasup failed to translate a request")
            self._failed(request)
        return True

    def _failed(self, request: Request) -> None:
        """End a request after an internal error, so that it no longer counts for its key."""
        if self._exchange is not None:
            self.abort()
        else:
            self._refuse(request, _INTERNAL_ERROR)

    def _mark_authenticated(self) -> None:
        """From now on, the connection is closed for a new one only while it is idle."""
        self._unauthenticated = False
        self.proxy.clients.mark_authenticated(self)

    def _wait(self, request: Request, why: HttpError) -> None:
        """Queue the request until a generation serves, or answer with the reason why not."""
        if self.proxy.config.route_by_model and why.status != HTTPStatus.FORBIDDEN:
            if found := answer_unserved(request, close=not self.keeps_alive(request)):
                self._answered(request, *found)
                return
            why = after_autoload(request, unknown_path(request, why))
        if why.status in _FINAL_STATUSES:
            self._refuse(request, why)
            return
        if refused := self.proxy.batches.may_wait(request):
            self._refuse(request, refused, GAVE_WAY)
            return
        route = request.model_route
        model = "" if route is None else route.model.id
        if route is not None and why.queueable and request.replayable:
            self._exchange = waiting = Waiting(self, request, route.served.queue, model)
            refusal = waiting.queue.enter(waiting.entry)
            if refusal is None:
                return
            self._exchange = None
            why = refusal
        self._refuse(request, why, "unavailable", model)

    def _answered(self, request: Request, status: int, answer: bytes) -> None:
        self.send(answer)
        self.proxy.record_request(request, record_of(request, status, "local", monotonic()))
        self._close_after_last(request)

    def _refuse(self, request: Request, error: HttpError, outcome: str = "refused", model: str = "") -> None:
        if error.close:
            request.keep_alive = False
        request.cause = error.cause
        record = record_of(request, error.status, outcome, monotonic(), model)
        self.proxy.record_request(request, record)
        self._answer_error(request, error)

    def _answer_error(self, request: Request, error: HttpError) -> None:
        """Answer with an error object. Only before any byte of a response."""
        if request is self._reader.partial:  # the rest of its body may still arrive
            request.keep_alive = False
        close, method = not self.keeps_alive(request), request.head.method
        lines, dialect = request.response_lines, self._access.dialect
        if request.has_head and request.stages is not None:
            request.stages.fail(error_body(error))
        elif dialect is not None and self._speaks_dialect(request):
            self.send(dialect.error_response(error, lines, method=method, close=close or error.close))
        else:
            self.send(error_response(error, lines, method=method, close=close))
        self._close_after_last(request)

    def wait_ended(self, waiting: Waiting, request: Request, lease: Lease) -> None:
        if request.translation is not None and (error := _not_admitted(request.translation, lease)):
            waiting.interrupt(error, "refused")  # a generation serves, but not this request
            return
        self._exchange = exchange = Exchange(self, request, lease, waiting)
        exchange.start()

    def exchange_waits(self, waiting: Waiting) -> None:
        self._exchange = waiting

    def exchange_awaits_body(self, request: Request) -> None:
        self._exchange = None
        self.resume_body(request)

    def exchange_failed(self, request: Request, error: HttpError) -> None:
        self._exchange = None
        self._answer_error(request, error)
        if not self._closing:
            self._serve_ready()

    def exchange_over(self, request: Request, now: float) -> None:
        self._exchange = None
        reader = self._reader
        if not request.keep_alive or self.proxy.draining:
            self._close_after_last(request)
        elif reader.begun or reader.ready or self._unparsed or self.paused:
            if not self._closing:
                self._serve_ready()
        elif not self._closing:
            self._become_idle(now)

    def _close_after_last(self, request: Request) -> None:
        """Close the connection if its last response has been written."""
        if not self._closing and not self.keeps_alive(request):
            self.close(linger=request.refusal is not None or request is self._reader.partial)

    # --- the end

    def close(self, *, linger: bool = False) -> None:
        self._unparsed.clear()
        super().close(linger=linger)

    def abort(self) -> None:
        self._client_left()
        self._reset()

    # --- for the control API

    def held_slots(self) -> HeldSlots | None:
        return None if self._exchange is None else self._exchange.held_slots()

    def waits_since(self) -> float:
        return 0.0 if self._exchange is None else self._exchange.waits_since()

    def live(self, now: float) -> InFlight | None:
        if self._exchange is not None:
            return self._exchange.live(now)
        request = self._reader.partial
        if request is None or not self._body_since:
            return None
        model = request.model_route.model.id if request.model_route is not None else request.requested_model
        return InFlight(described(request, LivePhase.SENDING, now, model=model, since_s=self._body_since))

    def interrupt(self, error: HttpError, outcome: str) -> None:
        if self._exchange is not None:
            self._exchange.interrupt(error, outcome)
        elif (request := self._reader.partial) is not None:
            self._refuse_early(request, error)

    def sweep(self, now: float) -> None:
        """Check the timeouts. Called every ``Limits.sweep_s``."""
        if self._exchange is not None:
            self._exchange.sweep(now)
        if part := self._late_part(now):
            self._reader.refuse(
                HttpError(408, f"the request's {part} took too long", cause="slow_request", close=True)
            )
            if self._upload is not None:
                self._upload.received(self._reader.ready)
            else:
                self._serve_ready()

    def _client_left(self) -> None:
        self._closing = True
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cancel()
        # A request whose generation ended during its body has no exchange, but still counts for its key.
        for request in (self._reader.partial, *self._reader.ready):
            if request is not None and request.quota is not None:
                record = record_of(request, CLIENT_GONE, "client_gone", monotonic())
                self.proxy.record_request(request, record)
            elif request is not None:
                self.proxy.bodies.drop(request)
        self._unparsed.clear()


def _not_admitted(translation: Stage, lease: Lease) -> HttpError | None:
    """Why this server cannot serve the request; the lease has then ended. None: it can."""
    refusal = translation.admit(lease.endpoint)
    if refusal is not None:
        lease.cancel_permit()
        lease.release()
    return refusal
