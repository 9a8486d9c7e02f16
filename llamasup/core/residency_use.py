"""How much a model has been in use lately (pure): requests count, and count half after an hour.

Why not only the last one: scripts/simulate_residency.py, whose results are in docs/residency.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp2
from typing import Final

__all__ = ["HALF_LIFE_S", "UNUSED", "Use"]

HALF_LIFE_S: Final = 3600.0
"""In the simulation ten minutes forget too soon (8 % more load time); four hours, or a day, are as good
within 3 %."""


@dataclass(frozen=True, slots=True)
class Use:
    """``count`` is as of ``at_s`` (monotonic seconds)."""

    count: float = 0.0
    at_s: float = 0.0

    def at(self, now_s: float) -> float:
        """The count as of now."""
        return self.count * exp2((self.at_s - now_s) / HALF_LIFE_S)

    def after(self, now_s: float, requests: int = 1) -> Use:
        """With these, that have just ended."""
        return Use(self.at(now_s) + requests, now_s)


UNUSED: Final = Use()
