"""One request and its response: holds the lease, relays between the two connections, writes the record.

Its states are in ``exchange_states.py``. What changes an answer on its way is a stage (``stages.py``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, Final

from msgspec.structs import replace

from llamasup.core.http.chunks import chunk
from llamasup.core.http.heads import HttpError, error_body
from llamasup.core.http.sse import error_event
from llamasup.core.llama_server.token_counts import TokenMeter
from llamasup.core.observability.counters import CANCELLED, GAVE_WAY
from llamasup.core.proxy import failures
from llamasup.core.proxy.exchange_states import CONNECTING, HELD, LOST, OVER, RELAYING, SENT
from llamasup.core.proxy.measured import TAIL_PIECES, MeasuredExchange, MeteredTail
from llamasup.core.proxy.request import overdue
from llamasup.core.proxy.response import compose, send_comment_if_due
from llamasup.core.proxy.stages import AS_ANSWERED, AnswerHead, Begun, Position
from llamasup.core.proxy.upload import Upload
from llamasup.core.proxy.upstream.abandoned import Abandoned
from llamasup.core.proxy.upstream.connection import COPY_BYTES, Upstream
from llamasup.core.proxy.waiting import CLIENT_GONE, Waiting
from llamasup.core.queueing.request_queue import GRACE_S

OPENING_BYTES: Final = 2048  # the first event of a message has 300 bytes and the name of the model
_BODILESS: Final = (b"GET", b"HEAD", b"DELETE", b"OPTIONS")


def _write_nothing(_data: bytes) -> None:
    raise AssertionError("the answer has not begun")


class Exchange(MeasuredExchange, eq=False):
    """Connects one request of a client to one response of a child (``ResponseReceiver``, ``ConnectionUser``,
    ``UploadExchange``, ``Attempt``). Driven only by callbacks.
    """

    _write: Callable[[bytes], None] = _write_nothing  # to the client; set when the answer begins
    _retried: bool = False
    _end_error: HttpError | None = None  # of a lost connection
    _lease_over: bool = False  # the lease has ended before the answer
    answered: bool = False  # a byte of the response has arrived

    # --- the request

    def start(self) -> None:
        lease, request = self._lease, self.request
        lease.on_revoked(self._revoked)
        if request.jobs > 1 or lease.endpoint.share:
            self._weigh()
        proxy = self.client.proxy
        if (stages := request.stages) is None and request.translator is not None:
            stages = compose(self.client, request)
        if stages is not None and (work := stages.prepare(lease.endpoint)) is not None:
            proxy.tasks.start(self._connect_after(work), "prepare a request")
            return
        pool = proxy.pool_of(lease.endpoint)
        upstream = pool.take(request.received_at if self.waiting is None else monotonic())
        if upstream is not None:
            self.connected(upstream)
        else:
            pool.connect(self)

    async def _connect_after(self, work: Coroutine[Any, Any, Callable[[], object]]) -> None:
        change_request = await work
        if self.state is not OVER:
            change_request()
            self.client.proxy.pool_of(self._lease.endpoint).connect(self)

    def connected(self, upstream: Upstream) -> None:
        """Send the request with a new head: our framing, and the child's own key (X5, X9)."""
        self.state = SENT
        self._upstream = upstream
        self._request_sent_at = monotonic()
        if not self._sent_again:
            self.sent_at = self._request_sent_at
        request, upload = self.request, self.upload
        opening = request.opening_for(self._lease.endpoint)
        body = request.body
        if upload is not None:
            upstream.send(self, opening + upload.framing, b"")
            self.client.proxy.outbox.flush()  # the upload writes past it
            upload.connect(upstream)
        elif body or request.head.method not in _BODILESS:
            upstream.send(self, b"%bContent-Length: %d\r\n\r\n" % (opening, len(body)), body)
        else:
            upstream.send(self, opening + b"\r\n", b"")

    def body_sent(self) -> None:
        """The body is complete: llama-server (b11434) begins only now."""
        self._request_sent_at = monotonic()
        if self.request.needs_permit:
            self._lease.acquire_permit()
            self._weigh()

    # --- from the upstream connection

    def begin(self, upstream: AnswerHead, framing: bytes | None, body: bytes) -> None:
        endpoint, request, client = self._lease.endpoint, self.request, self.client
        if upstream.status >= 400 and endpoint.node is not None and self._node_refused(upstream, body):
            return
        if endpoint.share and self._is_crowded(upstream, body):
            return
        self._streams_events = upstream.streams_events
        stages = request.stages
        if stages is None and request.needs_stages(streams_events=upstream.streams_events):
            stages = compose(client, request)
        if stages is not None and stages.holds(self, upstream, framing, body):
            return
        self.state = RELAYING
        self.first_byte_at = monotonic()
        self.status = upstream.status
        self.bytes_out = len(body)
        if request.body and not (upstream.complete or request.fingerprint):
            failures.note_fingerprint(request, endpoint)
        if self.upload is not None:  # answered before the body was complete: both connections must close
            self.upload.drop_copy()
            request.keep_alive = False
            if self._upstream is not None:
                self._upstream.disable_keepalive()
        can_continue = False
        if stages is None:
            if framing is None:  # the end of the connection ends the body (RFC 9112 §6.3, rule 8)
                request.keep_alive = False
            self._write = send = client.send
            head = self.response_head(upstream, framing or b"")
            if len(body) < COPY_BYTES:
                send(head + body)
            else:
                send(head)
                send(body)
        else:
            stages.begin(self, upstream, framing)
            can_continue = stages.received is not None
            self._write = self._write_unless_crowded if endpoint.share and can_continue else stages.write
            if body:
                stages.write(body)
        request.body = b""  # the request cannot be sent again from now on; a stream may last for minutes
        if request.held_bytes and not can_continue:
            client.proxy.bodies.drop(request)
        self.tail = (body,) if upstream.complete else deque((body,), TAIL_PIECES)
        if (request.jobs > 1 or request.quota is not None) and self._is_metered:
            self._meter = TokenMeter(request.head.route.label, streams=upstream.streams_events)
            self.tail = MeteredTail(self._meter)
            self.tail.append(body)
        if not upstream.streams_events or request.head.route.label == "/v1/messages":
            self._opening = body[:OPENING_BYTES]
            if request.begun is not None:
                self._opening = request.begun.opening or self._opening
        if client.paused:
            self.pause()

    def _node_refused(self, answer: AnswerHead, body: bytes) -> bool:
        """Whether this error of another node is not for the client, because another server takes the request,
        or because our key for the node is wrong.
        """
        node = self._lease.endpoint.node
        if failures.is_refusal_of_node(answer, body) and self._requeue(refused=True):
            if node is not None:
                node.suspect()  # it may be about to end
            return True
        if answer.status != 401:
            return False
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abort()
        self.fail(failures.refused_key(self._lease.endpoint.server), "refused")
        return True

    def _is_crowded(self, answer: AnswerHead, body: bytes) -> bool:
        """Whether the requests have filled the context that they share, and this one is sent again."""
        return failures.is_crowded(answer, self._lease, body) and self._requeue(crowded=True)

    def _write_unless_crowded(self, data: bytes) -> None:
        """Write bytes of an answer that another server may continue."""
        stages, upstream = self.request.stages, self._upstream
        if stages is not None and (upstream is None or not self._is_crowded(upstream, data)):
            stages.write(data)

    def relay(self, data: bytes) -> None:
        """Forward bytes of the body. Called for every streamed token."""
        self.bytes_out += len(data)
        self._lease.endpoint.bytes_relayed += len(data)
        self.tail.append(data)  # type: ignore[union-attr]  # the answer was not complete when it began
        self._write(data)

    def finished(self) -> None:
        if self.state is OVER:  # a node refused the request, which has gone elsewhere
            return
        stages = self.request.stages
        if self.state is HELD and stages is not None:
            self._upstream = None  # it has gone back to its pool: a slow client must not pause it
            if not stages.release(self):
                return
        now, request, lease = monotonic(), self.request, self._lease
        lease.endpoint.count_answer(self.status, infers=request.head.needs_permit)
        if request.suspicion is not None:
            failures.clear(request, lease.endpoint)
        ended = AS_ANSWERED if stages is None else stages.end(self.status)
        if not ended.is_whole:
            request.keep_alive = False
        self.state = OVER
        self._upstream = None  # it has gone back to its pool
        if self.upload is not None:
            self._end_upload(self.upload)
        if not self._lease_over:
            lease.release(now)
            request.slot_s += lease.permit_s
        # On a node, a batch gave way: most likely no other reason lasts.
        gave_way = self.status == 503 and lease.endpoint.node is not None and request.is_batch
        self._record(ended.outcome or (GAVE_WAY if gave_way else "ok"), ended.status, now)
        self.client.exchange_over(request, now)

    # --- for the stages (``Attempt``)

    def hold(self, beginning: bytes, more: Callable[[bytes], None]) -> None:
        self.state = HELD
        self.bytes_out = len(beginning)
        self.tail = deque((beginning,))
        self._write = more

    def send_again(self) -> None:
        self.state, self._sent_again = CONNECTING, True
        self.tail, self._write = (), _write_nothing
        self.answered = self._retried = False
        self.bytes_out = 0
        pool = self.client.proxy.pool_of(self._lease.endpoint)
        upstream = pool.take(monotonic())
        if upstream is not None:
            self.connected(upstream)
        else:
            pool.connect(self)

    def end_soon(self, outcome: str, error: HttpError | None = None) -> None:
        asyncio.get_running_loop().call_soon(self._end, outcome, error)

    def _end(self, outcome: str, error: HttpError | None) -> None:
        if self.state is OVER:
            return
        if error is not None:
            self.fail(error, outcome)
            return
        self._release()
        self._record(outcome)
        self.client.close()

    def _use_earlier_answer(self) -> None:
        """End the second attempt before its answer, and give the client the first one."""
        self._end_attempt()
        self._lease_over = True
        assert self.request.stages is not None
        self.request.stages.rescue(self)
        self.finished()

    # --- a connection that fails

    def _end_upload(self, upload: Upload) -> None:
        """The exchange ends before the body of the request was complete."""
        self._body_incomplete = True
        upload.close()

    def connect_failed(self, error: OSError | TimeoutError) -> None:
        endpoint = self._lease.endpoint
        node, server = endpoint.node, endpoint.server
        if node is not None:
            node.suspect()
        may_leave = node is not None or isinstance(error, failures.TRANSIENT)
        if self.state is OVER or (may_leave and self._requeue()):
            return
        failure = failures.connect_failure(server, error)
        if self.sent_at and self.request.is_batch:
            failure = replace(failure, status=502)  # the server ended after it had got the request before
        self._await_cause(failure)

    def upstream_broke(self, reason: str, *, closed: bool = False) -> None:
        if self.state in (OVER, LOST) or self._end_if_complete():
            return
        upstream, endpoint = self._upstream, self._lease.endpoint
        fresh = upstream is None or upstream.is_fresh
        if not (self.answered or self._retried or fresh or endpoint.closed or self.request.body_discarded):
            # The child closed the idle connection while the request was on its way: no work has begun.
            self.state, self._retried = CONNECTING, True
            self._upstream = None
            if self.upload is not None:
                self.upload.disconnect()
            self.client.proxy.pool_of(endpoint).connect(self)
            return
        if closed and endpoint.node is not None:
            endpoint.node.suspect()
        if closed and self._requeue():
            return
        error = failures.broken_answer(endpoint.server, reason)
        if closed:
            self._await_cause(error)
        else:
            self.fail(error, "upstream_failed")

    def _end_if_complete(self) -> bool:
        """End the answer as usual if llama-server ended between its last event and the end of the body."""
        stages, upstream = self.request.stages, self._upstream
        if stages is None or not self.status or not stages.complete():
            return False
        self.finished()
        if upstream is not None:
            upstream.abort()
        return True

    def _await_cause(self, error: HttpError) -> None:
        """The server does not answer any more, most likely because it ended: soon the cause is known.

        ``error`` is for a connection that was closed for another reason.
        """
        is_inside = self._position() is Position.INSIDE
        if self._lease.endpoint.closed or is_inside or self._awaits_second:
            self._suspect()
            self.fail(error, "upstream_failed")
            return
        self.state = LOST
        self._end_error = error
        if self.upload is not None:
            self.upload.disconnect()
        if not self._lease.alone:
            self._lease.release_permit()
        self.client.proxy.awaiting_cause.add(self._cause_unknown)

    def _cause_unknown(self) -> None:
        if self.state is LOST and self._end_error is not None:
            self.fail(self._end_error, "upstream_failed")

    def _revoked(self, why: HttpError) -> None:
        """The generation is being stopped (S13, S16) or has ended (S1)."""
        if self.state is OVER or self._end_if_complete():
            return
        if (refusal := self._refusal(why)) is not None:
            self.fail(refusal, "revoked")
            return
        if self._end_error is not None:
            self._suspect()
            self.fail(failures.with_cause(self._end_error, why), "upstream_failed")
            return
        if self._requeue():
            return
        self._suspect()
        error = why
        if not self.status and self.waiting is not None:
            # If the model does not return, its remedy is more useful than this reason.
            error = self.waiting.queue.unqueueable_reason() or why
        self.fail(error, "revoked")

    def _suspect(self) -> None:
        failures.suspect(self.request, self._lease.endpoint, monotonic(), sent=self.sent_at > 0.0)

    def _refusal(self, why: HttpError) -> HttpError | None:
        sent = self.sent_at > 0.0
        return failures.refuse_if_poison(self.request, self._lease, self.waiting, why, monotonic(), sent=sent)

    def _crashed_after_cancel(self, why: HttpError) -> None:
        """The server has ended while it still worked on the request, although the client has left."""
        if self._refusal(why) is None:
            self._suspect()

    # --- from the client's connection

    def cancel(self) -> None:
        """The client disconnected: signal that to the child, which stops at its next check (S11)."""
        if self.state is not OVER:
            self._release()
            self._record("client_gone", CLIENT_GONE if not self.status else self.status)

    def interrupt(self, error: HttpError, outcome: str) -> None:
        """End the request because an administrator cancelled it, or another client needs its slot."""
        self.fail(error, outcome)

    def sweep(self, now: float) -> None:
        """Check the timeouts of the request and of its response. Called every ``Limits.sweep_s``."""
        proxy = self.client.proxy
        if (error := overdue(self.request, proxy.config, now)) is not None:
            self.fail(error, "timed_out")
            return
        if self.status:
            self._watch_lag(now)
        elif proxy.config.stream_keepalive_s is not None:
            send_comment_if_due(self.client, self.request, now)
        self._weigh_answer()
        idle_s = proxy.limits.upstream_idle_s
        if self._silent_s(now) >= idle_s and self.request.needs_permit:
            self.fail(failures.silent_answer(self._lease.endpoint.server, idle_s), "upstream_failed")

    # --- the end

    def _requeue(self, *, refused: bool = False, crowded: bool = False) -> bool:
        """Queue the request for the next generation (S10): as it is, if its client has received nothing, else
        to continue its answer.

        ``refused``: its server has answered, so only another one may get it, which may have to start first.
        ``crowded``: its server has no room for it together with others.
        """
        request, endpoint = self.request, self._lease.endpoint
        stages = request.stages
        received = None if stages is None else stages.received
        if not request.replayable or self._awaits_second or self._not_continued:
            return False
        if self.status and (refused or received is None):
            return False
        client = self.client
        if refused:
            endpoint.ejected_until_s = monotonic() + GRACE_S
        queue = failures.queue_after(request, endpoint, client.proxy.backend, refused=refused)
        if queue is None:
            return False
        if self.upload is not None and queue.unqueueable_reason() is None:
            # A server begins only with the complete body: this was no attempt. Buffer the body, then send it.
            self.upload.return_body()
            self._release(works=False)
            client.exchange_awaits_body(request)
            return True
        sent, has_ended = self.sent_at > 0.0, not (refused or crowded)
        if not failures.may_repeat(request, sent=sent, has_ended=has_ended):
            return False
        begun = None
        if self.status and stages is not None and received is not None:
            begun = request.begun or Begun(received, self.sent_at, self.first_byte_at, self._opening)
            if self._refuse_rest(stages.resume()):
                return False
        waiting = self.waiting
        if waiting is None:
            waiting = self.waiting = Waiting(client, request, queue, self.counted_as)
        if crowded:
            is_queued = waiting.isolate(self._lease, queue)
        else:
            is_queued = waiting.requeue(self._lease, queue, sent=sent)
        if not is_queued:
            if begun is not None:
                request.body = b""
                self._refuse_rest("it was sent again before, or no llama-server can take it")
            return False
        if begun is not None:
            request.has_head, request.next_comment_at, request.begun = True, 0.0, begun
            client.proxy.metrics.count_continued(self.counted_as, "continued")
        client.exchange_waits(waiting)
        self._release(works=has_ended)  # last: the free permit may serve the queued request at once
        return True

    def _release(self, *, works: bool = True) -> None:
        self.state = OVER
        self._end_attempt(works=works)

    def _end_attempt(self, *, works: bool = True) -> None:
        """Close the connection, and release the lease. ``works``: the server may work on the request."""
        request, lease = self.request, self._lease
        if self.upload is not None:
            self._end_upload(self.upload)
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            self.client.proxy.outbox.flush()
            # From the last byte of the request on, the slot is busy until the child closes the connection.
            begun = works and not self._body_incomplete and upstream.request_sent
            if request.needs_permit and begun and not lease.endpoint.closed:
                clock = self.client.proxy.keys.clock
                self._abandoned = Abandoned(lease, request, upstream, clock, self._crashed_after_cancel)
                return
            upstream.abort()
        lease.release()
        request.slot_s += lease.permit_s

    def fail(self, error: HttpError, outcome: str) -> None:
        request, client = self.request, self.client
        if self._awaits_second and outcome != CANCELLED:
            self._use_earlier_answer()
            return
        if self._not_continued:
            error = replace(error, message=f"{error.message} (not continued: {self._not_continued})")
        request.cause = error.cause
        position = self._position()
        self._release()
        if position is Position.NOTHING:
            self._record(outcome, error.status)
            client.exchange_failed(request, error)
            return
        self._record(outcome)
        if position is Position.INSIDE:
            client.abort()
            return
        # An error event, and a close without a last chunk: to a client that reads events, and to one that
        # reads HTTP, the stream is incomplete (S12).
        if request.stages is None:
            client.send(chunk(error_event(request.head.path, error_body(error))))
        else:
            request.stages.fail(error_body(error))
        client.close()
