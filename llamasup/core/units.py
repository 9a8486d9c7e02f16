"""Sizes as people read them."""

from __future__ import annotations

__all__ = ["memory_text"]


def memory_text(count_bytes: int) -> str:
    """``1.4 GiB``, ``730 MiB``: three digits say enough to a person."""
    size = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
