"""One request and its response: holds the lease, relays between the two connections, writes the record."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final
from urllib.parse import quote

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.auth.quota import context_left
from llamasup.core.http.chunks import Dechunker, chunk
from llamasup.core.http.context_end import context_end, context_refusal, is_shared_full
from llamasup.core.http.heads import HttpError, error_body, status_line
from llamasup.core.http.routes import CONTROL
from llamasup.core.http.sse import TokenCounts, error_event, tail_of
from llamasup.core.http.token_meter import TokenMeter
from llamasup.core.models.redaction import whole_and_plain
from llamasup.core.observability.counters import CANCELLED, GAVE_WAY, HeldSlots
from llamasup.core.proxy.answers.answer_tokens import TAIL_PIECES, MeteredTail, items_of, reported, unreported
from llamasup.core.proxy.answers.redacted_body import RedactedBody
from llamasup.core.proxy.answers.sse_keepalive import send_keepalive_if_due
from llamasup.core.proxy.live.state import InFlight, described, phase_of
from llamasup.core.proxy.request import Request, overdue, record_of
from llamasup.core.proxy.stages import AnswerHead, KeptStream, SecondTry
from llamasup.core.proxy.translation import ResponseForm, Translation
from llamasup.core.proxy.upload import Upload
from llamasup.core.proxy.upstream.abandoned import Abandoned
from llamasup.core.proxy.upstream.connection import COPY_BYTES, Upstream
from llamasup.core.proxy.waiting import CLIENT_GONE, Waiting, WaitingConnection
from llamasup.core.queueing.endpoint import Endpoint, Lease
from llamasup.core.queueing.request_queue import GRACE_S
from llamasup.core.queueing.shared_context import permits_for, prompt_tokens
from llamasup.core.queueing.suspects import POISON, Next, Suspects, next_step
from llamasup.core.queueing.unavailable import Unavailable

__all__ = ["Exchange"]

_log = logging.getLogger("llamasup.proxy")

OPENING_BYTES: Final = 2048  # the first event of a message has 300 bytes and the name of the model
MIN_SPEED_TOKENS: Final = 16  # fewer tokens are too short a measurement

_BODILESS = (b"GET", b"HEAD", b"DELETE", b"OPTIONS")
# The child or its socket file is gone, or its backlog is full. Supervision handles these.
_TRANSIENT = (ConnectionError, FileNotFoundError, BlockingIOError, TimeoutError)
# Of another node: its queue is full, it stops or cannot serve the model now; or our key is wrong.
_NODE_REFUSALS = (401, 429, 503)
_EVENT_ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")  # the end of a chunk that ends with an event


def _write_nothing(_data: bytes) -> None:
    raise AssertionError("the answer has not begun")


class Exchange(Struct, eq=False):
    """Connects one request of a client to one response of a child (``ResponseReceiver``, ``ConnectionUser``,
    ``UploadExchange``). Driven only by callbacks.

    A struct, because its fields then get their defaults in C. ``_waiting``: the wait of the request before
    this exchange, if any.
    """

    _downstream: WaitingConnection
    _request: Request
    _lease: Lease
    _waiting: Waiting | None = None
    _upstream: Upstream | None = None
    _write: Callable[[bytes], None] = _write_nothing  # to the client; set when the answer begins
    tail: deque[bytes] | tuple[bytes, ...] = ()  # the last reads of the answer
    _opening: bytes = b""
    _retried: bool = False
    _swept_bytes: int = -1  # ``bytes_out`` at the last sweep
    _progress_at: float = 0.0  # when a sweep last found progress
    _lagging_since: float = 0.0  # when a sweep first found a slow reader; 0: it reads fast enough
    _meter: TokenMeter | None = None
    _abandoned: Abandoned | None = None
    _body_incomplete: bool = False  # of the request
    _streams_events: bool = False  # the answer is a stream of events
    _redacted: RedactedBody | None = None
    _end_error: HttpError | None = None  # the server closed the connection; awaits the cause
    _request_sent_at: float = 0.0  # when the last byte of the request was sent
    _lease_over: bool = False  # the lease has ended before the answer
    _prompt_tokens: int = 0  # an estimate, where all slots share one context
    upload: Upload | None = None  # while the body of the request is forwarded
    over: bool = False
    answered: bool = False  # a byte of the response has arrived
    status: int = 0  # 0: the client has received nothing
    sent_at: float = 0.0
    first_byte_at: float = 0.0
    bytes_out: int = 0

    def __repr__(self) -> str:
        request = self._request
        progress = f"{self.status}, {self.bytes_out} bytes" if self.status else "no answer yet"
        return f"<Exchange of {request!r}: {progress}, {self._lease!r}>"

    def start(self) -> None:
        lease, request = self._lease, self._request
        lease.on_revoked(self._revoked)
        if request.jobs > 1 or lease.endpoint.share:
            self._weigh()
        if (kept := request.kept_stream) is not None and kept.is_uncounted and lease.endpoint.node is None:
            work = self._count_and_connect(kept)
            self._downstream.proxy.start_soon(work, "count the tokens of a stream")
            return
        pool = self._downstream.proxy.pool_of(lease.endpoint)
        upstream = pool.take(request.received_at if self._waiting is None else monotonic())
        if upstream is not None:
            self.connected(upstream)
        else:
            pool.connect(self)

    def _weigh(self) -> None:
        """Take a permit for each job, and those of the slots whose context the request needs."""
        request, share = self._request, self._lease.endpoint.share
        permits = request.jobs
        if share:
            self._prompt_tokens = prompt_tokens(request.body)
            permits = max(permits, permits_for(self._prompt_tokens, 0, share))
        self._lease.weigh(permits)

    async def _count_and_connect(self, stream: KeptStream) -> None:
        """Only the model knows how many tokens the client has, if one event may have several."""
        tokens = await stream.count(self._lease.endpoint)
        if not self.over:
            if tokens is not None:
                stream.ask_for_rest(tokens)  # if not: it was asked for without this number, and still is
            self._downstream.proxy.pool_of(self._lease.endpoint).connect(self)

    def connected(self, upstream: Upstream) -> None:
        """Send the request with a new head: our framing, and the child's own key (X5, X9)."""
        self._upstream = upstream
        self._request_sent_at = monotonic()
        second_try = self._request.second_try
        if second_try is None or not second_try.runs:
            self.sent_at = self._request_sent_at
        request, api_key = self._request, self._lease.endpoint.api_key
        head, body = request.head, request.body
        opening = head.opening
        if head.route.has_paths and request.hides_paths:
            opening = whole_and_plain(opening)
        if api_key is not None:
            node = self._lease.endpoint.node
            if node is not None:
                opening = node.opening(opening, request.id, request.priority)
            if api_key:
                opening += b"Authorization: Bearer " + api_key.encode("ascii") + b"\r\n"
        if mark := self._lease.endpoint.mark:
            opening += mark
        if request.key is not None and (head.route is CONTROL or head.route.of_batches):
            opening += b"X-Llamasup-Client: " + quote(request.key.client).encode("ascii") + b"\r\n"
        if self.upload is not None:
            upstream.send(self, opening + self.upload.framing, b"")
            self._downstream.proxy.outbox.flush()  # the upload writes past it
            self.upload.connect(upstream)
        elif body or head.method not in _BODILESS:
            upstream.send(self, b"%bContent-Length: %d\r\n\r\n" % (opening, len(body)), body)
        else:
            upstream.send(self, opening + b"\r\n", b"")

    @property
    def is_head(self) -> bool:
        return self._request.head.method == b"HEAD"

    # --- from the upstream connection

    @property
    def is_replayable(self) -> bool:
        return self._request.replayable and self._request.head.route.repeats

    def begin(self, upstream: AnswerHead, framing: bytes | None, body: bytes) -> None:
        is_error = upstream.status >= 400 and self._lease.endpoint.node is not None
        if is_error and self._node_refused(upstream, body):
            return
        if self._lease.endpoint.share and self._is_crowded(upstream, body):
            return
        second_try = self._request.second_try
        if second_try is not None and second_try.takes(self, upstream, framing, body):
            return
        self.first_byte_at = monotonic()
        self.status = upstream.status
        self.bytes_out = len(body)
        request, downstream = self._request, self._downstream
        self._streams_events = upstream.streams_events
        kept = self._kept_stream(framing) if self._streams_events else None
        if request.body and not (upstream.complete or request.fingerprint) and self._suspects is not None:
            request.fingerprint = self._suspects.fingerprint(request.head.path, request.body)
        request.body = b""  # the request cannot be sent again from now on; a stream may last for minutes
        if request.held_bytes and kept is None:
            downstream.proxy.bodies.drop(request)
        if self.upload is not None:  # answered before the body was complete: both connections must close
            self.upload.drop_copy()
            request.keep_alive = False
            upstream.disable_keepalive()
        if request.keepalive_stream is not None:
            is_stream = self.status == 200 and upstream.streams_events
            self._write = request.keepalive_stream.join(is_stream=is_stream, framing=framing)
            if kept is not None and kept is not request.keepalive_stream:
                self._write = kept.first(self._write)
            self._write(body)
        elif request.translation is not None:
            self._write = self._translated(request.translation, upstream, framing)
            if kept is not None:
                self._write = kept.first(self._write)
            self._write(body)
        elif kept is None:
            self._write_head(upstream, framing, body)
        else:
            self._write_head(upstream, framing, b"")
            self._write = kept.first(self._write)
            self._write(body)
        self.tail = (body,) if upstream.complete else deque((body,), TAIL_PIECES)
        if (request.jobs > 1 or request.quota is not None) and self._is_metered:
            self._meter = TokenMeter(request.head.route.label, streams=upstream.streams_events)
            self.tail = MeteredTail(self._meter)
            self.tail.append(body)
        if not upstream.streams_events or request.head.route.label == "/v1/messages":
            self._opening = body[:OPENING_BYTES]
            if kept is not None:
                kept.opening = self._opening = kept.opening or self._opening
        if downstream.paused:
            upstream.pause()

    # --- for the stage that holds its answer (``HeldExchange``)

    @property
    def endpoint(self) -> Endpoint:
        return self._lease.endpoint

    @property
    def counted_as(self) -> str:
        """The model that the request counts for."""
        return self._request.counted_as or self._lease.endpoint.model

    @property
    def is_uploaded(self) -> bool:
        return self.upload is not None

    def hold(self, beginning: bytes, more: Callable[[bytes], None]) -> None:
        self.bytes_out = len(beginning)
        self.tail = deque((beginning,))
        self._write = more

    def send_again(self) -> None:
        self.tail, self._write = (), _write_nothing
        self.answered = self._retried = False
        self.bytes_out = 0
        pool = self._downstream.proxy.pool_of(self._lease.endpoint)
        upstream = pool.take(monotonic())
        if upstream is not None:
            self.connected(upstream)
        else:
            pool.connect(self)

    def fail_soon(self, error: HttpError) -> None:
        asyncio.get_running_loop().call_soon(self._fail_unless_over, error)

    def _fail_unless_over(self, error: HttpError) -> None:
        if not self.over:
            self.fail(error, "upstream_failed")

    @property
    def _asks_again(self) -> bool:
        """Whether this is the second attempt, and the client has received nothing of its answer."""
        second_try = self._request.second_try
        return second_try is not None and second_try.runs

    def _answer_first(self, second_try: SecondTry) -> None:
        """End the second attempt before its answer, and give the client the first one."""
        self._release(abort=True)
        self.over, self._lease_over = False, True
        second_try.begin_first(self)
        self.finished()

    def _kept_stream(self, framing: bytes | None) -> KeptStream | None:
        """What keeps this stream so that it can be continued; None: it is not."""
        request, route = self._request, self._request.model_route
        stream = request.kept_stream
        if stream is not None:
            repeats = self._lease.endpoint.repeats_begun_message
            stream.expect(repeats=repeats, fail=self.fail_soon)
            return stream
        if route is None or not route.served.queue.continues_streams:
            return None
        is_chunked = framing is not None and framing.startswith(b"Transfer")
        if self.status != 200 or not is_chunked or not request.replayable or self.upload is not None:
            return None
        keep = self._downstream.proxy.stages.keep
        if keep is not None:
            request.kept_stream = keep(self._downstream, request, self.sent_at, self.first_byte_at)
        return request.kept_stream

    def _node_refused(self, upstream: AnswerHead, body: bytes) -> bool:
        """Whether this answer of another node is not for the client: another server takes the request, or
        our key for the node is wrong. What has ended the servers of one node goes to no other.
        """
        status, node = upstream.status, self._lease.endpoint.node
        if status in _NODE_REFUSALS and POISON not in body and self._requeue(refused=True):
            if node is not None:
                node.suspect()  # it may be about to end
            upstream.abort()
            return True
        if status != 401:
            return False
        self._upstream = None
        upstream.abort()
        reason = f"{self._lease.endpoint.server} does not accept our key"
        self.fail(HttpError(502, reason, "server_error", "node_refused", "see llamasup's log"), "refused")
        return True

    def _is_crowded(self, upstream: AnswerHead, body: bytes) -> bool:
        """Whether the requests have filled the context that they share, and this one is sent again.

        A stream then begins with the error: its head came before the prompt was read.
        """
        may_be = upstream.status == 500 or upstream.streams_events
        if not may_be or self._lease.alone or not is_shared_full(body) or not self._requeue(crowded=True):
            return False
        upstream.abort()
        return True

    @property
    def _is_metered(self) -> bool:
        """Whether a meter reads the whole answer, because its end does not have all token counts."""
        request = self._request
        counts = request.quota is not None and request.quota.counts_tokens
        return request.needs_permit and (request.jobs > 1 or counts)

    def _translated(
        self, translation: Translation, upstream: AnswerHead, framing: bytes | None
    ) -> Callable[[bytes], None]:
        request, downstream, waiting = self._request, self._downstream, self._waiting
        form = ResponseForm(
            request.response_lines,
            http_1_0=request.http_1_0,
            close=not downstream.keeps_alive(request),
            load_s=0.0 if waiting is None else waiting.entry.waited_s,
        )
        return translation.begin(
            downstream.send,
            upstream.status,
            form,
            is_chunked=framing is not None and framing.startswith(b"Transfer"),
            streams_events=upstream.streams_events,
            end=self._untranslatable,
        )

    def _untranslatable(self) -> None:
        """The response has ended with an error. Called while bytes of the answer are relayed."""
        asyncio.get_running_loop().call_soon(self._end_untranslatable)

    def _end_untranslatable(self) -> None:
        if not self.over:
            self._release(abort=True)
            self._record("translation_failed")
            self._downstream.close()

    def _write_head(self, upstream: AnswerHead, framing: bytes | None, body: bytes) -> None:
        request, downstream = self._request, self._downstream
        self._write = write = downstream.send
        if request.head.route.has_paths and request.hides_paths:
            is_chunked = framing is not None and framing.startswith(b"Transfer")
            rechunk = is_chunked and not request.http_1_0
            self._redacted = RedactedBody(write, is_chunked=is_chunked, rechunk=rechunk)
        if framing is None:  # the end of the connection ends the body (RFC 9112 §6.3, rule 8)
            request.keep_alive = False
        elif request.http_1_0 and framing.startswith(b"Transfer"):
            framing = None
            self._write = Dechunker(write).write
        if self._redacted is not None:
            self._write = self._redacted.add
        end = (
            b"\r\n" if request.keep_alive and not downstream.proxy.draining else b"Connection: close\r\n\r\n"
        )
        if request.head.from_node:  # it knows the id, and recognizes a head that it has seen before
            timing = b"" if self._waiting is None else self._timing(self._waiting)
            lines = (upstream.lines, framing or b"", timing, request.repaired, end)
            head = status_line(self.status) + b"".join(lines)
        else:
            head = b"%b%b%bX-Request-Id: %b\r\n%b%b%b%b" % (
                status_line(self.status),
                upstream.lines,
                framing or b"",
                request.id,
                request.repaired,
                request.cors,
                b"Server-Timing: queue;dur=%.1f\r\n" % ((self.sent_at - request.received_at) * 1000.0)
                if self._waiting is None
                else self._timing(self._waiting),
                end,
            )
        if framing is not None and len(body) < COPY_BYTES and self._redacted is None:
            write(head + body)
        else:
            write(head)
            self._write(body)

    def _timing(self, waiting: Waiting) -> bytes:
        """The Server-Timing of a request that waited: for a load (``load``), and otherwise (``queue``)."""
        load_s = waiting.entry.waited_s
        queue_s = self.sent_at - self._request.received_at - load_s
        return b'Server-Timing: queue;dur=%.1f;desc="position %d", load;dur=%.1f\r\n' % (
            queue_s * 1000.0,
            waiting.entry.position,
            load_s * 1000.0,
        )

    def upload_pauses(self) -> None:
        if self.upload is not None:
            self.upload.pause()

    def body_sent(self) -> None:
        """The body is complete: llama-server (b11434) begins only now."""
        self._request_sent_at = monotonic()
        if self._request.needs_permit:
            self._lease.acquire_permit()
            self._weigh()

    def upload_resumes(self) -> None:
        if self.upload is not None:
            self.upload.resume()

    def relay(self, data: bytes) -> None:
        """Forward bytes of the body unchanged. Called for every streamed token."""
        if self._request.kept_stream is not None and self._lease.endpoint.share:
            upstream = self._upstream
            if upstream is not None and self._is_crowded(upstream, data):
                return
        self.bytes_out += len(data)
        self._lease.endpoint.bytes_relayed += len(data)
        self.tail.append(data)  # type: ignore[union-attr]  # the answer was not complete when it began
        self._write(data)

    def last_bytes(self) -> bytes:
        return b"".join(self.tail)[-8:]

    def finished(self) -> None:
        if self.over:  # a node refused the request, which has gone elsewhere
            return
        second_try = self._request.second_try
        if second_try is not None and second_try.holds:
            self._upstream = None  # it has gone back to its pool: a slow client must not pause it
            if second_try.completed(self, draining=self._downstream.proxy.draining):
                return
        now, request, lease = monotonic(), self._request, self._lease
        lease.endpoint.count_answer(self.status, infers=request.head.needs_permit)
        if request.suspicion is not None and self._suspects is not None:
            self._suspects.clear(request.fingerprint)
        if self._redacted is not None:
            self._redacted.send()
        stream, translation = request.keepalive_stream, request.translation
        error = None if stream is None else stream.finish(self.status)
        answered = None if translation is None or error is not None else translation.finish()
        self.over = True
        self._upstream = None  # it has gone back to its pool
        if self.upload is not None:
            self._end_upload(self.upload)
        if not self._lease_over:
            lease.release(now)
            request.slot_s += lease.permit_s
        if answered is not None:
            self._record("ok" if answered.complete else "translation_failed", answered.status, now)
            if not (answered.complete or answered.framed):  # for the client, the stream is incomplete
                request.keep_alive = False
        else:
            by_node = self.status == 503 and lease.endpoint.node is not None and request.is_batch
            ended = GAVE_WAY if by_node else "ok"  # on the node, as most likely no other reason lasts
            self._record(ended if error is None else "error_event", now=now)
        if error is not None and stream is not None:
            stream.fail(error)
        self._downstream.exchange_over(request, now)

    def _end_upload(self, upload: Upload) -> None:
        """The exchange ends before the body of the request was complete."""
        self._body_incomplete = True
        upload.close()

    def connect_failed(self, error: OSError | TimeoutError) -> None:
        endpoint = self._lease.endpoint
        node, server = endpoint.node, endpoint.server
        if node is not None:
            node.suspect()
        if self.over or ((node is not None or isinstance(error, _TRANSIENT)) and self._requeue()):
            return
        if isinstance(error, TimeoutError):
            status, reason = 504, f"timeout while connecting to {server}"
        elif isinstance(error, (ConnectionRefusedError, FileNotFoundError, BlockingIOError)):
            status, reason = 503, f"{server} accepts no connections ({error.strerror or error})"
        else:
            status, reason = 502, f"{server} cannot be reached ({error.strerror or error})"
        if self.sent_at and self._request.is_batch:
            status = 502  # the server ended after it had got the request, on an earlier connection
        self._await_cause(
            HttpError(status, reason, "unavailable_error", "upstream_unreachable", "try again shortly", 1.0)
        )

    def upstream_broke(self, reason: str, *, closed: bool = False) -> None:
        if self.over or self._end_error is not None or self._end_if_complete():
            return
        upstream, endpoint = self._upstream, self._lease.endpoint
        fresh = upstream is None or upstream.is_fresh
        if not (self.answered or self._retried or fresh or endpoint.closed or self._request.body_discarded):
            # The child closed the idle connection while the request was on its way: no work has begun.
            self._retried = True
            self._upstream = None
            if self.upload is not None:
                self.upload.disconnect()
            self._downstream.proxy.pool_of(endpoint).connect(self)
            return
        if closed and endpoint.node is not None:
            endpoint.node.suspect()
        if closed and self._requeue():
            return
        error = HttpError(
            502, f"{endpoint.server} {reason}", "server_error", "upstream_broke", "see llamasup's log"
        )
        if closed:
            self._await_cause(error)
        else:
            self.fail(error, "upstream_failed")

    def _end_if_complete(self) -> bool:
        """End the answer as usual if llama-server ended between its last event and the end of the body."""
        stream, upstream = self._request.kept_stream, self._upstream
        if stream is None or not self.status or not stream.is_complete:
            return False
        stream.end()
        self.finished()
        if upstream is not None:
            upstream.abort()
        return True

    def _await_cause(self, error: HttpError) -> None:
        """The server does not answer any more, most likely because it ended: soon the cause is known.

        ``error`` is for a connection that was closed for another reason.
        """
        may_wait = (self._can_answer or self._can_send_event) and not self._asks_again
        if self._lease.endpoint.closed or not may_wait:
            self._suspect()
            self.fail(error, "upstream_failed")
            return
        self._end_error = error
        if self.upload is not None:
            self.upload.disconnect()
        if not self._lease.alone:
            self._lease.release_permit()
        self._downstream.proxy.await_cause(self._cause_unknown)

    def _cause_unknown(self) -> None:
        if not self.over and self._end_error is not None:
            self.fail(self._end_error, "upstream_failed")

    def _revoked(self, why: Unavailable) -> None:
        """The generation is being stopped (S13, S16) or has ended (S1)."""
        if self.over or self._end_if_complete():
            return
        if (refusal := self._refusal(why)) is not None:
            self.fail(refusal, "revoked")
            return
        if self._end_error is not None:
            self._suspect()
            self.fail(_with_cause(self._end_error, why), "upstream_failed")
            return
        if self._requeue():
            return
        self._suspect()
        error = why.as_error()
        if not self.status and self._waiting is not None and (permanent := self._waiting.unqueueable_error()):
            error = permanent  # the model does not return: its remedy is more useful than this reason
        self.fail(error, "revoked")

    # --- whether this request has ended the server

    @property
    def _suspects(self) -> Suspects | None:
        """Those of the model; None: another node decides, or no model has the request."""
        route = self._request.model_route
        return None if route is None or self._lease.endpoint.node is not None else route.served.queue.suspects

    def _suspect(self) -> None:
        """Remember that the server has ended while it had the request, which llamasup does not send again."""
        request, suspects, endpoint = self._request, self._suspects, self._lease.endpoint
        may_be_poison = self.sent_at and request.head.may_wait and (endpoint.crashed or not endpoint.closed)
        if suspects is not None and may_be_poison:
            fingerprint = request.fingerprint or suspects.fingerprint(request.head.path, request.body)
            suspects.suspect(fingerprint, monotonic(), endpoint.explain)

    def _refusal(self, why: Unavailable) -> HttpError | None:
        """The refusal of a request that has ended its server, for the second time and alone."""
        request, lease, suspects = self._request, self._lease, self._suspects
        if suspects is None or not (lease.endpoint.crashed and self.sent_at):
            return None
        ends = () if request.suspicion is None else request.suspicion.ends
        if self._waiting is not None:
            ends = self._waiting.entry.ends
        if next_step(len(ends) + 1, alone=lease.alone) is not Next.REFUSED:
            return None
        for explain in ends:
            explain()
        _log.warning("request %s has ended llama-server twice, and is refused", request.id.decode())
        fingerprint = request.fingerprint or suspects.fingerprint(request.head.path, request.body)
        return suspects.refuse(fingerprint, monotonic(), why).as_error()

    def _crashed_after_cancel(self, why: Unavailable) -> None:
        """The server has ended while it still worked on the request, although the client has left."""
        if self._refusal(why) is None:
            self._suspect()

    # --- from the client's connection

    def cancel(self) -> None:
        """The client disconnected: signal that to the child, which stops at its next check (S11)."""
        if not self.over:
            self._release(abort=True)
            self._record("client_gone", CLIENT_GONE if not self.status else self.status)

    def refused(self, error: HttpError) -> None:
        self.fail(error, "refused")

    def interrupt(self, error: HttpError, outcome: str) -> None:
        """End the request because an administrator cancelled it, or another client needs its slot."""
        self.fail(error, outcome)

    def held_slots(self) -> HeldSlots | None:
        request, lease = self._request, self._lease
        if self.over or not lease.since_s:
            return None
        return HeldSlots(self.counted_as, request.client, lease.since_s, lease.weight)

    def waits_since(self) -> float:
        return 0.0

    def live(self, now: float) -> InFlight:
        request, lease = self._request, self._lease
        is_sent = self.sent_at > 0.0 and self.upload is None
        phase = phase_of(
            needs_permit=request.needs_permit, is_sent=is_sent, has_answer=self.first_byte_at > 0.0
        )
        since_s = self.first_byte_at or (self._request_sent_at if is_sent else 0.0)
        shown = described(request, phase, now, model=self.counted_as, since_s=since_s)
        waiting = self._waiting
        shown = replace(
            shown,
            generation=lease.endpoint.generation,
            node=None if lease.endpoint.node is None else lease.endpoint.node.name,
            bytes_out=self.bytes_out,
            replayed=waiting is not None and waiting.entry.replayed,
        )
        return InFlight(shown, lease, self.first_byte_at)

    def sweep(self, now: float) -> None:
        """Check the timeouts of the request and of its response. Called every ``Limits.sweep_s``."""
        proxy = self._downstream.proxy
        if (error := overdue(self._request, proxy.config, now)) is not None:
            self.fail(error, "timed_out")
            return
        if not self.status:
            send_keepalive_if_due(self._downstream, self._request, now)
        elif not self._downstream.paused:
            self._lagging_since = 0.0
        elif not self._lagging_since:
            self._lagging_since = now
        elif now - self._lagging_since >= proxy.limits.lag_s:
            self._lease.release_permit()
        if share := self._lease.endpoint.share:  # the answer takes more and more of the shared context
            permits = permits_for(self._prompt_tokens, self.bytes_out, share)
            self._lease.weigh(max(self._lease.weight, permits))
        has_begun = self.status or self.bytes_out  # these may be held
        if not has_begun or self._downstream.paused or self.bytes_out != self._swept_bytes:
            self._swept_bytes = self.bytes_out
            self._progress_at = now
        elif now - self._progress_at >= proxy.limits.upstream_idle_s and self._request.needs_permit:
            reason = f"{self._lease.endpoint.server} has sent nothing for {proxy.limits.upstream_idle_s:g} s"
            self.fail(
                HttpError(504, reason, "timeout_error", "upstream_idle", "try again"), "upstream_failed"
            )

    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()

    # --- the end

    def _requeue(self, *, refused: bool = False, crowded: bool = False) -> bool:
        """Queue the request for the next generation (S10): as it is, if its client has received nothing, else
        to continue its answer.

        ``refused``: its server has answered, so only another one may get it, which may have to start first.
        ``crowded``: its server has no room for it beside others.
        """
        request, endpoint = self._request, self._lease.endpoint
        if not request.replayable or (self.status and (refused or request.kept_stream is None)):
            return False
        if self._asks_again:
            return False  # the client gets the first answer
        downstream = self._downstream
        if refused:  # before the choice between this node and others
            endpoint.ejected_until_s = monotonic() + GRACE_S
        route = downstream.proxy.backend.resolve(endpoint.model, local=request.head.from_node)
        if isinstance(route, Unavailable):
            return False  # the model was removed from the configuration in the meantime
        if route.model.is_virtual:
            return False  # a virtual model hides it since then: its requests go to another model
        queue = route.served.queue
        replaced = endpoint.node is not None and endpoint.node.replaced
        if refused and not replaced and not queue.replaces(endpoint):
            return False
        if self.upload is not None and queue.unqueueable_reason() is None:
            # A server begins only with the complete body: this was no attempt. Buffer the body, then send it.
            self.upload.return_body()
            self._release(abort=True)
            downstream.exchange_awaits_body(request)
            return True
        # A batch decides itself when it sends a request again that may have ended the server. A server that
        # refuses has not ended.
        has_ended = not (refused or crowded)
        if self.sent_at and ((request.is_batch and has_ended) or not request.head.route.repeats):
            return False
        if self.status and not self._continue(request):
            return False
        waiting = self._waiting
        if waiting is None:
            waiting = self._waiting = Waiting(downstream, request, queue, self.counted_as)
        if crowded:
            is_queued = waiting.isolate(self._lease, queue)
        else:
            is_queued = waiting.requeue(self._lease, queue, sent=self.sent_at > 0.0)
        if not is_queued:
            if self.status and (stream := request.kept_stream) is not None:
                request.body = b""
                self._refuse_to_continue(stream, "it was sent again before, or no llama-server can take it")
            return False
        if self.status:
            downstream.proxy.metrics.count_continued(self.counted_as, "continued")
        downstream.exchange_waits(waiting)
        self._release(abort=has_ended)  # last: the free permit may serve the queued request at once
        return True

    def _continue(self, request: Request) -> bool:
        """Make the request that continues the answer. False: that is not possible."""
        stream = request.kept_stream
        assert stream is not None
        if not stream.refusal and (reason := stream.ask_for_rest()):
            self._refuse_to_continue(stream, reason)
        if stream.refusal:
            return False
        request.keepalive_stream = stream
        request.next_comment_at = 0.0
        return True

    def _refuse_to_continue(self, stream: KeptStream, reason: str) -> None:
        stream.refusal = reason
        self._downstream.proxy.metrics.count_continued(self.counted_as, "refused")

    def _release(self, *, abort: bool = False) -> None:
        self.over = True
        request, lease = self._request, self._lease
        if self.upload is not None:
            self._end_upload(self.upload)
        upstream, self._upstream = self._upstream, None
        if abort and upstream is not None:
            self._downstream.proxy.outbox.flush()
            # From the last byte of the request on, the slot is busy until the child closes the connection.
            begun = not self._body_incomplete and upstream.request_sent
            if request.needs_permit and begun and not lease.endpoint.closed:
                clock = self._downstream.proxy.keys.clock
                if lease.since_s:  # it keeps its permits, but the request is over
                    request.slot_s += (monotonic() - lease.since_s) * lease.weight
                request.slot_s += lease.permit_s
                self._abandoned = Abandoned(lease, request, upstream, clock, self._crashed_after_cancel)
                return
            upstream.abort()
        lease.release()
        request.slot_s += lease.permit_s

    def fail(self, error: HttpError, outcome: str) -> None:
        request = self._request
        second_try, kept = request.second_try, request.kept_stream
        if second_try is not None and second_try.runs and outcome != CANCELLED:
            self._answer_first(second_try)
            return
        if kept is not None and kept.refusal:
            error = replace(error, message=f"{error.message} (not continued: {kept.refusal})")
        request.cause = error.cause
        can_send_event = self._can_send_event
        self._release(abort=True)
        if self._can_answer:
            self._record(outcome, error.status)
            self._downstream.exchange_failed(self._request, error)
            return
        self._record(outcome)
        if self._request.translation is not None:
            self._request.translation.fail(error_body(error))
            self._downstream.close()
        elif can_send_event:
            # An error event, and a close without a last chunk: to a client that reads events, and to one that
            # reads HTTP, the stream is incomplete (S12).
            event = error_event(self._request.head.path, error_body(error))
            if not self._request.http_1_0:
                event = chunk(event)
            self._downstream.send(event)
            self._downstream.close()
        else:
            self._downstream.abort()

    @property
    def _can_answer(self) -> bool:
        """Whether the client has received no byte of a response."""
        keepalive_stream, translation = self._request.keepalive_stream, self._request.translation
        if translation is not None:
            return not translation.has_begun
        return not self.status or (keepalive_stream is not None and not keepalive_stream.is_relayed)

    @property
    def _can_send_event(self) -> bool:
        """Whether the response is a stream of events, and not within one."""
        request = self._request
        if request.translation is not None or request.kept_stream is not None:
            return True  # its client gets only whole lines or events
        if self._upstream is None or not self._upstream.streams_events:
            return False
        last = self.last_bytes()
        return not last or last.endswith(_EVENT_ENDS)

    def _record(self, outcome: str, status: int = 0, now: float = 0.0) -> None:
        """``status``: the one that llamasup answered with. ``now``: the time, if it was read before; or 0."""
        request, endpoint, waiting = self._request, self._lease.endpoint, self._waiting
        now = now or monotonic()
        second_try = request.second_try
        received_at, sent_at, first_byte_at = request.received_at, self.sent_at, self.first_byte_at
        stream, reads, bytes_out = request.kept_stream, self.tail, self.bytes_out
        is_continued = stream is not None and stream.is_continued
        if stream is not None and is_continued:
            sent_at, first_byte_at, reads = stream.sent_at, stream.first_byte_at, stream.tail
            bytes_out = stream.sent_bytes
        counts = context = None
        if request.head.needs_permit:
            if self.status == 200:
                tail = tail_of(reads)
                counts = reported(tail, reads, self._opening, self.bytes_out, self._meter)
                if self._meter is None or self._meter.items == 1:
                    context = context_end(tail, counts, endpoint.window)
            elif self.status >= 400:
                context = context_refusal(tail_of(self.tail))
            if counts is not None and (counts.completion or 0) >= MIN_SPEED_TOKENS and counts.tokens_per_s:
                endpoint.tokens_per_s = counts.tokens_per_s
            counts_tokens = request.quota is not None and request.quota.counts_tokens
            if counts is None or request.jobs > 1 or counts_tokens:
                self._estimate_unreported(outcome, counts)
                if counts is None and stream is not None and is_continued:
                    request.unreported_tokens += stream.pieces  # of the first part
        if second_try is not None:
            counts = second_try.total(counts)
            if not self.status:
                bytes_out = 0  # they were held
        self._downstream.proxy.record_request(
            request,
            record_of(
                request,
                status or self.status,
                outcome,
                now,
                self.counted_as,
                endpoint.generation,
                (sent_at or now) - received_at,
                first_byte_at - received_at if first_byte_at else None,
                bytes_out,
                counts,
                0.0 if waiting is None else waiting.entry.waited_s,
                waiting is not None and waiting.entry.replayed,
                context,
                is_continued,
            ),
        )

    def _estimate_unreported(self, outcome: str, counts: TokenCounts | None) -> None:
        """The tokens that the answer did not report, for the usage and for the quota of the key."""
        request, endpoint = self._request, self._lease.endpoint
        if self.sent_at and not self._body_incomplete and self.status in (0, 200):
            request.unreported_tokens = unreported(
                request,
                endpoint,
                counts,
                self._meter,
                outcome,
                streams=self._streams_events if self.first_byte_at else request.wants_events(),
                request_sent_at=self._request_sent_at,
                first_byte_at=self.first_byte_at,
                now=monotonic(),
            )
        if self._abandoned is not None:
            n_ctx = None if endpoint.window is None else endpoint.window.n_ctx
            left = context_left(counts, items_of(request, endpoint, self._meter), n_ctx)
            self._abandoned.max_tokens = None if left is None else left - request.unreported_tokens


def _with_cause(error: HttpError, why: Unavailable) -> HttpError:
    return replace(error, message=why.message, cause=why.cause, remedy=why.remedy)
