"""Counters and histograms as plain numbers: a dictionary look-up each; rendered only when scraped."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

__all__ = ["FIRST_BYTE_BOUNDS_S", "REQUEST_BOUNDS_S", "Histogram", "Metrics", "RequestRecord"]

# An answer takes from a millisecond (/tokenize) to many minutes (a long generation on a CPU).
REQUEST_BOUNDS_S = (
    0.005,
    0.025,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
)
# The first byte waits for the prompt: 10 ms when it is cached, minutes for a long one.
FIRST_BYTE_BOUNDS_S = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)


class RequestRecord(msgspec.Struct, frozen=True):
    """One finished request. Never holds a prompt, a completion, a key or a query (X13).

    ``outcome``: ``ok``; ``local`` (llamasup's own answer); ``refused`` (a 4xx of our own); ``unavailable``
    (no generation to serve it); ``client_gone``; ``upstream_failed``; ``revoked`` (the generation went).
    ``model`` is empty and ``generation`` 0 where no child was involved. Times are in seconds;
    ``first_byte_s`` is None where no response came. ``queue_s`` is all until the request was sent on;
    ``waited_s`` the part of it that was waiting for a generation to serve. ``replayed``: it was sent again
    after the generation that had it ended.
    """

    request_id: str
    method: str
    path: str
    route: str
    model: str
    generation: int
    status: int
    tokens_prompt: int | None
    tokens_cached: int | None
    tokens_completion: int | None
    tokens_per_s: float | None
    queue_s: float
    first_byte_s: float | None
    duration_s: float
    bytes_out: int
    outcome: str
    waited_s: float = 0.0
    replayed: bool = False


class Histogram:
    """Counts per bucket (``counts[i]``: values ≤ ``bounds[i]``, the last: all above), not cumulative."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """What /metrics says about llamasup itself. Owned by the event loop's thread."""

    __slots__ = (
        "first_byte_s",
        "load_s",
        "queue_s",
        "replays",
        "request_s",
        "requests",
        "restarts",
        "tokens",
    )

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], int] = {}  # (model, route, code)
        self.tokens: dict[tuple[str, str], int] = {}  # (model, kind: prompt | cached | completion)
        self.restarts: dict[tuple[str, str], int] = {}  # (model, cause)
        self.replays: dict[str, int] = {}  # by model
        self.load_s: dict[str, Histogram] = {}  # by model
        self.request_s = Histogram(REQUEST_BOUNDS_S)
        self.first_byte_s = Histogram(FIRST_BYTE_BOUNDS_S)
        self.queue_s = Histogram(FIRST_BYTE_BOUNDS_S)

    def count_request(self, record: RequestRecord) -> None:
        key = (record.model, record.route, record.status)
        requests = self.requests
        requests[key] = requests.get(key, 0) + 1
        if not record.model:
            return
        self.request_s.observe(record.duration_s)
        self.queue_s.observe(record.queue_s)
        if record.first_byte_s is not None:
            self.first_byte_s.observe(record.first_byte_s)
        if record.tokens_prompt:
            self._count_tokens(record.model, "prompt", record.tokens_prompt)
        if record.tokens_cached:
            self._count_tokens(record.model, "cached", record.tokens_cached)
        if record.tokens_completion:
            self._count_tokens(record.model, "completion", record.tokens_completion)

    def count_restart(self, model: str, cause: str) -> None:
        self.restarts[model, cause] = self.restarts.get((model, cause), 0) + 1

    def count_replay(self, model: str) -> None:
        """A request was put back because the generation that had it ended."""
        self.replays[model] = self.replays.get(model, 0) + 1

    def observe_load(self, model: str, seconds: float) -> None:
        if (histogram := self.load_s.get(model)) is None:
            histogram = self.load_s[model] = Histogram(REQUEST_BOUNDS_S)
        histogram.observe(seconds)

    def _count_tokens(self, model: str, kind: str, count: int) -> None:
        self.tokens[model, kind] = self.tokens.get((model, kind), 0) + count
