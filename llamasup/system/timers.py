"""One timer for many deadlines: it fires at the earliest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

__all__ = ["DeadlineTimer"]


class DeadlineTimer:
    """For the event loop that it was made in. The callback schedules it again for deadlines to come."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._at_s = 0.0

    def schedule(self, at_s: float) -> None:
        """Fire at ``at_s`` (monotonic) or earlier, if an earlier deadline is scheduled."""
        if self._timer is not None:
            if self._at_s <= at_s:
                return
            self._timer.cancel()
        self._at_s = at_s
        self._timer = self._loop.call_later(max(0.0, at_s - monotonic()), self._fire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._callback()
