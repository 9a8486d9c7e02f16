"""Waits in a thread that Ctrl-C always ends.

If a signal arrives just before the main thread blocks on a lock, its Python handler does not run until the
next signal (CPython 3.11). On two busy cores that happened in about one of twenty tries, so the main thread
polls.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TypeVar

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
