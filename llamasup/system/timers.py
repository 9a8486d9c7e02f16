"""One timer for many deadlines: it rings at the earliest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

__all__ = ["DeadlineTimer"]


class DeadlineTimer:
    """For the loop that it was made in. Whoever hears it sets it anew for what is still due."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._at_s = 0.0

    def schedule(self, at_s: float) -> None:
        """Monotonic seconds; what is set earlier already stays."""
        if self._timer is not None:
            if self._at_s <= at_s:
                return
            self._timer.cancel()
        self._at_s = at_s
        self._timer = self._loop.call_later(max(0.0, at_s - monotonic()), self._rang)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rang(self) -> None:
        self._timer = None
        self._ring()
