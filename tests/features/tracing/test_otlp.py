"""OTLP messages of spans, as a collector decodes them."""

from __future__ import annotations

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1 import trace_pb2 as messages

from llamasup._version import __version__
from llamasup.features.tracing.otlp import encoded, rejected_spans
from llamasup.features.tracing.spans import Span
from tests.features.tracing.collector import plain

ROOT = Span(
    "llamasup.request",
    b"t" * 16,
    b"r" * 8,
    b"",
    5,
    9,
    is_server=True,
    attributes=(("text", "a"), ("count", 3), ("speed", 0.5), ("again", False), ("odd", "a\udcff")),
    error="revoked",
)
CHILD = Span("queue", b"t" * 16, b"c" * 8, b"r" * 8, 5, 7)


def decoded() -> tuple[messages.ResourceSpans, list[messages.Span]]:
    request = ExportTraceServiceRequest.FromString(encoded([ROOT, CHILD], [("service.name", "x")]))
    (of_resource,) = request.resource_spans
    (of_scope,) = of_resource.scope_spans
    assert (of_scope.scope.name, of_scope.scope.version) == ("llamasup", __version__)
    return of_resource, list(of_scope.spans)


def test_spans_keep_their_ids_times_and_kinds() -> None:
    of_resource, (root, child) = decoded()
    assert plain(of_resource.resource.attributes) == {"service.name": "x"}
    assert (root.trace_id, root.span_id, root.parent_span_id) == (b"t" * 16, b"r" * 8, b"")
    assert (child.trace_id, child.span_id, child.parent_span_id) == (b"t" * 16, b"c" * 8, b"r" * 8)
    assert (root.start_time_unix_nano, root.end_time_unix_nano, root.name) == (5, 9, "llamasup.request")
    assert (root.kind, child.kind) == (messages.Span.SPAN_KIND_SERVER, messages.Span.SPAN_KIND_INTERNAL)


def test_attributes_keep_their_types() -> None:
    _, (root, _) = decoded()
    found = plain(root.attributes)
    assert found == {"text": "a", "count": 3, "speed": 0.5, "again": False, "odd": "a?"}
    assert found["again"] is False


def test_only_failed_spans_have_a_status() -> None:
    _, (root, child) = decoded()
    assert (root.status.code, root.status.message) == (messages.Status.STATUS_CODE_ERROR, "revoked")
    assert not child.HasField("status")


def test_rejected_spans_are_read_from_the_answer() -> None:
    answer = ExportTraceServiceResponse()
    assert rejected_spans(answer.SerializeToString()) == 0
    answer.partial_success.rejected_spans = 7
    assert rejected_spans(answer.SerializeToString()) == 7
    assert rejected_spans(b"<html>") == 0
