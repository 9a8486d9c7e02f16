"""From the record of a request to its spans."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.http.routes import route_of
from llamasup.features.tracing.spans import Span, is_traced, phases, spans_of
from tests.features.tracing.records import PARENT, TRACE, record

ENDED_NS = 1_795_640_000_000_000_000


def spans(**changes: Any) -> list[Span]:
    numbers = count(1)
    return spans_of(record(**changes), ENDED_NS, lambda size: next(numbers).to_bytes(size, "big"))


def shares(**changes: Any) -> dict[str, float]:
    """The seconds of each phase."""
    _, *children = spans(**changes)
    return {span.name: (span.end_ns - span.start_ns) / 1e9 for span in children}


def test_stream_has_a_span_for_each_phase() -> None:
    assert shares() == {"queue": 0.5, "prompt": 0.5, "generation": 3.0}


def test_wait_for_the_model_is_a_load() -> None:
    assert shares(waited_s=0.3) == {"load": 0.3, "queue": 0.2, "prompt": 0.5, "generation": 3.0}
    assert shares(waited_s=0.5) == {"load": 0.5, "prompt": 0.5, "generation": 3.0}


def test_generation_of_a_plain_answer_lasts_as_long_as_llama_server_says() -> None:
    assert shares(first_byte_s=3.999) == {"queue": 0.5, "prompt": 0.5, "generation": 3.0}


def test_without_a_speed_the_generation_begins_with_the_answer() -> None:
    assert shares(tokens_per_s=None, first_byte_s=3.0) == {"queue": 0.5, "prompt": 2.5, "generation": 1.0}
    assert shares(tokens_completion=None, first_byte_s=3.0)["generation"] == 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"first_byte_s": None, "outcome": "client_gone", "status": 499},
        {"status": 400, "tokens_completion": None},
        {"tokens_completion": 0},
        {"route": "/v1/embeddings", "tokens_completion": None},
        {"route": "/v1/rerank", "tokens_completion": None},
    ],
)
def test_request_without_a_generation_ends_with_its_prompt(changes: dict[str, Any]) -> None:
    assert shares(**changes) == {"queue": 0.5, "prompt": 3.5}


@pytest.mark.parametrize(
    "changes", [{"generation": 0}, {"queue_s": 4.0, "first_byte_s": None}, {"route": "/tokenize"}]
)
def test_request_that_ran_no_model_has_neither_prompt_nor_generation(changes: dict[str, Any]) -> None:
    assert set(shares(**changes)) == {"queue"}


def test_refused_request_of_a_model_is_one_span() -> None:
    (root,) = spans(
        generation=0, queue_s=0.0, duration_s=0.0, status=429, outcome="refused", first_byte_s=None
    )
    assert (root.start_ns, root.end_ns, root.error) == (ENDED_NS, ENDED_NS, "")


def test_children_have_the_request_as_parent_and_the_client_is_its_parent() -> None:
    root, *children = spans(trace_id=TRACE, parent_id=PARENT)
    assert (root.trace_id.hex(), root.parent_id.hex(), root.is_server) == (TRACE, PARENT, True)
    for child in children:
        assert (child.trace_id, child.parent_id, child.is_server) == (root.trace_id, root.span_id, False)
    assert len({span.span_id for span in (root, *children)}) == 4


def test_request_without_a_traceparent_begins_a_trace() -> None:
    root, child, *_ = spans()
    assert (len(root.trace_id), root.parent_id) == (16, b"")
    assert child.trace_id == root.trace_id


def test_times_end_with_the_request() -> None:
    root, *_ = spans()
    assert (root.start_ns, root.end_ns) == (ENDED_NS - 4_000_000_000, ENDED_NS)


def test_attributes_name_the_model_and_its_tokens() -> None:
    root, *children = spans(context="cut")
    assert dict(root.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "http.request.body.size": 70,
        "http.response.body.size": 900,
        "gen_ai.provider.name": "llama.cpp",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "llamasup.tokens_per_s": 10.0,
        "llamasup.context": "cut",
        "llamasup.request_id": "r-1",
        "llamasup.outcome": "ok",
        "llamasup.generation": 1,
        "llamasup.replayed": False,
    }
    assert all(child.attributes == () for child in children)


def test_unknown_counts_and_operations_are_left_out() -> None:
    names = dict(
        spans(route="other", tokens_prompt=None, tokens_cached=None, tokens_completion=None)[0].attributes
    )
    assert not {name for name in names if name.startswith("gen_ai.usage") or name == "gen_ai.operation.name"}


def test_path_is_shortened_and_printable() -> None:
    attributes = dict(spans(path="/\x1b[31m" + "x" * 2000)[0].attributes)
    path = attributes["url.path"]
    assert isinstance(path, str)
    assert path.startswith("/%1B[31m")
    assert len(path) < 600


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"outcome": "revoked", "status": 502}, "revoked"),
        ({"outcome": "error_event"}, "error_event"),
        ({"outcome": "translation_failed"}, "translation_failed"),
        ({"outcome": "unavailable", "status": 429}, "unavailable"),
        ({"status": 500}, "500"),
        ({"status": 400}, ""),
        ({"outcome": "client_gone", "status": 499}, ""),
        ({"outcome": "cancelled", "status": 499}, ""),
        ({"outcome": "gave_way", "status": 503}, ""),
    ],
)
def test_failure_of_the_server_is_an_error_and_that_of_the_client_is_not(
    changes: dict[str, Any], error: str
) -> None:
    root, *children = spans(**changes)
    assert (root.error, dict(root.attributes).get("error.type", "")) == (error, error)
    assert all(child.error == "" for child in children)


def test_request_for_no_model_has_no_spans() -> None:
    assert is_traced(record())
    assert not is_traced(record(model=""))


SECONDS = st.floats(-1.0, 100.0) | st.sampled_from([0.0, 1e-9, 1e9])
ROUTES = st.sampled_from(["/v1/completions", "/v1/embeddings", "/tokenize", "other", "/llamasup", "/audio/x"])


@given(
    duration_s=st.floats(0.0, 100.0),
    queue_s=SECONDS,
    waited_s=SECONDS,
    first_byte_s=SECONDS | st.none(),
    tokens_per_s=st.floats(0.0, 1e6) | st.none(),
    tokens_completion=st.integers(0, 10**9) | st.none(),
    generation=st.integers(0, 2),
    route=ROUTES,
)
def test_phases_fill_a_request_without_a_gap(**changes: Any) -> None:
    root, *children = spans(**changes)
    order = ["load", "queue", "prompt", "generation"]
    assert [child.name for child in children] == [
        name for name in order if name in {child.name for child in children}
    ]
    at = root.start_ns
    for child in children:
        assert child.start_ns == at <= child.end_ns <= root.end_ns
        at = child.end_ns
    if "prompt" in {child.name for child in children}:
        assert at == root.end_ns
    assert len(list(phases(record(**changes)))) == len(children)


def test_every_operation_is_a_known_route() -> None:
    from llamasup.features.tracing import spans as module

    assert all(route_of(path.encode()).label == path for path in module._OPERATIONS)
