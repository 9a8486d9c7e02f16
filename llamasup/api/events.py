"""Delivers the events of a server: ``AsyncEvents`` for the loop, ``Events`` for any thread.

Each reader has a bounded queue.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar
from weakref import WeakSet

from llamasup.core.supervision.events import PROTOCOL, PublishedEvent, Stopped, as_json

MAX_WAITING = 1000  # a load has about six events

Event = Mapping[str, Any]


class _Queue:
    """The unread events of one reader. If it is full, the oldest are dropped."""

    def __init__(self) -> None:
        self.over = False
        self._waiting: deque[Event] = deque()
        self._missed = 0

    def put(self, event: Event | None) -> None:
        """Add an event; None ends the iteration."""
        if event is None or self.over:
            self.over = True
            return
        if len(self._waiting) == MAX_WAITING:
            self._waiting.popleft()
            self._missed += 1
        self._waiting.append(event)

    def take(self) -> Event | None:
        if self._missed:
            missed, self._missed = self._missed, 0
            return {"event": "missed", "protocol": PROTOCOL, "count": missed}
        return self._waiting.popleft() if self._waiting else None

    def drop(self) -> None:
        self.over = True
        self._missed = 0
        self._waiting.clear()


class AsyncEvents(AsyncIterator[Event]):
    """All events from its creation until the server has ended. Tasks that read the same object share the
    events. A dropped or closed reader costs nothing.
    """

    def __init__(self) -> None:
        self._queue = _Queue()
        self._arrived = asyncio.Event()

    async def __anext__(self) -> Event:
        while (event := self._queue.take()) is None:
            if self._queue.over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return event

    def close(self) -> None:
        """End the iteration. May be repeated."""
        self._queue.drop()
        self._arrived.set()

    async def aclose(self) -> None:
        """End the iteration, for ``contextlib.aclosing``."""
        self.close()

    def _deliver(self, event: Event | None) -> None:
        """Deliver an event, in the loop's thread; None ends the iteration."""
        self._queue.put(event)
        self._arrived.set()


class Events(Iterator[Event]):
    """All events from its creation until the server has ended; unread ones stay. For any thread."""

    def __init__(self) -> None:
        self._queue = _Queue()
        self._changed = threading.Condition()

    def __next__(self) -> Event:
        with self._changed:
            while (event := self._queue.take()) is None:
                if self._queue.over:
                    raise StopIteration
                self._changed.wait(poll_interval_s())
            return event

    def close(self) -> None:
        """End the iteration. May be repeated."""
        with self._changed:
            self._queue.drop()
            self._changed.notify_all()

    def _deliver(self, event: Event | None) -> None:
        """Deliver an event, in the loop's thread; None ends the iteration."""
        with self._changed:
            self._queue.put(event)
            self._changed.notify_all()


Reader = TypeVar("Reader", AsyncEvents, Events)


class Feed:
    """Delivers events to all readers. ``notice`` and ``end`` are for the loop's thread."""

    def __init__(self) -> None:
        self._readers: WeakSet[AsyncEvents | Events] = WeakSet()
        self._lock = threading.Lock()
        self.ended = False

    def add(self, reader: AsyncEvents | Events) -> bool:
        """Add a reader, from any thread; returns False if the server has ended."""
        with self._lock:
            if not self.ended:
                self._readers.add(reader)
            return not self.ended

    def notice(self, notice: PublishedEvent) -> None:
        event: Event | None = None
        for reader in self._present():
            event = event or as_json(notice)
            reader._deliver(event)
        if isinstance(notice, Stopped):
            self.end()

    def end(self) -> None:
        """May be repeated."""
        with self._lock:
            self.ended = True
        for reader in self._present():
            reader._deliver(None)

    def _present(self) -> list[AsyncEvents | Events]:
        with self._lock:
            return list(self._readers)


T = TypeVar("T")

_POLL_INTERVAL_S = 0.2


def poll_interval_s() -> float | None:
    """The longest wait of this thread; None: no limit."""
    return _POLL_INTERVAL_S if threading.current_thread() is threading.main_thread() else None


def await_event(event: threading.Event) -> None:
    limit_s = poll_interval_s()
    while not event.wait(limit_s):
        pass


def result_of(future: Future[T]) -> T:
    limit_s = poll_interval_s()
    while True:
        try:
            return future.result(limit_s)
        except TimeoutError:
            if future.done():  # the result itself is a TimeoutError, or has just arrived
                return future.result()
