"""What /metrics says: llamasup's own numbers, and every llama-server's with a ``model`` label.

The numbers are plain integers while they are counted (``runtime.metrics``); the Prometheus library turns them
into text when somebody asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from llamasup.core.instance import State
from llamasup.runtime.metrics import Histogram, Metrics

__all__ = ["CONTENT_TYPE", "InstanceGauges", "exposition"]

CONTENT_TYPE = CONTENT_TYPE_LATEST

_COMMENT = re.compile(r"# (?:HELP|TYPE) (?P<name>[^ ]+)")
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? +(?P<value>[^ ].*)")

_Key = TypeVar("_Key", bound=tuple[str, ...])


@dataclass(frozen=True, slots=True)
class InstanceGauges:
    """One instance at the moment of the scrape."""

    model: str
    state: State
    in_flight: int
    queued: int


def exposition(metrics: Metrics, instances: Sequence[InstanceGauges], scraped: Mapping[str, str]) -> bytes:
    """Prometheus text. ``scraped``: llama-server's own text by model."""
    registry = CollectorRegistry()
    registry.register(_Own(metrics, instances))
    return generate_latest(registry) + merged(scraped)


class _Own(Collector):
    def __init__(self, metrics: Metrics, instances: Sequence[InstanceGauges]) -> None:
        self._metrics = metrics
        self._instances = instances

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield _counter(
            "llamasup_requests",
            "Requests by model, route and status.",
            ("model", "route", "code"),
            {(model, route, str(code)): count for (model, route, code), count in metrics.requests.items()},
        )
        yield _counter("llamasup_tokens", "Tokens by model and kind.", ("model", "kind"), metrics.tokens)
        yield _counter(
            "llamasup_restarts", "Restarts by model and cause.", ("model", "cause"), metrics.restarts
        )
        yield _counter(
            "llamasup_replays",
            "Requests that were sent again after their server ended.",
            ("model",),
            {(model,): count for model, count in metrics.replays.items()},
        )
        yield _histogram("llamasup_request_seconds", "Whole request.", {(): metrics.request_s})
        yield _histogram("llamasup_first_byte_seconds", "To the first byte.", {(): metrics.first_byte_s})
        yield _histogram("llamasup_queue_seconds", "Waiting before it was sent on.", {(): metrics.queue_s})
        loads = {(model,): histogram for model, histogram in metrics.load_s.items()}
        yield _histogram("llamasup_load_seconds", "Start to ready.", loads, ("model",))
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "llamasup_instance_state", "1 for the present state.", labels=("model", "state")
        )
        in_flight = GaugeMetricFamily("llamasup_in_flight", "Requests being served.", labels=("model",))
        queued = GaugeMetricFamily("llamasup_queued", "Requests waiting.", labels=("model",))
        for instance in self._instances:
            for each in State:
                state.add_metric((instance.model, each.value), float(each is instance.state))
            in_flight.add_metric((instance.model,), instance.in_flight)
            queued.add_metric((instance.model,), instance.queued)
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
    labels: tuple[str, ...] = (),
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, documentation, labels=labels)
    for key, histogram in values.items():
        total, buckets = 0, []
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(key, buckets, histogram.total)
    return family
