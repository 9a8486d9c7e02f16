"""The event ``requests``: made once for all event streams, at most once a second, and only if one wants it.

Between two events, nothing is counted but the requests that ended, which is counted in any case. So the cost
depends neither on the rate of the requests nor on the number of streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import msgspec

from llamasup.core.proxy.live.requests import LiveRequests
from llamasup.core.supervision.events import as_object

# Between two events. uvloop's timers can fire 1 ms early, so an event may come a little earlier.
REQUESTS_INTERVAL_S = 1.0
_EARLY = 0.9
# Finished requests. A person cannot read more in a second; `ended_total` shows how many there were.
MAX_ENDED_IN_EVENT = 20
# A request that is older than this gets the token counts of its slot, for which llama-server is asked.
_SETTLED_S = 0.5

_encode = msgspec.json.Encoder().encode


class RequestUpdates:
    """The last event, for all streams. ``clock``: monotonic, in seconds."""

    def __init__(self, requests: LiveRequests, clock: Callable[[], float] = monotonic) -> None:
        self._requests = requests
        self._clock = clock
        self._making = asyncio.Lock()
        self._wakes: set[asyncio.Event] = set()
        self._ended_total = requests.ended_so_far
        self._was_busy = False
        self._looked_s = float("-inf")
        self._made_s = float("-inf")
        self.frame = b""
        """The frame of the last event."""

    @contextmanager
    def watched(self, wake: asyncio.Event) -> Iterator[Watcher]:
        """Watch the events. ``wake`` is set when there is a new one."""
        if not self._wakes:
            self._ended_total = self._requests.ended_so_far
        self._wakes.add(wake)
        try:
            yield Watcher(self)
        finally:
            self._wakes.discard(wake)

    async def refresh(self, *, is_first: bool) -> None:
        """Make the next event, if it is due and there is news. ``is_first``: also without news."""
        async with self._making:
            now_s = self._clock()
            due_s = now_s - _EARLY * REQUESTS_INTERVAL_S
            if self._looked_s > due_s and not (is_first and self._made_s <= due_s):
                return
            self._looked_s = now_s
            live = await self._requests.in_flight(settled_s=_SETTLED_S)
            total = self._requests.ended_so_far
            new, self._ended_total = total - self._ended_total, total
            was_busy, self._was_busy = self._was_busy, bool(live)
            if not (live or new or was_busy or is_first):
                return
            ended = self._requests.last_ended(min(new, MAX_ENDED_IN_EVENT))
            event = as_object("requests", live=live, ended=ended, ended_total=total)
            self.frame = b"data: " + _encode(event) + b"\n\n"
            self._made_s = now_s
            for wake in self._wakes:
                wake.set()


class Watcher:
    """One stream. A slow one misses events; ``ended_total`` shows that."""

    def __init__(self, updates: RequestUpdates) -> None:
        self._updates = updates
        self._seen: bytes | None = None

    async def next(self) -> bytes | None:
        """The next event as a frame of the stream; None: there is no news. The first is sent in any case."""
        await self._updates.refresh(is_first=self._seen is None)
        if self._seen is self._updates.frame:
            return None
        self._seen = self._updates.frame
        return self._seen
