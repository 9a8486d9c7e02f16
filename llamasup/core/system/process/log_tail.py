"""The log files of llama-server's output: their names, and how they are read from the end and followed.

Each model of each running llamasup has a file of its own. Two instances of one user may serve a model of
the same name: the first writes ``logs/NAME.log``, the second ``logs/2/NAME.log``. An instance that starts
takes the first free file. ``path`` is the newest file, ``path.1`` the one before
(:mod:`llamasup.core.system.process.output_pump`), and a file that was renamed gets no more lines. Reading
blocks only on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import (
    Claimed,
    claim_file,
    has_state,
    open_private,
    private_folder,
    state_folder,
)
from llamasup.errors import FolderUnusable

# More lines are read from the files directly.
MAX_LINES = 10_000
# Very long lines are not a reason to read gigabytes: earlier lines are skipped.
_MAX_BYTES = 8 << 20
_BLOCK_BYTES = 64 * 1024
_FILES = 3  # as LogPump keeps
LINES_SKIPPED = b"[llamasup: lines are missing here: the log was rotated faster than it was read]\n"


class LogTail:
    """The last ``lines`` lines, and lines to come. May be closed from another thread.

    Raises FileNotFoundError if there is no log yet, OSError if it cannot be read.
    """

    def __init__(self, path: Path, lines: int) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._open: list[int] = []  # descriptors, oldest file first
        for log_path in self._paths_by_age():
            with contextlib.suppress(FileNotFoundError):
                self._open.append(open_private(log_path))
        if not self._open:
            raise FileNotFoundError(str(path))
        self._seek_back(lines)

    def read(self) -> bytes:
        """Return the next bytes, a block at most; empty if there are no more yet."""
        with self._lock:
            while self._open:
                fd = self._open[0]
                # Checked before reading: a renamed file gets no more lines.
                is_last = len(self._open) > 1 or self._was_renamed(fd)
                if os.fstat(fd).st_size < os.lseek(fd, 0, os.SEEK_CUR):
                    os.lseek(fd, 0, os.SEEK_SET)  # the file was truncated
                if chunk := os.read(fd, _BLOCK_BYTES):
                    return chunk
                if not is_last:
                    break
                if self._open_next():
                    return LINES_SKIPPED
            return b""

    def close(self) -> None:
        """Close the files. May be repeated."""
        with self._lock:
            while self._open:
                os.close(self._open.pop())

    def _paths_by_age(self) -> Iterator[Path]:
        """All possible files, oldest first."""
        for number in range(_FILES - 1, 0, -1):
            yield self._path.with_name(f"{self._path.name}.{number}")
        yield self._path

    def _seek_back(self, lines: int) -> None:
        """Seek to the last ``lines`` lines, and close older files."""
        budget, ends = _MAX_BYTES, lines
        for index in range(len(self._open) - 1, -1, -1):
            fd = self._open[index]
            at = size = os.fstat(fd).st_size
            is_newest = index == len(self._open) - 1
            found = lines == 0
            while at > 0 and budget > 0 and not found:
                length = min(_BLOCK_BYTES, at)
                block = native.read_at(fd, length, at - length)
                if is_newest and at == size and block.endswith(b"\n"):
                    ends += 1  # the one that ends the last line
                here = block.count(b"\n")
                at -= length
                budget -= length
                if found := here >= ends:
                    at += _after(block, ends)
                ends -= here
            os.lseek(fd, at, os.SEEK_SET)
            if found or budget <= 0:
                for _ in range(index):
                    os.close(self._open.pop(0))
                return

    def _was_renamed(self, fd: int) -> bool:
        try:
            return not os.path.samestat(self._path.lstat(), os.fstat(fd))
        except FileNotFoundError:
            return False  # in the middle of a rotation, or removed

    def _open_next(self) -> bool:
        """Close the current file and open the next ones. True if files between them are gone."""
        finished = self._open.pop(0)
        try:
            if self._open:
                return False
            ours = os.fstat(finished)
        finally:
            os.close(finished)
        later: list[int] = []
        found = False
        for path in self._paths_by_age():
            with contextlib.suppress(FileNotFoundError):
                fd = open_private(path)
                if os.path.samestat(os.fstat(fd), ours):
                    found = True
                    while later:
                        os.close(later.pop())
                    os.close(fd)
                else:
                    later.append(fd)
        self._open = later
        return not found


def _after(block: bytes, ends: int) -> int:
    """The offset after the ``ends``-th line feed of ``block``, counted from its end."""
    at = len(block)
    for _ in range(ends):
        at = block.rindex(b"\n", 0, at)
    return at + 1


# File names have 255 bytes at most, a letter up to 4 (UTF-8); a digest and numbers follow.
_MAX_LETTERS = 48
# Instances that serve a model of the same name at the same time; each has 30 MB of log.
MAX_LLAMASUPS = 8

_log = logging.getLogger(__name__)


class LogFiles:
    """The log files of one instance, which holds each from the first ``path_of`` until ``close``."""

    def __init__(self) -> None:
        self._paths: dict[str, Path | None] = {}
        self._locks: list[int] = []

    def path_of(self, model: str) -> Path | None:
        """Return the log file of ``model``; None if no file can be used. The model is served in any case.

        Different names have different files: ``a/b`` and ``a_b`` are two models.
        """
        if model not in self._paths:
            try:
                self._paths[model] = self._claimed(_name_of(model))
            except FolderUnusable as error:
                others = "" if has_state() else ", nor the usage and what was measured"
                remedy = f"\n  → {error.remedy}" if error.remedy else ""
                _log.warning("llama-server's output is not kept%s: %s%s", others, error.message, remedy)
                self._paths[model] = None
        return self._paths[model]

    def close(self) -> None:
        """Release the files for other instances. Call it after the last write. May be repeated."""
        self._paths.clear()
        while self._locks:
            os.close(self._locks.pop())

    def _claimed(self, name: str) -> Path | None:
        folder = private_folder(state_folder() / "logs")
        for number in range(1, MAX_LLAMASUPS + 1):
            log_folder = folder if number == 1 else private_folder(folder / str(number))
            try:
                lock = claim_file(log_folder / f"{name}.lock")
            except Claimed:
                continue
            except OSError:  # errors of the log itself are reported when it is written
                lock = None
            if lock is not None:
                self._locks.append(lock)
            return log_folder / f"{name}.log"
        _log.warning(
            "llama-server's output is not kept: %d running llamasup instances already write %s.log",
            MAX_LLAMASUPS,
            name,
        )
        return None


def _name_of(model: str) -> str:
    name = "".join(letter if letter.isalnum() or letter in "._-~" else "_" for letter in model)
    if name != model or len(name) > _MAX_LETTERS:
        digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        name = f"{name[:_MAX_LETTERS]}-{digest}"
    return name
