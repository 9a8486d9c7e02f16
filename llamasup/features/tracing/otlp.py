"""Encodes spans as OTLP (pure).

The messages are those of the package ``opentelemetry-proto``, of the extra ``llamasup[otel]``. Only the
thread that sends spans imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2 as messages

from llamasup._version import __version__
from llamasup.features.tracing.spans import Span, Value


def encoded(spans: Sequence[Span], resource: Iterable[tuple[str, Value]]) -> bytes:
    """Encode the body of ``POST /v1/traces``."""
    scope = messages.ScopeSpans(
        scope=InstrumentationScope(name="llamasup", version=__version__), spans=map(_message, spans)
    )
    named = messages.ResourceSpans(resource=Resource(attributes=_attributes(resource)), scope_spans=[scope])
    body: bytes = ExportTraceServiceRequest(resource_spans=[named]).SerializeToString()
    return body


def rejected_spans(answer: bytes) -> int:
    """Return how many spans the collector rejected, according to its answer to a request that succeeded."""
    try:
        rejected: int = ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans
    except DecodeError:  # not an answer of OTLP, but the status says that the spans are accepted
        return 0
    return rejected


def _message(span: Span) -> messages.Span:
    error = messages.Status(code=messages.Status.STATUS_CODE_ERROR, message=span.error)
    return messages.Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_id,
        flags=1,  # sampled
        name=span.name,
        kind=messages.Span.SPAN_KIND_SERVER if span.is_server else messages.Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=_attributes(span.attributes),
        status=error if span.error else None,
    )


def _attributes(attributes: Iterable[tuple[str, Value]]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in attributes]


def _value(value: Value) -> AnyValue:
    match value:
        case bool():  # before int, of which it is a kind
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case _:  # a name of a file may have bytes that are not UTF-8
            return AnyValue(
                string_value=value if value.isascii() else value.encode("utf-8", "replace").decode()
            )
