"""The quota of a key: token buckets, filled by the time that callers pass in.

A bucket holds one minute's amount: that much may come at once, then as fast as the bucket fills. The proxy's
loop owns the quotas.
"""

from __future__ import annotations

from typing import Final

from llamasup.core.auth.api_key import KeyLimits
from llamasup.core.http.body_scan import MANY_JOBS
from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.token_counts import TokenCounts

_MINUTE_S: Final = 60.0
_ROUNDING: Final = 1e-6  # a client that waited exactly for Retry-After is not refused for a rounding error
# The end of the running requests of a key is unknown; one retry a second costs little.
_CONCURRENT_RETRY_S: Final = 1.0
# English has 4 to 5 bytes per token, code 3 to 4, Chinese 3, and JSON adds bytes: an upper estimate.
_PROMPT_BYTES_PER_TOKEN: Final = 3
_USUAL_TOKENS_PER_S: Final = 100.0  # before the speed of the model was measured


class Bucket:
    """Fills with ``per_minute`` in each minute, and holds at most that much. May be overdrawn."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def seconds_until_one(self, now: float) -> float:
        """The time until a unit can be taken; 0: now."""
        self._fill(now)
        missing = 1.0 - self._level
        return missing * _MINUTE_S / self.per_minute if missing > _ROUNDING else 0.0

    def take(self, count: int) -> None:
        self._level -= count

    def give_back(self, count: int, now: float) -> None:
        self._fill(now)
        self._level = min(self._level + count, float(self.per_minute))

    def resize(self, per_minute: int, now: float) -> None:
        """Change the rate: an increase is available at once, and use so far stays counted."""
        self._fill(now)
        more = max(0, per_minute - self.per_minute)
        self._level = min(self._level + more, float(per_minute))
        self.per_minute = per_minute

    def _fill(self, now: float) -> None:
        grown = self._level + max(0.0, now - self._at) * self.per_minute / _MINUTE_S
        self._level = min(float(self.per_minute), grown)
        self._at = now


class Quota:
    """One key's use of its limits. Each ``enter`` needs exactly one ``leave``. ``in_flight``: jobs."""

    __slots__ = ("_concurrent", "_requests", "_tokens", "in_flight")

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.in_flight = 0
        self._concurrent = limits.concurrent
        self._requests = _bucket(None, limits.requests_per_minute, now)
        self._tokens = _bucket(None, limits.tokens_per_minute, now)

    def change(self, limits: KeyLimits, now: float) -> None:
        """Set new limits; use so far stays counted."""
        self._concurrent = limits.concurrent
        self._requests = _bucket(self._requests, limits.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now)

    @property
    def counts_tokens(self) -> bool:
        return self._tokens is not None

    def enter(self, now: float) -> HttpError | None:
        """Count a request, or return the refusal (429) with the time of a retry."""
        if self._concurrent is not None and self.in_flight >= self._concurrent:
            return _refusal("at the same time", self._concurrent, "job", "concurrent", _CONCURRENT_RETRY_S)
        if self._tokens is not None and (wait_s := self._tokens.seconds_until_one(now)):
            return _refusal("per minute", self._tokens.per_minute, "token", "tokens", wait_s)
        if self._requests is not None:
            if wait_s := self._requests.seconds_until_one(now):
                return _refusal("per minute", self._requests.per_minute, "request", "requests", wait_s)
            self._requests.take(1)
        self.in_flight += 1
        return None

    def weigh(self, jobs: int) -> HttpError | None:
        """Count ``jobs`` for a request that entered as one job, or return the refusal: 400 if a retry cannot
        help.
        """
        limit = self._concurrent
        if limit is not None:
            if jobs > limit:
                shown = "too many" if jobs >= MANY_JOBS else str(jobs)
                return HttpError(
                    400,
                    f"This request has {shown} jobs (prompts or texts, times n); its key may have {limit}"
                    " at the same time",
                    cause="too_many_jobs",
                    remedy=f"send at most {_count(limit, 'job')} in one request, or raise the key's limit"
                    " concurrent",
                )
            if self.in_flight - 1 + jobs > limit:
                return _refusal("at the same time", limit, "job", "concurrent", _CONCURRENT_RETRY_S)
        self.in_flight += jobs - 1
        return None

    def hold(self, jobs: int) -> None:
        """Count the jobs of a request whose client has left while the server still works; ended by
        one more ``leave``.
        """
        self.in_flight += jobs

    def refund(self, now: float) -> None:
        """Uncount a request that was refused before llama-server had the whole request, or that had no
        server.
        """
        if self._requests is not None:
            self._requests.give_back(1, now)

    def leave(self, tokens: int, now: float, jobs: int = 1) -> None:
        """Finish jobs of a request that entered or is held. They cost ``tokens``."""
        self.in_flight -= jobs
        if self._tokens is not None:
            self._tokens.seconds_until_one(now)  # fill it up to now, before the cost
            self._tokens.take(tokens)


def cost_of(prompt: int | None, cached: int | None, completion: int | None) -> int:
    """Count the tokens that llama-server computed. Tokens from its cache are free."""
    return max(0, (prompt or 0) - (cached or 0)) + (completion or 0)


def tokens_made_in(seconds: float, tokens_per_s: float | None, slots: int = 1) -> int:
    """Estimate the tokens of ``slots``, each at the speed of the model's last answer (None: unknown)."""
    return int(seconds * slots * (tokens_per_s or _USUAL_TOKENS_PER_S))


def prompt_tokens_of(size: int) -> int:
    """Estimate the prompt tokens of a body of ``size`` bytes."""
    return size // _PROMPT_BYTES_PER_TOKEN


def unreported_tokens(
    reported: TokenCounts | None,
    *,
    items: int,
    items_reported: int,
    prompts_reported: int,
    events: int,
    whole: bool,
    streams: bool,
    generates: bool,
    reports_all_prompts: bool,
    prompt_bytes: int,
    seconds: float,
    begun: bool,
    tokens_per_s: float | None,
    max_concurrent: int,
    n_ctx: int | None,
) -> int:
    """Estimate the tokens that llama-server processed and did not report.

    ``whole``: the answer is complete. ``streams``: it is a stream with at most one of its ``events`` for each
    token (tokens that end inside a UTF-8 character have none). ``generates``: the route generates text.
    ``reports_all_prompts``: if the answer reports prompt tokens, it reports those of the whole request.
    ``seconds``: the time that the server had, since the first byte of the stream if it has ``begun``, else
    since it had the whole request. ``tokens_per_s``: the speed of one slot; ``max_concurrent`` is their
    number. An item costs at most its context (``n_ctx``).
    """
    prompt = reported.prompt if reported else None
    completion = (reported.completion if reported else None) or 0
    missing = made = 0
    if prompt is None or (items > prompts_reported and not reports_all_prompts):
        missing = max(0, prompt_tokens_of(prompt_bytes) - (prompt or 0))
    if generates and (not whole or items_reported < items):
        made = tokens_made_in(seconds, tokens_per_s, min(items, max_concurrent))
        if streams:
            # Some of the time before the first byte was spent on the prompt, whose tokens take less time.
            made = max(events, made if begun else made - missing)
        elif items_reported:  # the OpenAI APIs report only the first item; assume the same of the others
            made = max(made, completion // items_reported * items)
        missing += max(0, made - completion)
    left = context_left(reported, items, n_ctx)
    return missing if left is None else min(missing, left)


def context_left(counts: TokenCounts | None, items: int, n_ctx: int | None) -> int | None:
    """Return the tokens for which ``items`` still have context, after ``counts``. None: not known."""
    if n_ctx is None:
        return None
    reported = ((counts.prompt or 0) + (counts.completion or 0)) if counts else 0
    return max(0, n_ctx * items - reported)


def _bucket(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _refusal(span: str, limit: int, what: str, cause: str, retry_after_s: float) -> HttpError:
    return HttpError(
        429,
        f"This key has reached its limit of {_count(limit, what)} {span}",
        "rate_limit_error",
        f"key_{cause}",
        "retry after the time in Retry-After",
        retry_after_s,
    )
