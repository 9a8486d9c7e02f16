"""Finished requests for the tests of the usage."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from llamasup.observability.counters import RequestRecord

__all__ = ["record"]

_PLAIN = RequestRecord(
    *("r", "POST", "/completion", "/completion", "tiny", 1, 200),
    *(10, 4, 5, 100.0),
    *(0.0, 0.1, 2.0, 300, "ok"),
    client="127.0.0.1",
    ended_s=1000.0,
    slot_s=1.5,
)


def record(**changes: Any) -> RequestRecord:
    """A request for ``tiny`` with 10 tokens of prompt (4 of them cached) and 5 of answer, unless changed."""
    return replace(_PLAIN, **changes)
