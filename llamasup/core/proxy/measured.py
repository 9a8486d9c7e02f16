"""Measures an exchange while its answer is relayed, and shows and records it."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.auth.quota import context_left
from llamasup.core.llama_server.token_counts import (
    TokenCounts,
    TokenMeter,
    context_end,
    context_refusal,
    tail_of,
)
from llamasup.core.observability.counters import HeldSlots
from llamasup.core.proxy.answers.answer_tokens import items_of, reported, unreported
from llamasup.core.proxy.live.state import InFlight, described, phase_of
from llamasup.core.proxy.request import Request, record_of
from llamasup.core.proxy.upload import Upload
from llamasup.core.proxy.upstream.abandoned import Abandoned
from llamasup.core.proxy.upstream.connection import Upstream
from llamasup.core.proxy.waiting import Waiting, WaitingConnection
from llamasup.core.queueing.endpoint import Lease
from llamasup.core.queueing.shared_context import permits_for, prompt_tokens

_EVENT_ENDS: Final = (b"\n\n\r\n", b"\r\n\r\n\r\n")  # the end of a chunk that ends with an event
MIN_SPEED_TOKENS: Final = 16  # fewer tokens are too short a measurement


class MeasuredExchange(Struct, eq=False):
    """The part of an exchange that decides nothing: its times, sizes, last reads and permits, and its pauses.
    ``Exchange`` sets the fields.

    A struct, because its fields then get their defaults in C. ``_waiting``: the wait of the request before
    this exchange, if any.
    """

    _downstream: WaitingConnection
    _request: Request
    _lease: Lease
    _waiting: Waiting | None = None
    _upstream: Upstream | None = None
    tail: deque[bytes] | tuple[bytes, ...] = ()  # the last reads of the answer
    _opening: bytes = b""
    _meter: TokenMeter | None = None
    _abandoned: Abandoned | None = None
    _body_incomplete: bool = False  # of the request
    _streams_events: bool = False  # the answer is a stream of events
    _request_sent_at: float = 0.0  # when the last byte of the request was sent
    _lagging_since: float = 0.0  # when a sweep first found a slow reader; 0: it reads fast enough
    _prompt_tokens: int = 0  # an estimate, where all slots share one context
    _swept_bytes: int = -1  # ``bytes_out`` at the last sweep
    _progress_at: float = 0.0  # when a sweep last found progress
    upload: Upload | None = None  # while the body of the request is forwarded
    over: bool = False
    status: int = 0  # 0: the client has received nothing
    sent_at: float = 0.0
    first_byte_at: float = 0.0
    bytes_out: int = 0

    def __repr__(self) -> str:
        request = self._request
        progress = f"{self.status}, {self.bytes_out} bytes" if self.status else "no answer yet"
        return f"<Exchange of {request!r}: {progress}, {self._lease!r}>"

    @property
    def counted_as(self) -> str:
        """The model that the request counts for."""
        return self._request.counted_as or self._lease.endpoint.model

    @property
    def _is_metered(self) -> bool:
        """Whether a meter reads the whole answer, because its end does not have all token counts."""
        request = self._request
        counts = request.quota is not None and request.quota.counts_tokens
        return request.needs_permit and (request.jobs > 1 or counts)

    # --- for the upstream connection

    @property
    def is_head(self) -> bool:
        return self._request.head.method == b"HEAD"

    @property
    def is_replayable(self) -> bool:
        return self._request.replayable and self._request.head.route.repeats

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
        if not has_begun or self._downstream.paused or self.bytes_out != self._swept_bytes:
            self._swept_bytes = self.bytes_out
            self._progress_at = now
        return now - self._progress_at

    def _is_between_events(self) -> bool:
        """Whether the response is a stream of events, and not within one."""
        if self._upstream is None or not self._upstream.streams_events:
            return False
        last = self.last_bytes()
        return not last or last.endswith(_EVENT_ENDS)

    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()

    # --- permits

    def _weigh(self) -> None:
        """Take a permit for each job, and those of the slots whose context the request needs."""
        request, share = self._request, self._lease.endpoint.share
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
        if not self._downstream.paused:
            self._lagging_since = 0.0
        elif not self._lagging_since:
            self._lagging_since = now
        elif now - self._lagging_since >= self._downstream.proxy.limits.lag_s:
            self._lease.release_permit()

    # --- for the control API

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

    # --- the record

    def _record(self, outcome: str, status: int = 0, now: float = 0.0) -> None:
        """Record the request. ``status``: the one that llamasup answered with. ``now``: the time, if it was
        read before; or 0.
        """
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
