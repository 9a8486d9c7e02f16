"""The progress of a download (pure)."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

__all__ = ["Listener", "Progress"]


class Progress(Struct, frozen=True):
    """The progress of all files of a model together; ``total_bytes`` is None if unknown."""

    done_bytes: int
    total_bytes: int | None
    bytes_per_s: int


Listener = Callable[[Progress], None]
