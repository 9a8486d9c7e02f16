"""Waiting in a thread so that Ctrl-C ends it, always.

A signal that comes just before the main thread falls asleep on a lock has run its handler in C and not yet in
Python (CPython 3.11): nobody wakes the thread for it, and the interrupt is seen with the next signal only. On
two busy cores this was so in about one of twenty tries. So the main thread looks up now and then.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["await_event", "nap_s", "result_of"]

T = TypeVar("T")

_NAP_S = 0.2  # nobody notices a Ctrl-C that takes so long, nor what waking up five times a second takes


def nap_s() -> float | None:
    """How long a thread may sleep before it looks up; None: until it is woken."""
    return _NAP_S if threading.current_thread() is threading.main_thread() else None


def await_event(event: threading.Event) -> None:
    limit_s = nap_s()
    while not event.wait(limit_s):
        pass


def result_of(future: Future[T]) -> T:
    limit_s = nap_s()
    while True:
        try:
            return future.result(limit_s)
        except TimeoutError:
            if future.done():  # it is the result, or became one just now
                return future.result()
