"""The tokens of an answer: those that it reports, and an estimate of those that it does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from llamasup.core.auth.quota import unreported_tokens
from llamasup.core.http.body_scan import MANY_JOBS
from llamasup.core.http.requested_model import PROMPTS, lists_of
from llamasup.core.http.routes import Work
from llamasup.core.llama_server.token_counts import TAIL_BYTES, TokenCounts, TokenMeter, read_token_counts
from llamasup.core.proxy.request import Request
from llamasup.core.queueing.endpoint import Endpoint

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


def reported(
    tail: bytes, reads: Iterable[bytes], opening: bytes, size_bytes: int, meter: TokenMeter | None
) -> TokenCounts | None:
    """The token counts in an answer of this size. ``tail``: the end of its last ``reads``; ``opening``: its
    first bytes, where they have counts.
    """
    if meter is not None:
        return meter.counts()
    counts = read_token_counts(tail, opening)
    if counts is None and size_bytes > TAIL_BYTES:
        # /completion writes the counts before the probabilities of n_probs (b11434).
        counts = read_token_counts(b"".join(reads))
    return counts


def unreported(
    request: Request,
    endpoint: Endpoint,
    counts: TokenCounts | None,
    meter: TokenMeter | None,
    outcome: str,
    *,
    streams: bool,
    request_sent_at: float,
    first_byte_at: float,
    now: float,
) -> int:
    """The estimate of unreported tokens, for the quota of a key and for the usage, whatever has ended the
    answer. The request was sent completely, and its answer, if any, has the status 200. ``streams``: the
    answer is a stream of events, or would have been.
    """
    route = request.head.route
    since = first_byte_at if streams and first_byte_at else request_sent_at
    window = endpoint.window
    return unreported_tokens(
        counts,
        items=items_of(request, endpoint, meter),
        items_reported=meter.items_reported if meter is not None else 0,
        prompts_reported=meter.prompts_reported if meter is not None else 0,
        events=meter.events if meter is not None else 0,
        whole=outcome == "ok",
        streams=streams,
        generates=route.work in (Work.TEXT, None),
        reports_all_prompts=lists_of(route.label) != PROMPTS,
        prompt_bytes=request.body_bytes,
        seconds=now - since,
        begun=first_byte_at > 0.0,
        tokens_per_s=endpoint.tokens_per_s,
        max_concurrent=endpoint.slots,
        n_ctx=None if window is None else window.n_ctx,
    )


def items_of(request: Request, endpoint: Endpoint, meter: TokenMeter | None) -> int:
    """The items of the answer. Without an index, all items look like one. Uncounted jobs are as many as the
    slots, because the server works on no more at one time.
    """
    jobs = request.jobs if request.jobs < MANY_JOBS else endpoint.slots
    return jobs if meter is None else max(meter.items, jobs)
