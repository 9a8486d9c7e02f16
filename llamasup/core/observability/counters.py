"""Counters and histograms as plain numbers, which cost a dictionary look-up and are rendered when scraped.

Labels never contain text from clients: models are the served ones, routes the known ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from llamasup.core.supervision.states import State

# An answer takes from a millisecond (/tokenize) to many minutes (a long generation on a CPU).
REQUEST_BOUNDS_S = (
    *(0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
# The first byte waits for the prompt: 10 ms if it is cached, minutes for a long one.
FIRST_BYTE_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
# Tokens per second of one answer: a big model on a CPU makes one, people read 5 to 10, a small one on a GPU
# makes hundreds.
SPEED_BOUNDS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 150.0, 250.0, 500.0, 1000.0)

# Outcomes of requests that are ended from outside.
CANCELLED: Final = "cancelled"
GAVE_WAY: Final = "gave_way"


class RequestRecord(msgspec.Struct, frozen=True):
    """One finished request. It never contains a prompt, a completion, a key or a query.

    Times are in seconds. ``bytes_in`` and ``bytes_out`` count bodies.

    ``outcome``: ``ok``; ``local`` (answered by llamasup); ``refused`` (a 4xx of llamasup); ``unavailable``
    (no generation or no permit); ``client_gone``; ``upstream_failed``; ``revoked`` (the generation ended);
    ``timed_out``; ``cancelled`` (by an administrator); ``gave_way`` (of a batch, while other clients use the
    models); ``error_event`` (llama-server's error as an SSE event after a 200 and comments);
    ``translation_failed`` (its answer has no form in Ollama's API). ``cause`` is the cause of llamasup's
    error, such as ``queue_full``.

    ``model`` is the id of the model, empty without a model. ``generation`` is 0 if no child was involved.
    ``client`` is the name of its key, or the client's address. ``trace_id`` is from its ``traceparent``,
    ``parent_id`` is the client's span, and ``parent_sampled`` is true if the client exports that span.

    ``first_byte_s`` is None without a response. ``queue_s`` lasts until the request was forwarded, and
    ``waited_s`` is the part of this time spent waiting for a generation. ``ended_s`` is the end on the
    monotonic clock. ``slot_s`` is how long the request held permits, times their number.

    ``replayed``: it was sent again after its first generation ended. ``continued``: it was sent again to
    continue its stream. ``repaired``: the repairs, separated by commas. ``context``: how the size of the
    context affected the answer (llama_server/token_counts.py), with ``n_prompt_tokens`` and ``n_ctx`` if
    known.
    ``tokens_estimated``: the estimate of the tokens that its answer did not report.
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
    client: str = ""
    trace_id: str = ""
    bytes_in: int = 0
    context: str = ""
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None
    parent_id: str = ""
    parent_sampled: bool = False
    ended_s: float = 0.0
    slot_s: float = 0.0
    tokens_estimated: int = 0
    continued: bool = False
    repaired: str = ""
    cause: str = ""


class HeldSlots(msgspec.Struct, frozen=True):
    """The ``slots`` that a request in flight holds since ``since_s`` (monotonic).

    ``model`` and ``client`` are those of its later record.
    """

    model: str
    client: str
    since_s: float
    slots: int


class Histogram:
    """A histogram.

    It counts per bucket (``counts[i]``: values ≤ ``bounds[i]``, the last: all above), not cumulative.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class ModelMetrics:
    """The counts and histograms of one model that its requests change."""

    def __init__(self) -> None:
        self.tokens = {"prompt": 0, "cached": 0, "completion": 0}
        self.context_ends = {"exceeded": 0, "cut": 0, "shifted": 0}
        self.load_s = Histogram(REQUEST_BOUNDS_S)
        self.request_s = Histogram(REQUEST_BOUNDS_S)
        self.first_byte_s = Histogram(FIRST_BYTE_BOUNDS_S)
        self.queue_s = Histogram(FIRST_BYTE_BOUNDS_S)
        self.speed = Histogram(SPEED_BOUNDS)


class Metrics:
    """llamasup's own metrics. Owned by the event loop's thread."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], int] = {}  # (model, route, code)
        self.restarts: dict[tuple[str, str], int] = {}  # (model, cause)
        self.loads: dict[str, int] = {}  # by model
        self.evictions: dict[tuple[str, str], int] = {}  # (model, reason)
        self.replays: dict[str, int] = {}  # by model
        self.gave_way: dict[str, int] = {}  # requests of batches, by model
        self.continued: dict[tuple[str, str], int] = {}  # (model, result)
        self.repaired: dict[tuple[str, str], int] = {}  # (model, what)
        self.models: dict[str, ModelMetrics] = {}
        self.lines_dropped: Callable[[], int] | None = None  # of the access log, if there is one
        self.traces_dropped: Callable[[], int] | None = None  # of the exporter of spans, if there is one

    def count_request(self, record: RequestRecord) -> None:
        name = record.model
        if record.outcome == GAVE_WAY:  # its status is no failure of the model
            self.gave_way[name] = self.gave_way.get(name, 0) + 1
            return
        key = (name, record.route, record.status)
        requests = self.requests
        requests[key] = requests.get(key, 0) + 1
        if not record.generation:
            return
        model = self.models.get(name) or self._model(name)
        model.request_s.observe(record.duration_s)
        model.queue_s.observe(record.queue_s)
        if record.first_byte_s is not None:
            model.first_byte_s.observe(record.first_byte_s)
        tokens = model.tokens
        if record.tokens_prompt:
            tokens["prompt"] += record.tokens_prompt
        if record.tokens_cached:
            tokens["cached"] += record.tokens_cached
        if record.tokens_completion:
            tokens["completion"] += record.tokens_completion
        if record.tokens_per_s is not None:
            model.speed.observe(record.tokens_per_s)
        if record.context:
            model.context_ends[record.context] += 1

    def count_restart(self, model: str, cause: str) -> None:
        self.restarts[model, cause] = self.restarts.get((model, cause), 0) + 1

    def count_load(self, model: str) -> None:
        """Count a start of a server, successful or not."""
        self.loads[model] = self.loads.get(model, 0) + 1

    def count_eviction(self, model: str, reason: str) -> None:
        """Count an unload; ``reason`` is the ``reason`` of ``events.ModelUnloading``."""
        self.evictions[model, reason] = self.evictions.get((model, reason), 0) + 1

    def count_replay(self, model: str) -> None:
        """Count a request that was queued again because its generation ended."""
        self.replays[model] = self.replays.get(model, 0) + 1

    def count_continued(self, model: str, result: str) -> None:
        """Count a streamed answer whose generation ended. ``result``: ``continued`` or ``refused``."""
        self.continued[model, result] = self.continued.get((model, result), 0) + 1

    def count_repaired(self, model: str, what: str) -> None:
        """Count a request that was repaired before it was sent (``what``: ``arguments``), or that was sent a
        second time (a ``Fault``; with ``_failed`` if that did not help).
        """
        self.repaired[model, what] = self.repaired.get((model, what), 0) + 1

    def observe_load(self, model: str, seconds: float) -> None:
        self._model(model).load_s.observe(seconds)

    def _model(self, name: str) -> ModelMetrics:
        return self.models.setdefault(name, ModelMetrics())


class NodeGauges(msgspec.Struct, frozen=True):
    """Other nodes at the moment of the scrape: their ``states`` and requests ``in_flight``, by node.

    ``queued`` are the requests that wait here for a node, by model.
    """

    states: Mapping[str, str] = {}
    in_flight: Mapping[str, int] = {}
    queued: Mapping[str, int] = {}


class InstanceGauges(msgspec.Struct, frozen=True):
    """One instance at the moment of the scrape."""

    model: str
    state: State
    in_flight: int
    queued: int
