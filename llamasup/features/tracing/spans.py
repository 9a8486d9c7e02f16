"""The spans of a finished request, made of its record (pure).

The children ``load``, ``queue``, ``prompt`` and ``generation`` follow one another without a gap, from the
request's last byte to the end of its answer. The record has sums, so ``load`` comes first even if the request
waited for a slot before its server crashed.

Attributes follow the semantic conventions of OpenTelemetry for HTTP and for generative AI (version 1.38).
They contain no prompt, no answer, no key, no client and no query (X13).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from llamasup._version import __version__
from llamasup.core.http.routes import Work, route_of
from llamasup.core.observability.access_record import shown_path
from llamasup.core.observability.counters import GAVE_WAY, RequestRecord

_SCOPE: Final = InstrumentationScope("llamasup", __version__)
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_FAILED: Final = frozenset(
    {"unavailable", "upstream_failed", "revoked", "timed_out", "error_event", "translation_failed"}
)
_OPERATIONS: Final = {
    **dict.fromkeys(("/chat/completions", "/v1/chat/completions", "/v1/messages"), "chat"),
    **dict.fromkeys(("/responses", "/v1/responses"), "chat"),
    **dict.fromkeys(("/completion", "/completions", "/v1/completions", "/infill"), "text_completion"),
    **dict.fromkeys(("/embedding", "/embeddings", "/v1/embeddings"), "embeddings"),
}


def spans_of(
    record: RequestRecord, ended_ns: int, ids: IdGenerator, resource: Resource
) -> list[ReadableSpan]:
    """Return the span of the request, then the spans of its phases. Times are in nanoseconds since 1970."""
    trace_id = int(record.trace_id, 16) if record.trace_id else ids.generate_trace_id()

    def span(name: str, begin_ns: int, end_ns: int, parent: SpanContext | None, **more: Any) -> ReadableSpan:
        context = SpanContext(trace_id, ids.generate_span_id(), is_remote=False, trace_flags=_SAMPLED)
        more |= {"start_time": begin_ns, "end_time": end_ns, "instrumentation_scope": _SCOPE}
        return ReadableSpan(name, context, parent, resource, **more)

    client = None
    if record.parent_id:
        client = SpanContext(trace_id, int(record.parent_id, 16), is_remote=True, trace_flags=_SAMPLED)
    start_ns = ended_ns - round(record.duration_s * 1e9)
    error = record.outcome if record.outcome in _FAILED else ""
    if not error and record.status >= 500 and record.outcome != GAVE_WAY:
        error = str(record.status)
    root = span(
        "llamasup.request",
        start_ns,
        ended_ns,
        client,
        kind=SpanKind.SERVER,
        attributes=dict(_attributes(record, error)),
        status=Status(StatusCode.ERROR, error) if error else Status(),
    )
    spans, began_ns = [root], start_ns
    for name, end_s in phases(record):
        until_ns = ended_ns if end_s == record.duration_s else start_ns + round(end_s * 1e9)
        spans.append(span(name, began_ns, until_ns, root.context))
        began_ns = until_ns
    return spans


def phases(record: RequestRecord) -> Iterator[tuple[str, float]]:
    """Return the phases in their order, each with its end in seconds since the start."""
    duration_s = record.duration_s
    queue_s = min(max(0.0, record.queue_s), duration_s)
    waited_s = min(max(0.0, record.waited_s), queue_s)
    if waited_s > 0.0:
        yield "load", waited_s
    if queue_s > waited_s:
        yield "queue", queue_s
    route = route_of(record.route.encode())
    if not (record.generation and route.infers) or queue_s >= duration_s:
        return
    began_s = _generation_began_s(record) if route.work in (Work.TEXT, None) else None
    if began_s is None:
        yield "prompt", duration_s
        return
    began_s = min(max(queue_s, began_s), duration_s)
    yield "prompt", began_s
    yield "generation", duration_s


def _generation_began_s(record: RequestRecord) -> float | None:
    """Return when the generation began; None if it did not, or if that is unknown.

    A stream begins with the first token. A plain answer is sent when it is complete, so the beginning is
    known only from llama-server's own speed.
    """
    first_byte_s = record.first_byte_s
    if first_byte_s is None or record.status >= 400 or record.tokens_completion == 0:
        return None
    if record.tokens_completion and record.tokens_per_s:
        return min(first_byte_s, record.duration_s - record.tokens_completion / record.tokens_per_s)
    return first_byte_s


def _attributes(record: RequestRecord, error: str) -> Iterator[tuple[str, str | int | float | bool]]:
    yield "http.request.method", record.method
    yield "http.route", record.route
    yield "url.path", shown_path(record.path)
    yield "http.response.status_code", record.status
    yield "http.request.body.size", record.bytes_in
    yield "http.response.body.size", record.bytes_out
    yield "gen_ai.provider.name", "llama.cpp"
    if (operation := _OPERATIONS.get(record.route)) is not None:
        yield "gen_ai.operation.name", operation
    # The name of a file may have bytes that are not UTF-8.
    yield "gen_ai.request.model", record.model.encode("utf-8", "replace").decode()
    for name, value in (
        ("gen_ai.usage.input_tokens", record.tokens_prompt),
        ("gen_ai.usage.output_tokens", record.tokens_completion),
        ("gen_ai.usage.cache_read.input_tokens", record.tokens_cached),
        ("llamasup.tokens_per_s", record.tokens_per_s),
        ("llamasup.context", record.context or None),
    ):
        if value is not None:
            yield name, value
    yield "llamasup.request_id", record.request_id
    yield "llamasup.outcome", record.outcome
    yield "llamasup.generation", record.generation
    yield "llamasup.replayed", record.replayed
    if error:
        yield "error.type", error
