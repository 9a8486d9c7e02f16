"""Reports connections that wait to be accepted, on every event loop of asyncio.

A loop with ``add_reader`` does it itself. The one of Windows (Proactor) has none: a thread waits instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
from collections.abc import Callable

__all__ = ["Incoming"]

_WAKE_S = 1.0


class Incoming:
    """Calls ``callback`` in the running loop while a connection waits on ``listening``, until ``close``."""

    def __init__(self, listening: socket.socket, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._thread: threading.Thread | None = None
        try:
            self._loop.add_reader(listening, callback)
        except NotImplementedError:
            self._callback = callback
            self._closed = False
            self._called = threading.Event()
            self._thread = threading.Thread(target=self._watch, name="incoming", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Report no more connections. Call it before ``listening`` is closed."""
        if self._thread is None:
            self._loop.remove_reader(self._listening)
        elif not self._closed:
            self._closed = True
            self._called.set()
            with contextlib.suppress(OSError):  # a connection ends the thread's wait
                socket.create_connection(_address_of(self._listening), _WAKE_S).close()

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the socket or the loop is closed
            while not self._closed:
                select.select([self._listening], [], [])
                self._called.clear()
                self._loop.call_soon_threadsafe(self._call)
                self._called.wait()

    def _call(self) -> None:
        if not self._closed:
            self._callback()
        self._called.set()


def _address_of(listening: socket.socket) -> tuple[str, int]:
    host, port = listening.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port  # noqa: S104 - compared, not bound
