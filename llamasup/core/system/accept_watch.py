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

_LOOK_S = 0.25  # for the end: select() on Windows waits for sockets only


class AcceptWatch:
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
        """Report no more connections. Call it before ``listening`` is closed; a thread ends within 0.25 s."""
        if self._thread is None:
            self._loop.remove_reader(self._listening)
        else:
            self._closed = True
            self._called.set()

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the socket or the loop is closed
            while not self._closed:
                if not select.select([self._listening], [], [], _LOOK_S)[0]:
                    continue
                self._called.clear()
                self._loop.call_soon_threadsafe(self._call)
                self._called.wait()

    def _call(self) -> None:
        try:
            if not self._closed:
                self._callback()
        finally:
            self._called.set()
