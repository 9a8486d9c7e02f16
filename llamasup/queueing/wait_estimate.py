"""When it is worth asking again: from how long requests held a place, and loads took, until now.

Estimates; nothing is held to them. All times in seconds.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "HELD_WEIGHT",
    "LOAD_WEIGHT",
    "LONGEST_S",
    "retry_after_s",
    "smoothed",
    "until_loaded_s",
    "until_served_s",
]

HELD_WEIGHT: Final = 0.1  # the last twenty or so requests decide
LOAD_WEIGHT: Final = 0.5  # loads are few, and the last one (its files still in memory) says most of the next
LONGEST_S: Final = 600.0  # beyond it an estimate is no better than a guess


def smoothed(mean_s: float | None, seen_s: float, weight: float) -> float:
    """The exponentially weighted mean after one more value; None: there was none before."""
    return seen_s if mean_s is None else mean_s + (seen_s - mean_s) * weight


def until_served_s(position: int, max_concurrent: int, held_s: float | None) -> float:
    """When the ``position``-th of those who wait gets one of ``places`` that are all taken.

    ``held_s``: how long a request holds a place, times the number of its places; None: not known, and the
    estimate is optimistic.
    """
    return 0.0 if held_s is None else held_s * position / max_concurrent


def until_loaded_s(load_s: float | None, elapsed_s: float) -> float:
    """``load_s``: what a load takes; None: not known."""
    return 0.0 if load_s is None else max(0.0, load_s - elapsed_s)


def retry_after_s(wait_s: float) -> float:
    """What to tell a client: never less than a second, for it has just been refused."""
    return min(max(wait_s, 1.0), LONGEST_S)
