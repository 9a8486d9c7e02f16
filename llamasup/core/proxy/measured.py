"""Measures an exchange while its answer is relayed, and shows and records it, with the tokens of the answer.

The token counts are read once, from the last reads of the answer. Only an answer with several items, or for a
key whose tokens are limited, is metered while it passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.auth.quota import context_left, unreported_tokens
from llamasup.core.http.body_scan import MANY_JOBS
from llamasup.core.http.heads import status_line
from llamasup.core.http.requested_model import PROMPTS, lists_of
from llamasup.core.http.routes import Work
from llamasup.core.llama_server.token_counts import (
    TAIL_BYTES,
    TokenCounts,
    TokenMeter,
    context_end,
    context_refusal,
    read_token_counts,
    tail_of,
)
from llamasup.core.observability.counters import HeldSlots
from llamasup.core.proxy.exchange_states import CONNECTING, OVER, State
from llamasup.core.proxy.live.state import InFlight, described, phase_of
from llamasup.core.proxy.request import Request, record_of
from llamasup.core.proxy.stages import AnswerHead, Position, ResponseForm
from llamasup.core.proxy.upload import Upload
from llamasup.core.proxy.upstream.abandoned import Abandoned
from llamasup.core.proxy.upstream.connection import Upstream
from llamasup.core.proxy.waiting import Waiting, WaitingConnection
from llamasup.core.queueing.endpoint import Endpoint, Lease
from llamasup.core.queueing.shared_context import permits_for, prompt_tokens

_EVENT_ENDS: Final = (b"\n\n\r\n", b"\r\n\r\n\r\n")  # the end of a chunk that ends with an event
MIN_SPEED_TOKENS: Final = 16  # fewer tokens are too short a measurement
# References to the last reads. A stream ends with at most four events (last token, timings, usage, [DONE])
# and the last chunk, each perhaps in its own read; one read is at most 256 KiB.
TAIL_PIECES: Final = 8


class MeteredTail(deque[bytes]):
    """The last reads of an answer. A meter sees every read."""

    def __init__(self, meter: TokenMeter) -> None:
        super().__init__(maxlen=TAIL_PIECES)
        self._meter = meter

    def append(self, piece: bytes) -> None:
        super().append(piece)
        self._meter.read(piece)


class MeasuredExchange(Struct, eq=False):
    """The part of an exchange that decides nothing: its times, sizes, last reads and permits, and its pauses.
    ``Exchange`` sets the fields.

    A struct, because its fields then get their defaults in C. ``waiting``: the wait of the request before
    this exchange, if any.
    """

    client: WaitingConnection
    request: Request
    _lease: Lease
    waiting: Waiting | None = None
    _upstream: Upstream | None = None
    tail: deque[bytes] | tuple[bytes, ...] = ()  # the last reads of the answer
    _opening: bytes = b""
    _meter: TokenMeter | None = None
    _abandoned: Abandoned | None = None
    _not_continued: str = ""  # why no other server may continue the answer
    _body_incomplete: bool = False  # of the request
    _streams_events: bool = False  # the answer is a stream of events
    _request_sent_at: float = 0.0  # when the last byte of the request was sent
    _lagging_since: float = 0.0  # when a sweep first found a slow reader; 0: it reads fast enough
    _prompt_tokens: int = 0  # an estimate, where all slots share one context
    _swept_bytes: int = -1  # ``bytes_out`` at the last sweep
    _progress_at: float = 0.0  # when a sweep last found progress
    upload: Upload | None = None  # while the body of the request is forwarded
    state: State = CONNECTING
    _sent_again: bool = False  # for a second answer: a stage has an earlier one
    status: int = 0  # 0: the client has received nothing
    sent_at: float = 0.0
    first_byte_at: float = 0.0
    bytes_out: int = 0

    def __repr__(self) -> str:
        request = self.request
        progress = f"{self.status}, {self.bytes_out} bytes" if self.status else "no answer yet"
        return f"<Exchange of {request!r}: {progress}, {self._lease!r}>"

    @property
    def over(self) -> bool:
        return self.state is OVER

    @property
    def endpoint(self) -> Endpoint:
        return self._lease.endpoint

    @property
    def send(self) -> Callable[[bytes], None]:
        return self.client.send

    @property
    def form(self) -> ResponseForm:
        request, waiting = self.request, self.waiting
        load_s = 0.0 if waiting is None else waiting.entry.waited_s
        close = not self.client.keeps_alive(request)
        return ResponseForm(request.response_lines, request.http_1_0, close, load_s)

    @property
    def is_draining(self) -> bool:
        return self.client.proxy.draining

    @property
    def is_uploaded(self) -> bool:
        return self.upload is not None

    def response_head(self, answer: AnswerHead, framing: bytes) -> bytes:
        """The head of the response with this answer of llama-server."""
        request, waiting = self.request, self.waiting
        end = b"Connection: close\r\n\r\n"
        if request.keep_alive and not self.client.proxy.draining:
            end = b"\r\n"
        queue_s = self.sent_at - request.received_at
        if waiting is not None:  # for a load (``load``), and otherwise (``queue``)
            load_s = waiting.entry.waited_s
            timing = b'Server-Timing: queue;dur=%.1f;desc="position %d", load;dur=%.1f\r\n' % (
                (queue_s - load_s) * 1000.0,
                waiting.entry.position,
                load_s * 1000.0,
            )
        elif request.head.from_node:
            timing = b""
        else:
            timing = b"Server-Timing: queue;dur=%.1f\r\n" % (queue_s * 1000.0)
        status = status_line(answer.status)
        if request.head.from_node:  # it knows the id, and recognizes a head that it has seen before
            return b"".join((status, answer.lines, framing, timing, request.repaired, end))
        return b"%b%b%bX-Request-Id: %b\r\n%b%b%b%b" % (
            status,
            answer.lines,
            framing,
            request.id,
            request.repaired,
            request.cors,
            timing,
            end,
        )

    @property
    def counted_as(self) -> str:
        """The model that the request counts for."""
        return self.request.counted_as or self._lease.endpoint.model

    @property
    def _is_metered(self) -> bool:
        """Whether a meter reads the whole answer, because its end does not have all token counts."""
        request = self.request
        counts = request.quota is not None and request.quota.counts_tokens
        return request.needs_permit and (request.jobs > 1 or counts)

    # --- for the upstream connection

    @property
    def is_replayable(self) -> bool:
        return self.request.replayable and self.request.head.route.repeats

    def upload_pauses(self) -> None:
        if self.upload is not None:
            self.upload.pause()

    def upload_resumes(self) -> None:
        if self.upload is not None:
            self.upload.resume()

    def last_bytes(self) -> bytes:
        return b"".join(self.tail)[-8:]

    def _silent_s(self, now: float) -> float:
        """Returns for how long the sweeps have seen no progress of a begun answer whose client reads."""
        has_begun = self.status or self.bytes_out  # these may be held
        if not has_begun or self.client.paused or self.bytes_out != self._swept_bytes:
            self._swept_bytes = self.bytes_out
            self._progress_at = now
        return now - self._progress_at

    def _is_between_events(self) -> bool:
        """Whether the response is a stream of events, and not within one."""
        if self._upstream is None or not self._upstream.streams_events:
            return False
        last = self.last_bytes()
        return not last or last.endswith(_EVENT_ENDS)

    @property
    def _awaits_second(self) -> bool:
        """Whether the request was sent again, and its client has nothing of the second answer."""
        return self._sent_again and not self.status

    def _position(self) -> Position:
        position = Position.NOTHING
        if self.status:
            position = Position.BETWEEN if self._is_between_events() else Position.INSIDE
        stages = self.request.stages
        return position if stages is None else stages.position(position)

    def _refuse_rest(self, reason: str) -> bool:
        """Note why no other server may continue the answer. Returns False if there is no reason."""
        if reason:
            self._not_continued = reason
            self.client.proxy.metrics.count_continued(self.counted_as, "refused")
        return bool(reason)

    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()

    # --- permits

    def _weigh(self) -> None:
        """Take a permit for each job, and those of the slots whose context the request needs."""
        request, share = self.request, self._lease.endpoint.share
        permits = request.jobs
        if share:
            self._prompt_tokens = prompt_tokens(request.body)
            permits = max(permits, permits_for(self._prompt_tokens, 0, share))
        self._lease.weigh(permits)

    def _weigh_answer(self) -> None:
        """Take more permits while the answer takes more of the context that all slots share."""
        if share := self._lease.endpoint.share:
            permits = permits_for(self._prompt_tokens, self.bytes_out, share)
            self._lease.weigh(max(self._lease.weight, permits))

    def _watch_lag(self, now: float) -> None:
        """Give the permit back once the client has read its answer too slowly for some time."""
        if not self.client.paused:
            self._lagging_since = 0.0
        elif not self._lagging_since:
            self._lagging_since = now
        elif now - self._lagging_since >= self.client.proxy.limits.lag_s:
            self._lease.release_permit()

    # --- for the control API

    def held_slots(self) -> HeldSlots | None:
        request, lease = self.request, self._lease
        if self.state is OVER or not lease.since_s:
            return None
        return HeldSlots(self.counted_as, request.client, lease.since_s, lease.weight)

    def waits_since(self) -> float:
        return 0.0

    def live(self, now: float) -> InFlight:
        request, lease = self.request, self._lease
        is_sent = self.sent_at > 0.0 and self.upload is None
        phase = phase_of(
            needs_permit=request.needs_permit, is_sent=is_sent, has_answer=self.first_byte_at > 0.0
        )
        since_s = self.first_byte_at or (self._request_sent_at if is_sent else 0.0)
        shown = described(request, phase, now, model=self.counted_as, since_s=since_s)
        waiting = self.waiting
        shown = replace(
            shown,
            generation=lease.endpoint.generation,
            node=None if lease.endpoint.node is None else lease.endpoint.node.name,
            bytes_out=self.bytes_out,
            replayed=waiting is not None and waiting.entry.replayed,
        )
        return InFlight(shown, lease, self.first_byte_at)

    # --- the record

    def _record(self, outcome: str, status: int = 0, now: float = 0.0) -> None:
        """Record the request. ``status``: the one that llamasup answered with. ``now``: the time, if it was
        read before; or 0.
        """
        request, endpoint, waiting = self.request, self._lease.endpoint, self.waiting
        now = now or monotonic()
        received_at, sent_at, first_byte_at = request.received_at, self.sent_at, self.first_byte_at
        reads: Sequence[bytes] = self.tail
        begun, is_continued = request.begun, False
        bytes_out = self.bytes_out if self.status else 0  # else they were held
        if begun is not None and begun.received.is_continued:
            is_continued = True
            sent_at, first_byte_at, reads = begun.sent_at, begun.first_byte_at, begun.received.tail
            bytes_out = begun.received.sent_bytes
        counts = context = None
        if request.head.needs_permit:
            if self.status == 200:
                tail = tail_of(reads)
                counts = self._reported(tail, reads)
                if self._meter is None or self._meter.items == 1:
                    context = context_end(tail, counts, endpoint.window)
            elif self.status >= 400:
                context = context_refusal(tail_of(self.tail))
            if counts is not None and (counts.completion or 0) >= MIN_SPEED_TOKENS and counts.tokens_per_s:
                endpoint.tokens_per_s = counts.tokens_per_s
            counts_tokens = request.quota is not None and request.quota.counts_tokens
            if counts is None or request.jobs > 1 or counts_tokens:
                self._estimate_unreported(outcome, counts)
                if counts is None and begun is not None and is_continued:
                    request.unreported_tokens += begun.received.pieces  # of the first part
        if request.stages is not None:
            counts = request.stages.total(counts)
        self.client.proxy.record_request(
            request,
            record_of(
                request,
                status or self.status,
                outcome,
                now,
                request.counted_as or endpoint.model,  # without a call
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

    def _reported(self, tail: bytes, reads: Sequence[bytes]) -> TokenCounts | None:
        """The token counts in the answer. ``tail``: the end of its last ``reads``."""
        if self._meter is not None:
            return self._meter.counts()
        counts = read_token_counts(tail, self._opening)
        if counts is None and self.bytes_out > TAIL_BYTES:
            # /completion writes the counts before the probabilities of n_probs (b11434).
            counts = read_token_counts(b"".join(reads))
        return counts

    def _estimate_unreported(self, outcome: str, counts: TokenCounts | None) -> None:
        """The tokens that the answer did not report, for the usage and for the quota of the key."""
        request, endpoint, meter = self.request, self._lease.endpoint, self._meter
        n_ctx = None if endpoint.window is None else endpoint.window.n_ctx
        # Without an index, all items look like one. Uncounted jobs are as many as the slots, because the
        # server works on no more at one time.
        items = request.jobs if request.jobs < MANY_JOBS else endpoint.slots
        if meter is not None:
            items = max(meter.items, items)
        if self.sent_at and not self._body_incomplete and self.status in (0, 200):
            streams = self._streams_events if self.first_byte_at else request.wants_events()
            since = self.first_byte_at if streams and self.first_byte_at else self._request_sent_at
            request.unreported_tokens = unreported_tokens(
                counts,
                items=items,
                items_reported=0 if meter is None else meter.items_reported,
                prompts_reported=0 if meter is None else meter.prompts_reported,
                events=0 if meter is None else meter.events,
                whole=outcome == "ok",
                streams=streams,
                generates=request.head.route.work in (Work.TEXT, None),
                reports_all_prompts=lists_of(request.head.route.label) != PROMPTS,
                prompt_bytes=request.body_bytes,
                seconds=monotonic() - since,
                begun=self.first_byte_at > 0.0,
                tokens_per_s=endpoint.tokens_per_s,
                max_concurrent=endpoint.slots,
                n_ctx=n_ctx,
            )
        if self._abandoned is not None:
            left = context_left(counts, items, n_ctx)
            self._abandoned.max_tokens = None if left is None else left - request.unreported_tokens
