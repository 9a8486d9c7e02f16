"""Rate limit for messages of one kind, so that a flood of requests does not become a flood of log lines."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BURST", "PERIOD_S", "Repeats", "count_one", "end_period"]

# Shown at once of each kind, so that a few refusals of different clients are all visible.
BURST = 5
PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Repeats:
    """Messages of one kind in the period that ends at ``until_s``: ``shown`` and ``left_out``."""

    until_s: float
    shown: int = 0
    left_out: int = 0


def count_one(repeats: Repeats | None, now_s: float) -> tuple[Repeats, bool]:
    """Count a message; returns whether to show it. ``repeats`` is None for the first of its kind."""
    if repeats is None or (now_s >= repeats.until_s and not repeats.left_out):
        return Repeats(now_s + PERIOD_S, shown=1), True
    if repeats.shown < BURST:
        return Repeats(repeats.until_s, repeats.shown + 1), True
    return Repeats(repeats.until_s, repeats.shown, repeats.left_out + 1), False


def end_period(repeats: Repeats, now_s: float) -> tuple[Repeats, int]:
    """Begin the next period; returns how many messages the last one left out.

    While the flood continues, only counts are shown.
    """
    return Repeats(now_s + PERIOD_S, shown=BURST), repeats.left_out
