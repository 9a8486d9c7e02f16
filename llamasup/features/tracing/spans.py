"""The spans of a finished request, made of its record (pure).

The children ``load``, ``queue``, ``prompt`` and ``generation`` follow one another without a gap, from the
request's last byte to the end of its answer. The record has sums, so ``load`` comes first even if the request
waited for a slot before its server crashed.

Attributes follow the semantic conventions of OpenTelemetry for HTTP and for generative AI (version 1.38).
They contain no prompt, no answer, no key, no client and no query (X13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from msgspec import Struct

from llamasup.core.http.routes import Work, route_of
from llamasup.core.observability.access_record import shown_path
from llamasup.core.observability.counters import GAVE_WAY, RequestRecord

Value = str | int | float | bool

_FAILED: Final = frozenset(
    {"unavailable", "upstream_failed", "revoked", "timed_out", "error_event", "translation_failed"}
)
_OPERATIONS: Final = {
    **dict.fromkeys(("/chat/completions", "/v1/chat/completions", "/v1/messages"), "chat"),
    **dict.fromkeys(("/responses", "/v1/responses"), "chat"),
    **dict.fromkeys(("/completion", "/completions", "/v1/completions", "/infill"), "text_completion"),
    **dict.fromkeys(("/embedding", "/embeddings", "/v1/embeddings"), "embeddings"),
}


class Span(Struct, frozen=True):
    """A span. Times are in nanoseconds since 1970. ``parent_id`` is empty at the root. ``is_server``: else it
    is internal.

    ``error``: why it failed; empty: it did not.
    """

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    start_ns: int
    end_ns: int
    is_server: bool = False
    attributes: tuple[tuple[str, Value], ...] = ()
    error: str = ""


def is_traced(record: RequestRecord) -> bool:
    """Whether the request has spans: it was for a model."""
    return bool(record.model)


def spans_of(record: RequestRecord, ended_ns: int, new_id: Callable[[int], bytes]) -> list[Span]:
    """Return the span of the request, then those of its phases. ``new_id`` makes an id of so many bytes."""
    trace_id = bytes.fromhex(record.trace_id) or new_id(16)
    root_id = new_id(8)
    start_ns = ended_ns - round(record.duration_s * 1e9)
    error = record.outcome if record.outcome in _FAILED else ""
    if not error and record.status >= 500 and record.outcome != GAVE_WAY:
        error = str(record.status)
    root = Span(
        "llamasup.request",
        trace_id,
        root_id,
        bytes.fromhex(record.parent_id),
        start_ns,
        ended_ns,
        is_server=True,
        attributes=tuple(_attributes(record, error)),
        error=error,
    )
    spans = [root]
    for name, end_s in phases(record):
        began_ns = spans[-1].end_ns if len(spans) > 1 else start_ns
        until_ns = ended_ns if end_s == record.duration_s else start_ns + round(end_s * 1e9)
        spans.append(Span(name, trace_id, new_id(8), root_id, began_ns, until_ns))
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


def _attributes(record: RequestRecord, error: str) -> Iterator[tuple[str, Value]]:
    yield "http.request.method", record.method
    yield "http.route", record.route
    yield "url.path", shown_path(record.path)
    yield "http.response.status_code", record.status
    yield "http.request.body.size", record.bytes_in
    yield "http.response.body.size", record.bytes_out
    yield "gen_ai.provider.name", "llama.cpp"
    if (operation := _OPERATIONS.get(record.route)) is not None:
        yield "gen_ai.operation.name", operation
    yield "gen_ai.request.model", record.model
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
