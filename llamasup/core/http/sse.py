"""Server-sent events: the error event that ends a broken stream, and the framing of chunks around events."""

from __future__ import annotations

import re

FRAMING = re.compile(rb"\r\n(?:[0-9A-Fa-f]+(?:;[^\r\n]*)?\r\n)?")  # JSON has no raw CR: this is framing

NAMED_EVENTS = (b"/v1/messages", b"/v1/responses", b"/responses")  # these APIs name their events


def error_event(path: bytes, error: bytes) -> bytes:
    """Return the event that ends a broken stream. ``error`` is an error body, ``{"error":{…}}``."""
    if path in NAMED_EVENTS:
        return b'event: error\ndata: {"type":"error",' + error[1:] + b"\n\n"
    return b"data: " + error + b"\n\n"
