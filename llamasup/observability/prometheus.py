"""What /metrics says: llamasup's own numbers, and every llama-server's with a ``model`` label.

The numbers are plain integers while they are counted (``runtime.metrics``); the Prometheus library turns them
into text when somebody asks. The text is Prometheus's own (0.0.4), whatever ``Accept`` says: OpenMetrics
wants counters to end in ``_total``, and llama-server's do not all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from llamasup._version import __version__
from llamasup.observability.metrics import Histogram, InstanceGauges, Metrics, ModelMetrics
from llamasup.supervision.states import State

__all__ = ["CONTENT_TYPE", "exposition", "own_families"]

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_COMMENT = re.compile(r"# (?:HELP|TYPE) (?P<name>[^ ]+)")
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? +(?P<value>[^ ].*)")

_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], Histogram]], ...] = (
    ("llamasup_request_seconds", "From the request's last byte to the answer's.", attrgetter("request_s")),
    ("llamasup_first_byte_seconds", "To the answer's first byte.", attrgetter("first_byte_s")),
    ("llamasup_queue_seconds", "Until it was sent on to the server.", attrgetter("queue_s")),
    ("llamasup_tokens_per_second", "Speed of one answer, as the server says.", attrgetter("speed")),
    ("llamasup_load_seconds", "From the server's start to its readiness.", attrgetter("load_s")),
)

_Key = TypeVar("_Key", bound=tuple[str, ...])


def exposition(metrics: Metrics, instances: Sequence[InstanceGauges], scraped: Mapping[str, str]) -> bytes:
    """Prometheus text. ``scraped``: llama-server's own text by model."""
    registry = CollectorRegistry()
    registry.register(_Own(metrics, instances))
    ProcessCollector(registry=registry)  # of llamasup itself: a leak of memory or descriptors is seen there
    return generate_latest(registry) + merged(scraped)


def own_families() -> list[Metric]:
    """Every family that llamasup itself has, empty: for the documentation."""
    metrics = Metrics()
    metrics.lines_dropped = int
    return list(_Own(metrics, []).collect())


class _Own(Collector):
    def __init__(self, metrics: Metrics, instances: Sequence[InstanceGauges]) -> None:
        self._metrics = metrics
        self._instances = instances

    def collect(self) -> Iterator[Metric]:
        metrics, models = self._metrics, self._metrics.models
        yield _counter(
            "llamasup_requests",
            "Finished requests; 499 is a client that left. Routes that llamasup does not know are `other`; "
            "model is empty where none was to answer.",
            ("model", "route", "code"),
            {(model, route, str(code)): count for (model, route, code), count in metrics.requests.items()},
        )
        for name, text, pick in _HISTOGRAMS:
            yield _histogram(name, text, {(model,): pick(each) for model, each in models.items()}, ("model",))
        yield _counter(
            "llamasup_tokens",
            "Tokens of answers; `prompt` holds the `cached` ones, which were not computed again.",
            ("model", "kind"),
            {(model, kind): n for model, each in models.items() for kind, n in each.tokens.items()},
        )
        yield _counter(
            "llamasup_context_ends",
            "Answers that the context's size spoiled: the prompt `exceeded` it, the answer was `cut` at its "
            "end, or it was `shifted` and the beginning forgotten.",
            ("model", "kind"),
            {(model, kind): n for model, each in models.items() for kind, n in each.context_ends.items()},
        )
        yield _counter("llamasup_restarts", "Restarts after a failure.", ("model", "cause"), metrics.restarts)
        yield _counter(
            "llamasup_loads",
            "Starts of the model's servers: when it is wanted, and after crashes; failed ones included.",
            ("model",),
            {(model,): count for model, count in metrics.loads.items()},
        )
        yield _counter(
            "llamasup_evictions",
            "Unloaded: for another model's `memory` or `group`, because there were too many (`count`), "
            "nobody used it (`ttl`), somebody `asked`, or the config `changed` or `removed` it.",
            ("model", "reason"),
            metrics.evictions,
        )
        yield _counter(
            "llamasup_replays",
            "Requests that were sent again after their server ended.",
            ("model",),
            {(model,): count for model, count in metrics.replays.items()},
        )
        yield from self._gauges()
        if metrics.lines_dropped is not None:
            dropped = metrics.lines_dropped()
            yield _counter(
                "llamasup_access_log_dropped",
                "Lines that the access log could not take: its disk is full or hangs.",
                (),
                {(): dropped},
            )
        build = GaugeMetricFamily(
            "llamasup_build_info", "1; says which llamasup this is.", labels=("version",)
        )
        build.add_metric((__version__,), 1.0)
        yield build

    def _gauges(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "llamasup_instance_state",
            "How many of its servers are in this state: 1 for the present one, where there is one server.",
            labels=("model", "state"),
        )
        in_flight = GaugeMetricFamily(
            "llamasup_in_flight", "Requests that the server has.", labels=("model",)
        )
        queued = GaugeMetricFamily(
            "llamasup_queued", "Requests that wait for their turn or for the model.", labels=("model",)
        )
        by_model: dict[str, list[InstanceGauges]] = {}
        for instance in self._instances:
            by_model.setdefault(instance.model, []).append(instance)
        for model, instances in by_model.items():
            states = Counter(instance.state for instance in instances)
            for each in State:
                state.add_metric((model, each.value), states[each])
            in_flight.add_metric((model,), sum(instance.in_flight for instance in instances))
            queued.add_metric((model,), max(instance.queued for instance in instances))
        yield from (state, in_flight, queued)


def merged(scraped: Mapping[str, str]) -> bytes:
    """llama-server's text as it is, each sample with the model it is about; families of one name together.

    Not through the Prometheus library: it gives counters without the suffix another name
    (``llamacpp:n_tokens_max`` would become ``llamacpp:n_tokens_max_total``).
    """
    families: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for model, text in scraped.items():
        family = ""
        for line in text.splitlines():
            if comment := _COMMENT.match(line):
                family = comment["name"]
                if line not in families.setdefault(family, []):
                    families[family].append(line)
            elif sample := _SAMPLE.match(line):
                labels = f'model="{_escaped(model)}"' + (f",{sample['labels']}" if sample["labels"] else "")
                samples.setdefault(family, []).append(f"{sample['name']}{{{labels}}} {sample['value']}")
    lines = [line for name, head in families.items() for line in (*head, *samples.get(name, ()))]
    return "".join(f"{line}\n" for line in lines).encode()


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _counter(
    name: str, documentation: str, labels: tuple[str, ...], values: Mapping[_Key, int]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, documentation, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(
    name: str,
    documentation: str,
    values: Mapping[_Key, Histogram],
    labels: tuple[str, ...],
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, documentation, labels=labels)
    for key, histogram in values.items():
        total, buckets = 0, []
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(key, buckets, histogram.total)
    return family
