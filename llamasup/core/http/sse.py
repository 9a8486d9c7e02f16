"""Server-sent events: the error event that ends a broken stream, and the framing of chunks around events."""

from __future__ import annotations

import re
from collections.abc import Iterator

FRAMING = re.compile(rb"\r\n(?:[0-9A-Fa-f]+(?:;[^\r\n]*)?\r\n)?")  # JSON has no raw CR: this is framing

NAMED_EVENTS = (b"/v1/messages", b"/v1/responses", b"/responses")  # these APIs name their events


class Lines:
    """The lines of a stream whose bytes arrive in any pieces.

    Only a line feed ends a line. JSON may contain U+2028 and U+0085, where httpx's ``iter_lines`` cuts it.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []

    def add(self, data: bytes) -> Iterator[str]:
        """Yield the lines that have become complete, without their ends."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            yield b"".join((*self._held, end)).removesuffix(b"\r").decode(errors="replace")
            self._held = []
        if rest:
            self._held.append(rest)

    def rest(self) -> Iterator[str]:
        """Yield what is left when the stream ends."""
        yield from self.add(b"\n" if self._held else b"")


def error_event(path: bytes, error: bytes) -> bytes:
    """Return the event that ends a broken stream. ``error`` is an error body, ``{"error":{…}}``."""
    if path in NAMED_EVENTS:
        return b'event: error\ndata: {"type":"error",' + error[1:] + b"\n\n"
    return b"data: " + error + b"\n\n"
