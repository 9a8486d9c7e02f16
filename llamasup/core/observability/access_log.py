"""Writes one line per finished request to ``--access-log``, in its own thread.

The event loop only queues the record. A disk that is full or hangs loses lines, which are counted; requests
never wait for it. ``access_record.py`` formats the line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Final, Generic, TypeVar

from llamasup.core.system.batch_writer import BatchWriter
from llamasup.core.system.native import native
from llamasup.core.system.process.output_pump import RotatedFile
from llamasup.errors import ConfigInvalid

__all__ = ["AccessLog", "check_log_file"]

T = TypeVar("T")

MAX_BYTES: Final = 20_000_000  # some 40,000 lines
FILES: Final = 5  # 100 MB of disk at most
# Records that wait for the disk: 0.5 kB each, and more than one core can serve in a second.
MAX_PENDING: Final = 20_000
# The thread wakes up at most five times a second.
LINGER_S: Final = 0.2
RETRY_S: Final = 5.0  # a disk that was full may have room again
CLOSE_TIMEOUT_S: Final = 1.0
_STDERR: Final = 2
# A write of up to this size to a pipe is atomic (POSIX), so output of other processes comes between lines.
_PIPE_BUF: Final = 4096


def check_log_file(path: Path) -> None:
    """Check that the log can be written to ``path``. Raises ConfigInvalid."""
    file = RotatedFile(path, max_bytes=MAX_BYTES, files=FILES, holds=None)
    file.close()
    if file.error is not None:
        raise ConfigInvalid(
            f"The access log cannot be written to {file.error}.",
            remedy="Choose a file in an existing, writable folder, or - for standard error.",
        )


class AccessLog(Generic[T]):
    """The access log at ``path`` (None: standard error). ``line`` formats a record and its time.

    ``write`` and ``dropped`` are for the event loop's thread. The file has mode 0600, is rotated within
    ``FILES`` times ``max_bytes``, and created again if it was moved away.
    """

    def __init__(
        self, path: Path | None, line: Callable[[T, datetime], bytes], *, max_bytes: int = MAX_BYTES
    ) -> None:
        self._line = line
        self._file = None
        if path is not None:
            self._file = RotatedFile(path, max_bytes=max_bytes, files=FILES, holds="access log")
        self._lost = 0  # counted by the writer thread
        self._retry_at_s = monotonic() + RETRY_S
        self._writer = BatchWriter(
            self._write_lines, name="access-log", linger_s=LINGER_S, max_waiting=MAX_PENDING
        )

    def write(self, record: T) -> None:
        """Queue the record. Never waits."""
        self._writer.put((monotonic(), record))

    def dropped(self) -> int:
        """The number of lines lost so far."""
        return self._writer.rejected + self._writer.lost + self._lost

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the pending records. Blocks for ``timeout_s`` at most."""
        if self._writer.close(timeout_s) and self._file is not None:
            self._file.close()

    # --- in the thread

    def _reopen_if_moved(self) -> None:
        file = self._file
        if file is None or file.is_in_place:
            return
        if file.error is None or monotonic() >= self._retry_at_s:
            self._retry_at_s = monotonic() + RETRY_S
            file.reopen()

    def _write_lines(self, taken: list[tuple[float, T]]) -> bool:
        self._reopen_if_moved()  # after taking: records from after the move belong in the new file
        offset_s = datetime.now(UTC).timestamp() - monotonic()
        lines = [self._line(record, datetime.fromtimestamp(offset_s + at_s, UTC)) for at_s, record in taken]
        if self._file is None:
            self._lost += _write_to_stderr(lines)
            return True
        self._file.write(b"".join(lines))
        if self._file.error is not None:
            self._lost += len(lines)
        return True


def _write_to_stderr(lines: list[bytes]) -> int:
    """Write lines. Returns how many could not be written."""
    unwritten = len(lines)
    for piece, count in _pieces(lines):
        while piece:
            try:
                piece = piece[os.write(_STDERR, piece) :]
            except BlockingIOError:  # the parent made the shared descriptor non-blocking
                native.wait_writable(_STDERR)
            except OSError:
                return unwritten
        unwritten -= count
    return 0


def _pieces(lines: list[bytes]) -> Iterator[tuple[bytes, int]]:
    piece, count = b"", 0
    for line in lines:
        if piece and len(piece) + len(line) > _PIPE_BUF:
            yield piece, count
            piece, count = b"", 0
        piece += line
        count += 1
    if piece:
        yield piece, count
