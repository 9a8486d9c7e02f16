"""When servers of a pool have crashed, and a wait for the next crash. It imports asyncio for the wait."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Crashes"]

_MOST = 1000  # of the last hour; a loop of crashes ends long before


class Crashes:
    """``times_s``: of the last ones (monotonic)."""

    def __init__(self) -> None:
        self.times_s: deque[float] = deque(maxlen=_MOST)
        self._added = asyncio.Event()

    def add(self, at_s: float) -> None:
        self.times_s.append(at_s)
        self._added.set()
        self._added = asyncio.Event()

    async def another(self) -> None:
        await self._added.wait()
