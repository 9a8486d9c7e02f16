"""The text of /metrics: llamasup's metrics, and the metrics of each llama-server with a ``model`` label.

The Prometheus library formats the numbers of ``counters.py`` for each scrape. The format is Prometheus text
(0.0.4), whatever ``Accept`` says: OpenMetrics requires counters to end in ``_total``, and not all of
llama-server's do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from llamasup._version import __version__
from llamasup.core.observability.counters import Histogram, InstanceGauges, Metrics, ModelMetrics, NodeGauges
from llamasup.core.supervision.states import State

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_COMMENT = re.compile(r"# (?:HELP|TYPE) (?P<name>[^ ]+)")
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? +(?P<value>[^ ].*)")

_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], Histogram]], ...] = (
    (
        "llamasup_request_seconds",
        "Time from the last byte of the request to the last byte of the answer.",
        attrgetter("request_s"),
    ),
    (
        "llamasup_first_byte_seconds",
        "Time from the last byte of the request to the first byte of the answer.",
        attrgetter("first_byte_s"),
    ),
    (
        "llamasup_queue_seconds",
        "Time from the last byte of the request until llamasup sends it to llama-server.",
        attrgetter("queue_s"),
    ),
    (
        "llamasup_tokens_per_second",
        "Generation speed of an answer, as reported by llama-server.",
        attrgetter("speed"),
    ),
    (
        "llamasup_load_seconds",
        "Time from the start of llama-server until it is ready.",
        attrgetter("load_s"),
    ),
)

_Key = TypeVar("_Key", bound=tuple[str, ...])
_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily)


def exposition(
    metrics: Metrics,
    instances: Sequence[InstanceGauges],
    scraped: Mapping[str, str],
    nodes: NodeGauges | None = None,
) -> bytes:
    """Write Prometheus text.

    ``scraped`` is llama-server's text by model; ``nodes`` are other nodes, if any.
    """
    registry = CollectorRegistry()
    registry.register(_OwnMetrics(metrics, instances, nodes))
    ProcessCollector(registry=registry)  # of llamasup itself: shows leaks of memory or descriptors
    return generate_latest(registry) + merged(scraped)


def own_families() -> list[Metric]:
    """List all families of llamasup without values, for the documentation."""
    metrics = Metrics()
    metrics.lines_dropped = metrics.traces_dropped = int
    return list(_OwnMetrics(metrics, [], NodeGauges()).collect())


class _OwnMetrics(Collector):
    def __init__(
        self, metrics: Metrics, instances: Sequence[InstanceGauges], nodes: NodeGauges | None
    ) -> None:
        self._metrics = metrics
        self._instances = instances
        self._nodes = nodes

    def collect(self) -> Iterator[Metric]:
        metrics, models = self._metrics, self._metrics.models
        yield _counter(
            "llamasup_requests",
            "Finished requests. Code 499: the client disconnected. Route `other`: unknown to llamasup. "
            "Empty model: the request was not for a model.",
            ("model", "route", "code"),
            {(model, route, str(code)): count for (model, route, code), count in metrics.requests.items()},
        )
        for name, text, pick in _HISTOGRAMS:
            yield _histogram(name, text, {(model,): pick(own) for model, own in models.items()}, ("model",))
        yield _counter(
            "llamasup_tokens",
            "Processed tokens. `prompt` includes `cached`: prompt tokens that were already in the cache.",
            ("model", "kind"),
            {(model, kind): n for model, own in models.items() for kind, n in own.tokens.items()},
        )
        yield _counter(
            "llamasup_context_ends",
            "Requests that did not fit into the context. `exceeded`: the prompt was too long. `cut`: the "
            "answer stopped at the limit. `shifted`: the oldest tokens were dropped.",
            ("model", "kind"),
            {(model, kind): n for model, own in models.items() for kind, n in own.context_ends.items()},
        )
        yield _counter("llamasup_restarts", "Restarts after a failure.", ("model", "cause"), metrics.restarts)
        yield _counter(
            "llamasup_loads",
            "Starts of llama-server: loads and restarts, successful or not.",
            ("model",),
            _single(metrics.loads),
        )
        yield _counter(
            "llamasup_evictions",
            "Unloads. `memory`: its memory was needed. `group`: another model of its group was needed. "
            "`count`: too many models were loaded. `ttl`: it was idle. `asked`: by a command. `changed`, "
            "`removed`: its files or its config.",
            ("model", "reason"),
            metrics.evictions,
        )
        yield _counter(
            "llamasup_replays",
            "Requests that were sent again after a crash of llama-server.",
            ("model",),
            _single(metrics.replays),
        )
        yield _counter(
            "llamasup_batch_gave_way",
            "Requests of batches that yielded to other clients. The batch sends them again. Other metrics do "
            "not count them.",
            ("model",),
            _single(metrics.gave_way),
        )
        yield _counter(
            "llamasup_continued_streams",
            "Streams whose llama-server crashed, of models with continue_streams. `continued`: the next "
            "llama-server continued. `refused`: the client got an error event.",
            ("model", "result"),
            metrics.continued,
        )
        yield _counter(
            "llamasup_repaired_requests",
            "Repaired requests, of models with repair. `arguments`: an earlier tool call had malformed "
            "arguments. `tool_call`, `json`: the first answer did not match the format of tool calls, or the "
            "JSON schema, and llamasup requested a second one. `tool_call_failed`, `json_failed`: the second "
            "one did not match. `schema_ignored`: llama-server ignored the schema; the client got 400.",
            ("model", "what"),
            metrics.repaired,
        )
        yield from self._gauges()
        if self._nodes is not None:
            yield from _node_gauges(self._nodes)
        if metrics.lines_dropped is not None:
            yield _counter(
                "llamasup_access_log_dropped",
                "Lines of the access log that were lost because the disk was full or slow.",
                (),
                {(): metrics.lines_dropped()},
            )
        if metrics.traces_dropped is not None:
            yield _counter(
                "llamasup_traces_dropped",
                "Requests whose spans were lost because the trace collector was slow or failed.",
                (),
                {(): metrics.traces_dropped()},
            )
        yield _gauge(
            "llamasup_build_info",
            "Always 1. The label is the version of llamasup.",
            ("version",),
            {(__version__,): 1.0},
        )

    def _gauges(self) -> Iterator[Metric]:
        by_model: dict[str, list[InstanceGauges]] = {}
        for instance in self._instances:
            by_model.setdefault(instance.model, []).append(instance)
        states = {
            model: Counter(instance.state for instance in instances) for model, instances in by_model.items()
        }
        yield _gauge(
            "llamasup_instance_state",
            "Number of the model's llama-servers in this state.",
            ("model", "state"),
            {(model, state.value): counts[state] for model, counts in states.items() for state in State},
        )
        yield _gauge(
            "llamasup_in_flight",
            "Requests that llama-server is processing.",
            ("model",),
            {(model,): sum(each.in_flight for each in instances) for model, instances in by_model.items()},
        )
        yield _gauge(
            "llamasup_queued",
            "Requests that wait for a slot or for the model to load.",
            ("model",),
            {(model,): max(each.queued for each in instances) for model, instances in by_model.items()},
        )


def _node_gauges(nodes: NodeGauges) -> Iterator[Metric]:
    yield _gauge(
        "llamasup_node_state",
        "Always 1. The label is the state of the other llamasup node; only `ready` nodes get requests.",
        ("node", "state"),
        dict.fromkeys(nodes.states.items(), 1),
    )
    yield _gauge(
        "llamasup_node_in_flight",
        "Requests that the other node works on for this one.",
        ("node",),
        _single(nodes.in_flight),
    )
    yield _gauge(
        "llamasup_node_queued",
        "Requests that wait here for a slot of another node.",
        ("model",),
        _single(nodes.queued),
    )


def merged(scraped: Mapping[str, str]) -> bytes:
    """Merge llama-server's texts with a model label on each sample, grouped by metric family.

    This is not done with the Prometheus library, which renames counters without the suffix
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


def _single(counts: Mapping[str, int]) -> dict[tuple[str], int]:
    return {(key,): count for key, count in counts.items()}


def _family(
    kind: Callable[..., _Family],
    name: str,
    documentation: str,
    labels: tuple[str, ...],
    values: Mapping[_Key, float],
) -> _Family:
    family = kind(name, documentation, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


_gauge = partial(_family, GaugeMetricFamily)
_counter = partial(_family, CounterMetricFamily)


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
