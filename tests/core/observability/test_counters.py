"""Counters and histograms as plain numbers."""

from __future__ import annotations

import msgspec

from llamasup.core.observability.counters import Histogram, Metrics, RequestRecord

DONE = RequestRecord(
    request_id="r",
    method="POST",
    path="/completion",
    route="/completion",
    model="tiny",
    generation=1,
    status=200,
    tokens_prompt=10,
    tokens_cached=None,
    tokens_completion=5,
    tokens_per_s=50.0,
    queue_s=0.0,
    first_byte_s=0.02,
    duration_s=0.3,
    bytes_out=100,
    outcome="ok",
)


def test_a_value_falls_into_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 7.5


def test_a_request_is_counted_by_model_route_and_code() -> None:
    metrics = Metrics()
    metrics.count_request(DONE)
    metrics.count_request(DONE)
    metrics.count_request(msgspec.structs.replace(DONE, status=503, first_byte_s=None))
    assert metrics.requests == {("tiny", "/completion", 200): 2, ("tiny", "/completion", 503): 1}
    tiny = metrics.models["tiny"]
    assert tiny.tokens == {"prompt": 30, "cached": 0, "completion": 15}
    assert sum(tiny.request_s.counts) == sum(tiny.queue_s.counts) == sum(tiny.speed.counts) == 3
    assert sum(tiny.first_byte_s.counts) == 2  # one got no response


def test_request_without_a_child_is_counted_without_times() -> None:
    metrics = Metrics()
    metrics.count_request(msgspec.structs.replace(DONE, model="", generation=0, route="/health"))
    metrics.count_request(msgspec.structs.replace(DONE, generation=0, status=503))  # refused while it loaded
    assert metrics.requests == {("", "/health", 200): 1, ("tiny", "/completion", 503): 1}
    assert metrics.models == {}


def test_context_ends_are_counted_by_kind() -> None:
    metrics = Metrics()
    for context in ("", "cut", "exceeded", "cut", "shifted"):
        metrics.count_request(msgspec.structs.replace(DONE, context=context))
    assert metrics.models["tiny"].context_ends == {"exceeded": 1, "cut": 2, "shifted": 1}


def test_loads_and_restarts_are_counted() -> None:
    metrics = Metrics()
    metrics.observe_load("tiny", 1.0)
    metrics.observe_load("tiny", 2.0)
    metrics.count_restart("tiny", "killed")
    metrics.count_restart("tiny", "killed")
    assert metrics.models["tiny"].load_s.total == 3.0
    assert metrics.restarts == {("tiny", "killed"): 2}


def test_request_of_a_batch_that_gave_way_is_no_failure_of_the_model() -> None:
    metrics = Metrics()
    metrics.count_request(msgspec.structs.replace(DONE, status=503, outcome="gave_way"))
    assert (metrics.requests, metrics.gave_way) == ({}, {"tiny": 1})
