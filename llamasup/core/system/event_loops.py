"""Adds to the event loops of asyncio: one timer for many deadlines, and waits that Windows lacks.

The loop of Windows (Proactor) cannot wait for the pipes of ``os.pipe``, nor for a socket that listens: there
a thread waits instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Protocol

from llamasup.core.system.native import native

_CHUNK_BYTES = 64 * 1024


@asynccontextmanager
async def pipe_reader(fd: int, limit: int) -> AsyncIterator[asyncio.StreamReader]:
    """Yield the content of ``fd``, and close it. ``limit``: the longest line.

    On Windows ``fd`` is closed when its last writer has ended, and not before.
    """
    reader = asyncio.StreamReader(limit=limit)
    transport: asyncio.BaseTransport
    if native.loop_reads_pipes:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
        )
    else:
        transport = _ReadingThread(fd, reader)
        reader.set_transport(transport)
    try:
        yield reader
    finally:
        transport.close()


class _ReadingThread(asyncio.ReadTransport):
    """Feeds ``reader``, which pauses it while enough is unread."""

    def __init__(self, fd: int, reader: asyncio.StreamReader) -> None:
        super().__init__()
        self._fd = fd
        self._reader = reader
        self._loop = asyncio.get_running_loop()
        self._may_read = threading.Event()
        self._may_read.set()
        self._closed = False
        threading.Thread(target=self._read, name="pipe-reader", daemon=True).start()

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def close(self) -> None:
        """Read and drop what still comes, so that the writer does not block."""
        self._closed = True
        self._may_read.set()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self._fd, _CHUNK_BYTES):
                self._call(self._feed, chunk)
                self._may_read.wait()
        os.close(self._fd)
        self._call(self._reader.feed_eof)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _feed(self, chunk: bytes) -> None:
        if not self._closed:
            self._reader.feed_data(chunk)


# --- listening sockets ----------------------------------------------------------------------------


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


# --- timers ---------------------------------------------------------------------------------------


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


def call_later(delay_s: float, callback: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, callback)


class DeadlineTimer:
    """Fires at the earliest deadline. The callback schedules it again for deadlines to come.

    ``call_later`` and ``clock``: those of the event loop, except in tests.
    """

    __slots__ = ("_at_s", "_call_later", "_callback", "_clock", "_timer")

    def __init__(
        self,
        callback: Callable[[], None],
        *,
        call_later: CallLater = call_later,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._callback = callback
        self._call_later = call_later
        self._clock = clock
        self._timer: Timer | None = None
        self._at_s = 0.0

    def schedule(self, at_s: float) -> None:
        """Fire at ``at_s`` (monotonic) or earlier, if an earlier deadline is scheduled."""
        if self._timer is not None:
            if self._at_s <= at_s:
                return
            self._timer.cancel()
        self._at_s = at_s
        self._timer = self._call_later(max(0.0, at_s - self._clock()), self._fire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._callback()


class DelayQueue:
    """Calls each callback after the same delay, in order."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._timer = DeadlineTimer(self._fire)
        self._due: deque[tuple[float, Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, callback: Callable[[], None]) -> None:
        due_s = monotonic() + self._delay_s
        self._due.append((due_s, callback))
        self._timer.schedule(due_s)

    def stop(self) -> None:
        """Drop all callbacks."""
        self._due.clear()
        self._timer.stop()

    def _fire(self) -> None:
        now_s = monotonic()
        while self._due and self._due[0][0] <= now_s:
            self._due.popleft()[1]()
        if self._due:
            self._timer.schedule(self._due[0][0])
