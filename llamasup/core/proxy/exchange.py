"""One request and its response: holds the lease, relays between the two connections, writes the record."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

from msgspec.structs import replace

from llamasup.core.http.chunks import is_chunked
from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.token_counts import TokenMeter
from llamasup.core.observability.counters import CANCELLED, GAVE_WAY
from llamasup.core.proxy.answers.answer_tokens import TAIL_PIECES, MeteredTail
from llamasup.core.proxy.answers.sse_keepalive import send_keepalive_if_due
from llamasup.core.proxy.failures import (
    TRANSIENT,
    broken_answer,
    connect_failure,
    refused_key,
    silent_answer,
    with_cause,
)
from llamasup.core.proxy.measured import MeasuredExchange
from llamasup.core.proxy.own_heads import response_head, send_request
from llamasup.core.proxy.request import overdue
from llamasup.core.proxy.resend import is_crowded, is_refusal_of_node, may_leave, may_repeat, queue_after
from llamasup.core.proxy.response import PLAIN, Position, Response, kept_stream
from llamasup.core.proxy.stages import AnswerHead, KeptStream, SecondTry
from llamasup.core.proxy.suspicion import note_fingerprint, refuse_if_poison, suspect, suspects_of
from llamasup.core.proxy.upload import Upload
from llamasup.core.proxy.upstream.abandoned import Abandoned
from llamasup.core.proxy.upstream.connection import COPY_BYTES, Upstream
from llamasup.core.proxy.waiting import CLIENT_GONE, Waiting
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.core.queueing.request_queue import GRACE_S

OPENING_BYTES: Final = 2048  # the first event of a message has 300 bytes and the name of the model


def _write_nothing(_data: bytes) -> None:
    raise AssertionError("the answer has not begun")


class Exchange(MeasuredExchange, eq=False):
    """Connects one request of a client to one response of a child (``ResponseReceiver``, ``ConnectionUser``,
    ``UploadExchange``). Driven only by callbacks.
    """

    _write: Callable[[bytes], None] = _write_nothing  # to the client; set when the answer begins
    _response: Response | None = None  # where the response has stages
    _retried: bool = False
    _end_error: HttpError | None = None  # the server closed the connection; awaits the cause
    _lease_over: bool = False  # the lease has ended before the answer
    answered: bool = False  # a byte of the response has arrived

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

    async def _count_and_connect(self, stream: KeptStream) -> None:
        """Only the model knows how many tokens the client has, if one event may have several."""
        tokens = await stream.count(self._lease.endpoint)
        if not self.over:
            if tokens is not None:
                stream.counted(tokens)
            self._downstream.proxy.pool_of(self._lease.endpoint).connect(self)

    def connected(self, upstream: Upstream) -> None:
        """Send the request with a new head: our framing, and the child's own key (X5, X9)."""
        self._upstream = upstream
        self._request_sent_at = monotonic()
        second_try = self._request.second_try
        if second_try is None or not second_try.runs:
            self.sent_at = self._request_sent_at
        proxy = self._downstream.proxy
        send_request(self, upstream, self._request, self._lease.endpoint, self.upload, proxy.outbox)

    # --- from the upstream connection

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
        kept = None
        if self._streams_events and self.upload is None:
            times = self.sent_at, self.first_byte_at
            kept = kept_stream(downstream, request, self.endpoint, upstream, framing, times, self.fail_soon)
        if request.body and not (upstream.complete or request.fingerprint):
            note_fingerprint(request, self._lease.endpoint)
        request.body = b""  # the request cannot be sent again from now on; a stream may last for minutes
        if request.held_bytes and kept is None:
            downstream.proxy.bodies.drop(request)
        if self.upload is not None:  # answered before the body was complete: both connections must close
            self.upload.drop_copy()
            request.keep_alive = False
            upstream.disable_keepalive()
        if (
            kept is None
            and request.keepalive_stream is None
            and request.translation is None
            and framing is not None
            and not (request.http_1_0 and is_chunked(framing))
            and not (request.head.route.has_paths and request.hides_paths)
        ):
            self._write = send = downstream.send
            head = response_head(
                request,
                self.status,
                upstream.lines,
                framing,
                self._waiting,
                self.sent_at,
                draining=downstream.proxy.draining,
            )
            if len(body) < COPY_BYTES:
                send(head + body)
            else:
                send(head)
                send(body)
        else:
            self._write = self._staged.begin(upstream, framing, kept, self.sent_at)
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

    @property
    def _staged(self) -> Response:
        """The response, for all but a plain one."""
        if self._response is None:
            self._response = Response(self._downstream, self._request, self._waiting, self._end_untranslated)
        return self._response

    def _end_untranslated(self) -> None:
        """A translation has ended the response with an error."""
        if not self.over:
            self._release(abort=True)
            self._record("translation_failed")
            self._downstream.close()

    # --- for the stage that holds its answer (``HeldExchange``)

    @property
    def endpoint(self) -> Endpoint:
        return self._lease.endpoint

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

    def _answer_first(self, second_try: SecondTry) -> None:
        """End the second attempt before its answer, and give the client the first one."""
        self._release(abort=True)
        self.over, self._lease_over = False, True
        second_try.begin_first(self)
        self.finished()

    def _node_refused(self, upstream: AnswerHead, body: bytes) -> bool:
        """Whether this error of another node is not for the client, because another server takes the request,
        or because our key for the node is wrong.
        """
        node = self._lease.endpoint.node
        if is_refusal_of_node(upstream, body) and self._requeue(refused=True):
            if node is not None:
                node.suspect()  # it may be about to end
            upstream.abort()
            return True
        if upstream.status != 401:
            return False
        self._upstream = None
        upstream.abort()
        self.fail(refused_key(self._lease.endpoint.server), "refused")
        return True

    def _is_crowded(self, upstream: AnswerHead, body: bytes) -> bool:
        """Whether the requests have filled the context that they share, and this one is sent again."""
        if not is_crowded(upstream, self._lease, body) or not self._requeue(crowded=True):
            return False
        upstream.abort()
        return True

    def body_sent(self) -> None:
        """The body is complete: llama-server (b11434) begins only now."""
        self._request_sent_at = monotonic()
        if self._request.needs_permit:
            self._lease.acquire_permit()
            self._weigh()

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
        if request.suspicion is not None and (suspects := suspects_of(request, lease.endpoint)) is not None:
            suspects.clear(request.fingerprint)
        response = self._response
        ended = PLAIN if response is None else response.end(self.status)
        self.over = True
        self._upstream = None  # it has gone back to its pool
        if self.upload is not None:
            self._end_upload(self.upload)
        if not self._lease_over:
            lease.release(now)
            request.slot_s += lease.permit_s
        # On a node, a batch gave way: most likely no other reason lasts.
        gave_way = self.status == 503 and lease.endpoint.node is not None and request.is_batch
        self._record(ended.outcome or (GAVE_WAY if gave_way else "ok"), ended.status, now)
        if response is not None and ended.error is not None:
            response.send_error(ended.error)
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
        if self.over or ((node is not None or isinstance(error, TRANSIENT)) and self._requeue()):
            return
        failure = connect_failure(server, error)
        if self.sent_at and self._request.is_batch:
            failure = replace(failure, status=502)  # the server ended after it had got the request before
        self._await_cause(failure)

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
        error = broken_answer(endpoint.server, reason)
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
        position = self._staged.position(self.status, self._is_between_events)
        second_try = self._request.second_try
        asks_again = second_try is not None and second_try.runs  # else there is an answer already
        if self._lease.endpoint.closed or position is Position.INSIDE or asks_again:
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

    def _revoked(self, why: HttpError) -> None:
        """The generation is being stopped (S13, S16) or has ended (S1)."""
        if self.over or self._end_if_complete():
            return
        if (refusal := self._refusal(why)) is not None:
            self.fail(refusal, "revoked")
            return
        if self._end_error is not None:
            self._suspect()
            self.fail(with_cause(self._end_error, why), "upstream_failed")
            return
        if self._requeue():
            return
        self._suspect()
        error = why
        if not self.status and self._waiting is not None and (permanent := self._waiting.unqueueable_error()):
            error = permanent  # the model does not return: its remedy is more useful than this reason
        self.fail(error, "revoked")

    def _suspect(self) -> None:
        suspect(self._request, self._lease.endpoint, sent=self.sent_at > 0.0)

    def _refusal(self, why: HttpError) -> HttpError | None:
        return refuse_if_poison(self._request, self._lease, self._waiting, why, sent=self.sent_at > 0.0)

    def _crashed_after_cancel(self, why: HttpError) -> None:
        """The server has ended while it still worked on the request, although the client has left."""
        if self._refusal(why) is None:
            self._suspect()

    # --- from the client's connection

    def cancel(self) -> None:
        """The client disconnected: signal that to the child, which stops at its next check (S11)."""
        if not self.over:
            self._release(abort=True)
            self._record("client_gone", CLIENT_GONE if not self.status else self.status)

    def interrupt(self, error: HttpError, outcome: str) -> None:
        """End the request because an administrator cancelled it, or another client needs its slot."""
        self.fail(error, outcome)

    def sweep(self, now: float) -> None:
        """Check the timeouts of the request and of its response. Called every ``Limits.sweep_s``."""
        proxy = self._downstream.proxy
        if (error := overdue(self._request, proxy.config, now)) is not None:
            self.fail(error, "timed_out")
            return
        if not self.status:
            send_keepalive_if_due(self._downstream, self._request, now)
        else:
            self._watch_lag(now)
        self._weigh_answer()
        idle_s = proxy.limits.upstream_idle_s
        if self._silent_s(now) >= idle_s and self._request.needs_permit:
            self.fail(silent_answer(self._lease.endpoint.server, idle_s), "upstream_failed")

    # --- the end

    def _requeue(self, *, refused: bool = False, crowded: bool = False) -> bool:
        """Queue the request for the next generation (S10): as it is, if its client has received nothing, else
        to continue its answer.

        ``refused``: its server has answered, so only another one may get it, which may have to start first.
        ``crowded``: its server has no room for it together with others.
        """
        request, endpoint = self._request, self._lease.endpoint
        if not may_leave(request, self.status, refused=refused):
            return False
        downstream = self._downstream
        if refused:
            endpoint.ejected_until_s = monotonic() + GRACE_S
        queue = queue_after(request, endpoint, downstream.proxy.backend, refused=refused)
        if queue is None:
            return False
        if self.upload is not None and queue.unqueueable_reason() is None:
            # A server begins only with the complete body: this was no attempt. Buffer the body, then send it.
            self.upload.return_body()
            self._release(abort=True)
            downstream.exchange_awaits_body(request)
            return True
        sent, has_ended = self.sent_at > 0.0, not (refused or crowded)
        if not may_repeat(request, sent=sent, has_ended=has_ended):
            return False
        begun = request.kept_stream if self.status else None
        if begun is not None and not begun.ask_for_rest(self.counted_as):
            return False
        waiting = self._waiting
        if waiting is None:
            waiting = self._waiting = Waiting(downstream, request, queue, self.counted_as)
        if crowded:
            is_queued = waiting.isolate(self._lease, queue)
        else:
            is_queued = waiting.requeue(self._lease, queue, sent=sent)
        if not is_queued:
            if begun is not None:
                request.body = b""
                begun.refuse("it was sent again before, or no llama-server can take it", self.counted_as)
            return False
        if begun is not None:
            downstream.proxy.metrics.count_continued(self.counted_as, "continued")
        downstream.exchange_waits(waiting)
        self._release(abort=has_ended)  # last: the free permit may serve the queued request at once
        return True

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
        response = self._staged
        position = response.position(self.status, self._is_between_events)
        self._release(abort=True)
        if position is Position.NOTHING:
            self._record(outcome, error.status)
            self._downstream.exchange_failed(request, error)
        else:
            self._record(outcome)
            response.fail(error, position)
