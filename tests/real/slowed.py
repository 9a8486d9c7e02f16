"""Slows the load of a real llama-server down: it runs only for a few milliseconds at a time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.e2e.driver import PATIENCE_S, children_of

__all__ = ["NOT_MAPPED", "slowed"]

NOT_MAPPED = ("--load-mode", "none")
"""A load that a signal stops at any megabyte. The kernel maps a whole file in one step."""

_READING_BYTES = 24 << 20  # more than the libraries of a Python process
_STARTS_S, _LOADS_S = 0.02, 0.004
_STOPPED_S = 0.3  # long, because on a busy machine it runs for longer at a time than it should


@contextmanager
def slowed(llamasup_pid: int) -> Iterator[threading.Event]:
    """Its next llama-server reads a few megabytes at a time, until the event is set."""
    freed = threading.Event()
    thread = threading.Thread(target=_slow_down, args=(llamasup_pid, freed))
    thread.start()
    try:
        yield freed
    finally:
        freed.set()
        thread.join(PATIENCE_S)


def _slow_down(llamasup_pid: int, freed: threading.Event) -> None:
    child = None
    while child is None and not freed.wait(0.001):
        child = next(_servers(llamasup_pid), None)
    began_s = time.monotonic()
    with suppress(psutil.NoSuchProcess):
        while child is not None and not freed.is_set():
            assert time.monotonic() < began_s + PATIENCE_S
            reads = child.io_counters().read_chars >= _READING_BYTES
            child.send_signal(signal.SIGSTOP)
            freed.wait(_STOPPED_S if reads else 0.0)
            child.send_signal(signal.SIGCONT)
            freed.wait(_LOADS_S if reads else _STARTS_S)


def _servers(llamasup_pid: int) -> Iterator[psutil.Process]:
    for child in children_of(llamasup_pid):
        with suppress(psutil.Error):
            if "--host" in child.cmdline():
                yield child
