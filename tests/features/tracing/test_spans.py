"""From the record of a request to its spans."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, StatusCode

from llamasup.core.http.routes import route_of
from llamasup.features.tracing.spans import phases, spans_of
from tests.features.tracing.records import PARENT, TRACE, record

ENDED_NS = 1_795_640_000_000_000_000


def spans(**changes: Any) -> list[Any]:
    return spans_of(record(**changes), ENDED_NS, RandomIdGenerator(), Resource({}))


def shares(**changes: Any) -> dict[str, float]:
    """The seconds of each phase."""
    _, *children = spans(**changes)
    return {span.name: (span.end_time - span.start_time) / 1e9 for span in children}


STREAM = {"queue": 0.5, "prompt": 0.5, "generation": 3.0}
PROMPT = {"queue": 0.5, "prompt": 3.5}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, STREAM),
        ({"waited_s": 0.3}, {"load": 0.3, "queue": 0.2, "prompt": 0.5, "generation": 3.0}),
        ({"waited_s": 0.5}, {"load": 0.5, "prompt": 0.5, "generation": 3.0}),
        # The generation of a plain answer lasts as long as llama-server says, or else begins with the answer.
        ({"first_byte_s": 3.999}, STREAM),
        ({"tokens_per_s": None, "first_byte_s": 3.0}, {"queue": 0.5, "prompt": 2.5, "generation": 1.0}),
        ({"tokens_completion": None, "first_byte_s": 3.0}, {"queue": 0.5, "prompt": 2.5, "generation": 1.0}),
        # Without a generation, the request ends with its prompt.
        ({"first_byte_s": None, "outcome": "client_gone", "status": 499}, PROMPT),
        ({"status": 400, "tokens_completion": None}, PROMPT),
        ({"tokens_completion": 0}, PROMPT),
        ({"route": "/v1/embeddings", "tokens_completion": None}, PROMPT),
        ({"route": "/v1/rerank", "tokens_completion": None}, PROMPT),
        # Without a model, there is no prompt.
        ({"generation": 0}, {"queue": 0.5}),
        ({"queue_s": 4.0, "first_byte_s": None}, {"queue": 4.0}),
        ({"route": "/tokenize"}, {"queue": 0.5}),
        ({"generation": 0, "queue_s": 0.0, "duration_s": 0.0, "first_byte_s": None}, {}),
    ],
)
def test_request_is_divided_into_its_phases(changes: dict[str, Any], expected: dict[str, float]) -> None:
    assert shares(**changes) == expected


@pytest.mark.parametrize(("trace", "parent"), [(TRACE, PARENT), ("", "")])
def test_children_have_the_request_as_parent_and_the_client_is_its_parent(trace: str, parent: str) -> None:
    root, *children = spans(trace_id=trace, parent_id=parent)
    found = root.parent and (root.parent.trace_id, root.parent.span_id, root.parent.is_remote)
    assert found == ((int(TRACE, 16), int(PARENT, 16), True) if parent else None)
    assert (root.start_time, root.end_time, root.kind) == (
        ENDED_NS - 4_000_000_000,
        ENDED_NS,
        SpanKind.SERVER,
    )
    for child in children:
        assert (child.parent, child.kind) == (root.context, SpanKind.INTERNAL)
    assert {child.context.trace_id for child in children} == {root.context.trace_id}
    assert len({span.context.span_id for span in (root, *children)}) == 4
    if trace:
        assert root.context.trace_id == int(TRACE, 16)


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
    assert not any(child.attributes for child in children)


def test_unknown_counts_and_operations_are_left_out() -> None:
    root, *_ = spans(route="other", tokens_prompt=None, tokens_cached=None, tokens_completion=None)
    names = root.attributes
    assert not {name for name in names if name.startswith("gen_ai.usage") or name == "gen_ai.operation.name"}


def test_names_are_shortened_and_can_be_encoded() -> None:
    root, *_ = spans(path="/\x1b[31m" + "x" * 2000, model="odd\udcff")
    path = root.attributes["url.path"]
    assert root.attributes["gen_ai.request.model"] == "odd?"
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
    assert (root.status.description or "", root.attributes.get("error.type", "")) == (error, error)
    assert root.status.is_ok is not bool(error)
    assert all(child.status.status_code is StatusCode.UNSET for child in children)


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
    at = root.start_time
    for child in children:
        assert child.start_time == at <= child.end_time <= root.end_time
        at = child.end_time
    if "prompt" in {child.name for child in children}:
        assert at == root.end_time
    assert len(list(phases(record(**changes)))) == len(children)


def test_every_operation_is_a_known_route() -> None:
    from llamasup.features.tracing import spans as module

    assert all(route_of(path.encode()).label == path for path in module._OPERATIONS)
