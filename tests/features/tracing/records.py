"""Records of finished requests."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from llamasup.core.observability.counters import RequestRecord

__all__ = ["PARENT", "TRACE", "record"]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

_STREAM = RequestRecord(
    request_id="r-1",
    method="POST",
    path="/v1/chat/completions",
    route="/v1/chat/completions",
    model="tiny",
    generation=1,
    status=200,
    tokens_prompt=12,
    tokens_cached=4,
    tokens_completion=30,
    tokens_per_s=10.0,
    queue_s=0.5,
    first_byte_s=1.0,
    duration_s=4.0,
    bytes_out=900,
    outcome="ok",
    client="key:alice",
    bytes_in=70,
)


def record(**changes: Any) -> RequestRecord:
    """A stream: 0.5 s in the queue, 0.5 s of prompt, 3 s of generation."""
    return replace(_STREAM, **changes)
