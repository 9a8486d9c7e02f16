"""Waits for pipes and for connections to be accepted, on every event loop of asyncio.

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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

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
