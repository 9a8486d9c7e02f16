"""The load of a model's servers, and estimates of waits from the past times of permits and loads (pure).

All times are in seconds.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from llamasup.core.system.text import eta_text


class ServedLoad(Struct, frozen=True):
    """The load of one model's servers.

    ``slots``: the permits of the servers that serve now; 0: no server serves. ``free``: the free permits.
    ``waiting``: the requests in its queue. ``loads``: a server is being loaded. ``eta_s``: the time until it
    serves; None: not known. ``can_serve``: a request gets a permit, or may wait for one.
    """

    slots: int = 0
    free: int = 0
    waiting: int = 0
    loads: bool = False
    eta_s: float | None = None
    can_serve: bool = True


HELD_WEIGHT: Final = 0.1  # about the last twenty requests count
LOAD_WEIGHT: Final = 0.5  # loads are few, and the last one predicts the next best (its files are in memory)
LONGEST_S: Final = 600.0  # a longer estimate is no better than a guess


def smoothed(mean_s: float | None, seen_s: float, weight: float) -> float:
    """Return the exponentially weighted mean after one more value. ``mean_s`` is None before the first."""
    return seen_s if mean_s is None else mean_s + (seen_s - mean_s) * weight


def until_served_s(position: int, max_concurrent: int, held_s: float | None) -> float:
    """Estimate when the entry at ``position`` gets one of ``max_concurrent`` permits, none of which is free.

    ``held_s``: how long a request holds a permit, times the number of its permits; None: not known, and the
    estimate is 0.
    """
    return 0.0 if held_s is None else held_s * position / max_concurrent


def until_loaded_s(load_s: float | None, elapsed_s: float) -> float:
    """Estimate the rest of a load that takes ``load_s`` (None: not known)."""
    return 0.0 if load_s is None else max(0.0, load_s - elapsed_s)


def retry_after_s(wait_s: float) -> float:
    """Compute a Retry-After of at least one second: the client has just been refused."""
    return min(max(wait_s, 1.0), LONGEST_S)


def progress_text(percent: float | None, eta_s: float | None, *, after: str = " left") -> str:
    """Write ``43 %, 12 s left``; empty if nothing is known."""
    share = "" if percent is None else f"{percent:.0f} %"
    left = "" if eta_s is None else f"{eta_text(eta_s)}{after}"
    return ", ".join(filter(None, (share, left)))
