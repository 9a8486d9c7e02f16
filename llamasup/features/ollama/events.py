"""The events of a stream that arrives in any pieces (pure)."""

from __future__ import annotations

from typing import Final

from llamasup.features.ollama.answer_format import BrokenAnswer

MAX_EVENT: Final = 4 << 20
"""Bytes of an event; those of llama-server (b11434) have some KiB, with 20 alternatives for a token."""

EVENT: Final = b"data: "


class Events:
    """Holds the beginning of an event until its rest arrives."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    def complete(self, data: bytes) -> bytes:
        """Return the events that are complete now. Raises BrokenAnswer."""
        rest = self._rest
        if not rest and data.endswith(b"\n\n"):
            return data
        searched = max(0, len(rest) - 1)
        rest += data
        end = rest.rfind(b"\n\n", searched) + 2
        if end == 1:  # not found
            if len(rest) > MAX_EVENT:
                raise BrokenAnswer(f"llama-server sent an event of more than {MAX_EVENT} bytes")
            return b""
        complete = bytes(rest[:end])
        del rest[:end]
        return complete
