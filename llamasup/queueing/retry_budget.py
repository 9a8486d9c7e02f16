"""Limits how many requests are sent again after their server ended (S10).

A request that kills every server must not take the time of all other clients.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["RetryBudget", "RetryPolicy", "spend"]


class RetryPolicy(Struct, frozen=True):
    share: float = 0.2
    """Each completed response deposits this part of a retry."""
    floor: float = 64.0
    """The budget recovers to this with time alone, for low traffic. As many as the slots and the queue of one
    server hold."""
    floor_window_s: float = 60.0
    """How long an empty budget takes to recover to the floor."""
    most: float = 256.0
    """The upper limit: no more requests wait for one model (S9)."""


class RetryBudget(Struct, frozen=True):
    """The retries ``left`` at ``at_s`` (monotonic)."""

    left: float
    at_s: float


def spend(
    budget: RetryBudget, policy: RetryPolicy, *, completed: int, now_s: float
) -> tuple[RetryBudget, bool]:
    """Withdraw one retry, if there is one. ``completed``: responses completed since the last call."""
    left = budget.left
    if left < policy.floor:
        left = min(policy.floor, left + policy.floor * (now_s - budget.at_s) / policy.floor_window_s)
    left = min(policy.most, left + policy.share * completed)
    granted = left >= 1.0
    return RetryBudget(left - granted, now_s), granted
