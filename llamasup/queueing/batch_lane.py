"""Whether requests of a batch may run now: only while no other client uses a model (pure).

A batch has the machine while the others are away, and not a part of it all the time: on most machines each
further request slows all others down. After the last request of another client, the lane stays closed for
four times the usual gap between their requests. So of requests that come at random, 2 % (e⁻⁴) find a batch at
work.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

__all__ = ["GAPS", "MAX_QUIET_S", "MIN_QUIET_S", "BatchLane"]

GAPS: Final = 4.0
MIN_QUIET_S: Final = 0.5
MAX_QUIET_S: Final = 30.0
"""A client that asks less often finds a batch at work, and the batch gives way to it."""
_GAP_WEIGHT: Final = 0.2  # of the newest gap
_BUSY_RETRY_S: Final = 1.0


class BatchLane(Struct):
    """Times are monotonic. ``gap_s``: a weighted mean of the gaps between requests of other clients."""

    last_s: float = float("-inf")
    gap_s: float = 0.0
    arrived_s: float = float("-inf")

    def arrived(self, now_s: float) -> None:
        """Another client's request needs a model."""
        gap_s = now_s - self.arrived_s
        if gap_s < MAX_QUIET_S:  # a longer one is the end of their work, and no gap in it
            self.gap_s = gap_s if not self.gap_s else self.gap_s + _GAP_WEIGHT * (gap_s - self.gap_s)
        self.arrived_s = self.last_s = now_s

    def ended(self, now_s: float) -> None:
        """It is over."""
        self.last_s = now_s

    def opens_in_s(self, now_s: float, others: int) -> float:
        """Until a batch may run; 0: now. ``others``: the requests of other clients in flight or waiting."""
        quiet_s = min(max(GAPS * self.gap_s, MIN_QUIET_S), MAX_QUIET_S)
        if others:
            return max(quiet_s, _BUSY_RETRY_S)
        return max(0.0, self.last_s + quiet_s - now_s)
