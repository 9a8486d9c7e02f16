"""One timer for many deadlines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


def call_later(delay_s: float, callback: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, callback)


class DeadlineTimer:
    """Fires at the earliest deadline. The callback schedules it again for deadlines to come.

    ``call_later`` and ``clock``: those of the event loop, except in tests.
    """

    __slots__ = ("_at_s", "_call_later", "_callback", "_clock", "_timer")

    def __init__(
        self,
        callback: Callable[[], None],
        *,
        call_later: CallLater = call_later,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._callback = callback
        self._call_later = call_later
        self._clock = clock
        self._timer: Timer | None = None
        self._at_s = 0.0

    def schedule(self, at_s: float) -> None:
        """Fire at ``at_s`` (monotonic) or earlier, if an earlier deadline is scheduled."""
        if self._timer is not None:
            if self._at_s <= at_s:
                return
            self._timer.cancel()
        self._at_s = at_s
        self._timer = self._call_later(max(0.0, at_s - self._clock()), self._fire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._callback()


class DelayQueue:
    """Calls each callback after the same delay, in order."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._timer = DeadlineTimer(self._fire)
        self._due: deque[tuple[float, Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, callback: Callable[[], None]) -> None:
        due_s = monotonic() + self._delay_s
        self._due.append((due_s, callback))
        self._timer.schedule(due_s)

    def stop(self) -> None:
        """Drop all callbacks."""
        self._due.clear()
        self._timer.stop()

    def _fire(self) -> None:
        now_s = monotonic()
        while self._due and self._due[0][0] <= now_s:
            self._due.popleft()[1]()
        if self._due:
            self._timer.schedule(self._due[0][0])
