"""How many requests may be sent a second time after their server ended (S10).

Decides; never sends anything. What is bounded is a storm: a request that kills every server it meets must not
be able to take everybody's time, and neither must clients that do so together.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RetryBudget", "RetryPolicy", "spend"]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    share: float = 0.2
    """What every answered request adds to the budget: a fifth of a request may be sent again."""
    floor: float = 64.0
    """What time alone brings back: at low traffic a fifth of the requests is none at all. As many as the
    slots and the queue of one machine's server hold."""
    floor_window_s: float = 60.0
    """How long an empty budget takes to come back to the floor."""
    most: float = 256.0
    """What a long good time can save up: no more requests wait for one model anyway (S9)."""


@dataclass(frozen=True, slots=True)
class RetryBudget:
    """What is left at ``at_s`` (monotonic)."""

    left: float
    at_s: float


def spend(budget: RetryBudget, policy: RetryPolicy, *, earned: int, now_s: float) -> tuple[RetryBudget, bool]:
    """Take one request out of the budget, if it is there.

    ``earned``: responses that were completed and not counted here before. The budget is earned by success.
    """
    left = budget.left
    if left < policy.floor:
        left = min(policy.floor, left + policy.floor * (now_s - budget.at_s) / policy.floor_window_s)
    left = min(policy.most, left + policy.share * earned)
    granted = left >= 1.0
    return RetryBudget(left - granted, now_s), granted
