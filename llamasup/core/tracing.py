"""The trace that a request belongs to, as its ``traceparent`` header says (W3C Trace Context, level 1).

The header itself goes on to llama-server as it came, with ``tracestate``; nothing is made up where it is
absent.
"""

from __future__ import annotations

import re

__all__ = ["trace_id_of"]

# A version to come may carry more behind the flags; ff is none, and ids of zeros alone are invalid (§3.2.2).
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)
_LENGTH_00 = 55  # of version 00, which has nothing behind the flags


def trace_id_of(traceparent: bytes) -> str:
    """The 32 digits of the trace's id; empty for a header that is invalid."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or (traceparent.startswith(b"00") and len(traceparent) != _LENGTH_00):
        return ""
    return found[1].decode("ascii")
