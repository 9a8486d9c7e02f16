"""Decides how many lines of a batch are in flight (pure): so many that each slot has its next line ready."""

from __future__ import annotations

from typing import Final

FIRST_LIMIT: Final = 4
MAX_LIMIT: Final = 64
"""Lines in flight: so many slots has a large server. Each holds a connection and a body."""
_MAX_WAITING: Final = 4
"""Lines in the queue of the model. They make sure that no slot is idle between two lines."""
_STEP: Final = 0.25
"""Growth is slower than shrinking: when several lines end at once, the first of the next ones find a free
slot."""


def next_limit(limit: float, position: int | None, most: int = MAX_LIMIT) -> float:
    """The limit after an answer. ``position``: where its request had to wait in the queue; None: nowhere."""
    if position is not None and position > _MAX_WAITING:
        return max(1.0, limit - 1.0)
    if position is None or position < _MAX_WAITING // 2:
        return min(limit + _STEP, float(most))
    return limit


def limit_after_refusal(limit: float) -> float:
    """The limit after a request that a limit of its key has refused: soon one line at a time asks."""
    return max(1.0, limit / 2.0)
