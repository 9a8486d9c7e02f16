"""Slows the load of a real llama-server down: it runs only for a few milliseconds at a time.

If this process is paused meanwhile, the load may be over all the same: hence ``retried``.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.e2e.driver import PATIENCE_S, children_of

__all__ = ["LoadedTooSoon", "Slowed", "retried", "slowed"]

_READING_BYTES = 24 << 20  # more than the libraries of a Python process
_STARTS_S, _LOADS_S = 0.02, 0.004
_ATTEMPTS = 5
_STOPPED_S = 0.3  # long, because on a busy machine it runs for longer at a time than it should


class LoadedTooSoon(Exception):
    """This process was paused while the server ran: the load was nearly over before the test saw enough."""


class Slowed(threading.Event):
    """Set: the server runs freely. No more is read of the model while a test has ``stopped``."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = threading.Lock()


@contextmanager
def slowed(llamasup_pid: int) -> Iterator[Slowed]:
    """Its next llama-server reads a few megabytes at a time, until the event is set."""
    freed = Slowed()
    thread = threading.Thread(target=_slow_down, args=(llamasup_pid, freed))
    thread.start()
    try:
        yield freed
    finally:
        freed.set()
        thread.join(PATIENCE_S)


def retried(attempt: Callable[[], None]) -> None:
    """Repeat ``attempt`` if the load was too soon over for it."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(LoadedTooSoon):
            return attempt()
    return attempt()


def _slow_down(llamasup_pid: int, freed: Slowed) -> None:
    child = None
    while child is None and not freed.wait(0.001):
        child = next(_servers(llamasup_pid), None)
    began_s = time.monotonic()
    with suppress(psutil.NoSuchProcess):
        while child is not None and not freed.is_set():
            assert time.monotonic() < began_s + PATIENCE_S
            with freed.stopped:
                child.send_signal(signal.SIGCONT)
                reads = child.io_counters().read_chars >= _READING_BYTES
                freed.wait(_LOADS_S if reads else _STARTS_S)
                child.send_signal(signal.SIGSTOP)
            if reads:
                freed.wait(_STOPPED_S)
    with suppress(psutil.NoSuchProcess):
        if child is not None:
            child.send_signal(signal.SIGCONT)


def _servers(llamasup_pid: int) -> Iterator[psutil.Process]:
    for child in children_of(llamasup_pid):
        with suppress(psutil.Error):
            if "--host" in child.cmdline():
                yield child
