"""Decides when requests of a batch may run: only while no other client uses a model (pure).

A batch has the machine while no other client uses it, instead of a part of the machine all the time: on most
machines each further request slows all others down. After the last request of another client, the lane stays
closed for four times the usual gap between their requests. So of requests that come at random, 2 % (e⁻⁴) find
a batch at work.

Where the others never pause, a batch that waits gets a turn: one request, in a slot that is free. The next
turn comes a minute later, or later still, so that turns take at most a thirtieth of the time. So of requests
that come at random, 3 % find one at work, fewer than the 5 % that a 95th percentile leaves out.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

GAPS: Final = 4.0
MIN_QUIET_S: Final = 0.5
MAX_QUIET_S: Final = 30.0
"""A client with rarer requests finds a batch at work, and the batch yields to it."""
TURN_AFTER_S: Final = 60.0
"""How long a batch waits for a turn."""
TURN_SHARE: Final = 1 / 30
"""The most of the time that turns take."""
_GAP_WEIGHT: Final = 0.2  # of the newest gap
_BUSY_RETRY_S: Final = 1.0


class BatchLane(Struct):
    """The recent requests of other clients, and the next turn of a batch. Times are monotonic.

    ``gap_s``: a weighted mean of the gaps between requests of other clients. ``turn_at_s``: when a batch gets
    a turn; None: no batch waits.
    """

    last_s: float = float("-inf")
    gap_s: float = 0.0
    arrived_s: float = float("-inf")
    turn_at_s: float | None = None

    def arrived(self, now_s: float) -> None:
        """Note that another client's request needs a model."""
        gap_s = now_s - self.arrived_s
        if gap_s < MAX_QUIET_S:  # a longer one is the end of their work, and no gap in it
            self.gap_s = gap_s if not self.gap_s else self.gap_s + _GAP_WEIGHT * (gap_s - self.gap_s)
        self.arrived_s = self.last_s = now_s

    def ended(self, now_s: float) -> None:
        """Note that another client's request has finished."""
        self.last_s = now_s

    def opens_in_s(self, now_s: float, others: int) -> float:
        """Return the time until a batch may run. ``others``: other clients' requests in flight or waiting."""
        quiet_s = min(max(GAPS * self.gap_s, MIN_QUIET_S), MAX_QUIET_S)
        if others:
            return max(quiet_s, _BUSY_RETRY_S)
        return max(0.0, self.last_s + quiet_s - now_s)

    # --- turns

    def turn_in_s(self, now_s: float) -> float:
        """Note that a batch has to wait, and return the time until it may have a turn."""
        if self.turn_at_s is None:
            self.turn_at_s = now_s + TURN_AFTER_S
        return max(0.0, self.turn_at_s - now_s)

    def turn_ended(self, now_s: float, took_s: float) -> None:
        self.turn_at_s = now_s + max(TURN_AFTER_S, took_s * (1 / TURN_SHARE - 1))

    def served(self) -> None:
        """Note that a batch runs without a turn, so no batch waits."""
        self.turn_at_s = None
