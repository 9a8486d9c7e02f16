"""Records the crashes of each build's servers. It imports asyncio to wait for the next crash."""

from __future__ import annotations

import asyncio
from collections import deque

_MOST = 1000  # a loop of crashes ends long before


class Crashes:
    """The crashes of servers that were ready: a start that fails may fail with every build."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, str]] = deque(maxlen=_MOST)
        self._added = asyncio.Event()

    def count(self, build: str, since_s: float, until_s: float = float("inf")) -> int:
        """The number of crashes of ``build``, as ``ModelSpec.runtime`` names it. Times are monotonic."""
        return sum(since_s <= at_s < until_s for at_s, crashed in self._last if crashed == build)

    def add(self, build: str, at_s: float) -> None:
        self._last.append((at_s, build))
        self._added.set()
        self._added = asyncio.Event()

    async def another(self) -> None:
        await self._added.wait()
