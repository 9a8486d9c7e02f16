"""How many lines of a batch are in flight (pure): so many that each slot has its next line ready."""

from __future__ import annotations

from typing import Final

__all__ = ["FIRST_LIMIT", "MAX_LIMIT", "next_limit"]

FIRST_LIMIT: Final = 4
MAX_LIMIT: Final = 64
"""Lines in flight: so many slots has a large server. Each holds a connection and a body."""
_MAX_WAITING: Final = 4
"""Lines in the queue of the model. They make sure that no slot is idle between two lines."""


def next_limit(limit: int, position: int | None, most: int = MAX_LIMIT) -> int:
    """The limit after an answer. ``position``: where its request had to wait in the queue; None: nowhere."""
    if position is None:
        return min(limit + 1, most)
    if position > _MAX_WAITING:
        return max(1, limit - 1)
    return min(limit + 1, most) if position < _MAX_WAITING // 2 else limit
