"""Reads the output of one child in a thread, until the child exits.

llama-server stalls if its pipe is not read (its queue of 512 entries blocks the writers, llama.cpp b11434),
so nothing may stop the reading: not a full disk, not a line of 10 MB, not a busy event loop. The pump keeps
the last lines for the diagnosis, writes a bounded log file, and counts bytes, by which the watchdog
distinguishes a start with progress from one that hangs.

The work is per chunk, not per line: a million lines of 100 bytes cost 0.15 s of one core with the file
(measured by tests/core/system/process/test_output_pump.py), which is 0.25 % of a minute and at most 0.1 ms at
a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import open_private

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 1024
# Lines for the diagnosis (S19), and their longest: 200 × 4 KiB is 0.8 MB at most.
_TAIL_LINES = 200
_LINE_BYTES = 4 * 1024
# Read after the exit, if a grandchild keeps the pipe open and full.
_LAST_BYTES = 2 * 1024 * 1024
_ROTATE_RETRY_S = 1.0
_MAX_BYTES = 10_000_000  # of each file
_FILES = 3


class LogPump:
    """Owns ``fd``, the read end of a child's output, and closes it at the end of the output.

    ``path`` is the log file or None; it and the older ones have at most 30 MB together.
    ``tee`` gets each line, truncated if it is long. The pump's thread calls it, so it must not wait or raise.
    """

    def __init__(
        self,
        fd: int,
        *,
        name: str = "log",
        path: Path | None = None,
        tee: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        self.bytes_seen = 0
        self._fd = fd
        self._file = None if path is None else RotatedFile(path, max_bytes=_MAX_BYTES, files=_FILES)
        self._lock = threading.Lock()  # for tail, partial line and watch: the thread writes, others read
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._partial = b""
        self._watch: _Watch | None = None
        self._tee = tee
        self._ended = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def tail(self) -> tuple[str, ...]:
        """Return the last lines (at most 200), oldest first.

        Invalid UTF-8 is replaced, long lines are truncated.
        """
        with self._lock:
            lines = [*self._tail, self._partial] if self._partial else list(self._tail)
        return tuple(line.rstrip(b"\r").decode("utf-8", "replace") for line in lines[-_TAIL_LINES:])

    def watch(self, pattern: re.Pattern[bytes], callback: Callable[[str], None]) -> None:
        """Call ``callback`` in the running event loop for each matching line, first for the lines of the
        tail.

        Start it right after the spawn, before a flood pushes lines out of the tail. One watch at a time; of
        many matches in one chunk the last 200 are delivered.
        """
        watch = _Watch(pattern, callback, asyncio.get_running_loop())
        with self._lock:
            self._watch = watch
            watch.look([*self._tail, self._partial])

    def close(self, timeout_s: float) -> None:
        """Wait ``timeout_s`` at most for the end of the output, then stop reading. Blocks; see ``aclose``."""
        self._thread.join(timeout_s)
        self._stop()

    async def aclose(self, timeout_s: float) -> None:
        """Do the same as ``close`` without blocking the event loop."""
        await asyncio.to_thread(self.close, timeout_s)

    def _stop(self) -> None:
        with self._lock:
            if not self._ended:
                os.write(self._wake_write, b"x")
        # A disk that hangs may block the thread, which is a daemon and then stays.
        self._thread.join(1.0)

    # --- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._readable():
                chunk = os.read(self._fd, _CHUNK_BYTES)
                if not chunk:
                    return
                self._process(chunk)
            self._drain_rest()
        finally:
            self._end()

    def _readable(self) -> bool:
        """Wait for output (True) or for ``_stop`` (False)."""
        # Where pipes cannot be asked (Windows), the thread ends with the last writer.
        return self._wake_read not in native.readable((self._fd, self._wake_read), None)

    def _drain_rest(self) -> None:
        """Read the content of the pipe without waiting for more."""
        native.set_nonblocking(self._fd)
        last = self.bytes_seen + _LAST_BYTES
        with contextlib.suppress(BlockingIOError):
            while self.bytes_seen < last and (chunk := os.read(self._fd, _CHUNK_BYTES)):
                self._process(chunk)

    def _process(self, chunk: bytes) -> None:
        if self._file is not None:
            self._file.write(chunk)
        lines = chunk.split(b"\n")
        with self._lock:
            self.bytes_seen += len(chunk)
            lines[0] = self._partial + lines[0][:_LINE_BYTES]
            self._partial = lines.pop()[:_LINE_BYTES]
            if self._watch is not None:
                self._watch.look(lines)
            self._tail.extend(line[:_LINE_BYTES] for line in lines[-_TAIL_LINES:])
        if self._tee is not None and lines:
            self._tee([line[:_LINE_BYTES] for line in lines])

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._tee is not None and self._partial:
            self._tee([self._partial])  # a last line without a line feed
        with self._lock:
            self._ended = True
            for fd in (self._fd, self._wake_read, self._wake_write):
                os.close(fd)


class _Watch:
    """Finds matching lines in the thread and passes them to the event loop."""

    def __init__(
        self, pattern: re.Pattern[bytes], callback: Callable[[str], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._pattern = pattern
        self._callback = callback
        self._loop = loop

    def look(self, lines: list[bytes]) -> None:
        found = [line[:_LINE_BYTES] for line in lines if self._pattern.search(line, 0, _LINE_BYTES)]
        if found:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._deliver, found[-_TAIL_LINES:])

    def _deliver(self, lines: list[bytes]) -> None:
        for line in lines:
            self._callback(line.rstrip(b"\r").decode("utf-8", "replace"))


# The system's messages for these are misleading.
_NO_FILES = {errno.ELOOP: "it is a symlink", errno.ENXIO: "it is a pipe or a socket"}


class RotatedFile:
    """A log file with a bound: ``path``, ``path.1`` … ``path.(files - 1)``, each of ``max_bytes`` at most.

    Never raises. The first failure (full disk, folder not writable, a symlink at ``path``) is logged once and
    set as ``error``; chunks are then dropped until ``reopen``. A chunk is written whole or not at all.
    ``holds`` names the content in the log message; None: no message.
    """

    def __init__(
        self, path: Path, *, max_bytes: int, files: int, holds: str | None = "log of llama-server"
    ) -> None:
        self.error: str | None = None
        self._holds = holds
        self._warned = False
        self._path = path
        self._max_bytes = max_bytes
        self._files = files
        self._size = 0
        self._rotate_at_s = 0.0
        self._fd: int | None = None
        self._attempt(self._open)

    def write(self, chunk: bytes) -> None:
        if self._fd is not None:
            self._attempt(lambda: self._write(chunk))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def reopen(self) -> None:
        """Open ``path`` again, after a failure or because the file was moved away."""
        self.close()
        self.error = None
        self._attempt(self._open)

    @property
    def is_in_place(self) -> bool:
        """Whether the open file is still the one at ``path``; logrotate may have moved it away."""
        if self._fd is None:
            return False
        try:
            return os.path.samestat(os.lstat(self._path), os.fstat(self._fd))
        except OSError:
            return False

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            self.error = f"{self._path}: {error.strerror or error}"
            self.close()
            if self._holds is not None and not self._warned:
                self._warned = True
                _log.warning("the %s is no longer written: %s", self._holds, self.error)

    def _write(self, chunk: bytes) -> None:
        if self._size and self._size + len(chunk) > self._max_bytes and monotonic() >= self._rotate_at_s:
            self._rotate()
        left = memoryview(chunk)
        try:
            while left and self._fd is not None:
                written = os.write(self._fd, left)
                self._size += written
                left = left[written:]
        except OSError:
            self._undo_write(len(chunk) - len(left))
            raise

    def _undo_write(self, written: int) -> None:
        """Remove half a line, which would corrupt the next one, unless another process also writes here."""
        if self._fd is not None and written and os.fstat(self._fd).st_size == self._size:
            os.ftruncate(self._fd, self._size - written)

    def _rotate(self) -> None:
        """Never waits for another program that has one of the files open (Windows): the child's output must
        be read. The file then gets longer, and begins again at twice its size.
        """
        self.close()
        is_moved = self._move()
        self._open()
        if not is_moved:
            self._rotate_at_s = monotonic() + _ROTATE_RETRY_S
            if self._fd is not None and self._size > 2 * self._max_bytes:
                os.ftruncate(self._fd, 0)
                self._size = 0

    def _move(self) -> bool:
        """Give the files their next names. False if a program has one of them open."""
        for number in range(self._files - 1, 0, -1):
            newer = self._path if number == 1 else self._numbered(number - 1)
            with contextlib.suppress(FileNotFoundError):
                if not native.replace(newer, self._numbered(number), waits=False):
                    return False
        return True

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _open(self) -> None:
        try:
            fd = self._fd = open_private(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            if (reason := _NO_FILES.get(error.errno or 0)) is None:
                raise
            raise OSError(reason) from error
        status = os.fstat(fd)
        self._size = status.st_size
        if stat.S_IMODE(status.st_mode) != 0o600:
            native.set_mode(fd, 0o600)
