"""An unfinished download, ``NAME.part``, with the records that let a later run continue it.

- ``NAME.part`` is locked by the process that writes it; the lock ends with the process.
- ``NAME.part.json`` records the remote file and the bytes on the disk. It is written after them (fdatasync),
  so a power cut costs only seconds of a download.
- ``.NAME.origin.json`` stays with the finished file and records its source, size and time.

A ``NAME.part`` with a second hard link is replaced by a new file, so that the other name keeps its content.

Methods may be called from several threads; a closed file ignores them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from llamasup.core.hub.remote_file import Ranges, RemoteFile, added, checked, prefix, total, why_not_resumed
from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import atomic_write
from llamasup.core.system.text import INVALID_JSON, printable
from llamasup.errors import DiskFull, DownloadFailed, FolderUnusable, LlamasupError

_HASH_BYTES = 4 << 20
# The ranges of ten parallel pieces in ten runs take some hundred bytes.
_MAX_SIDECAR_BYTES = 1 << 20
# Each signed URL is a new name; old ones are never used again.
_MAX_NAMES = 16


class Busy(Exception):
    """Another process is downloading this file. ``pid`` is 0 if unknown."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.pid = pid


class Origin(msgspec.Struct, frozen=True):
    """The source of a finished file, and its ``size`` and ``mtime_ns`` then. ``names``: the latest references
    that were resolved to this file (``reference.names_of``).
    """

    url: str
    size: int
    mtime_ns: int
    sha256: str | None = None
    etag: str | None = None
    names: tuple[str, ...] = ()


class _Sidecar(RemoteFile, frozen=True):
    pid: int = 0
    done: Ranges = ()


_R = TypeVar("_R", Origin, _Sidecar)


class PartFile:
    """The ``.part`` of ``target``, locked until it is closed or published.

    Raises Busy while another process has the lock; DiskFull and FolderUnusable if it cannot be written.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(f"{target.name}.part")
        self._sidecar = _sidecar_path(target)
        self._mutex = threading.Lock()
        self._fd: int | None = None
        self._finished = False  # published or discarded: no more records are written
        self.remote = RemoteFile()
        self.done: Ranges = ()
        self.resumed = False
        """Whether some bytes are from an earlier run."""
        self.epoch = 0
        """The number of times that the download started over."""
        try:
            with disk_errors(target):
                self._fd = self._open_part()
                self._read_sidecar()
        except BaseException:
            self.close()
            raise

    # --- the bytes ---------------------------------------------------------------------------------

    @property
    def done_bytes(self) -> int:
        return total(self.done)

    @property
    def prefix_bytes(self) -> int:
        """The number of bytes without a gap from the start of the file."""
        return prefix(self.done)

    def resume_as(self, remote: RemoteFile) -> str:
        """Set the expected file. Bytes of another file are dropped; returns the reason, or ""."""
        why = why_not_resumed(self.remote, remote) if self.done else ""
        if why:
            self.start_over()
        self.remote = remote
        if remote.size is not None:
            self.done = checked(self.done, remote.size)
        self.resumed = self.done_bytes > 0
        return why

    def start_over(self) -> None:
        """Drop all bytes."""
        self.done = ()
        self.resumed = False
        self.epoch += 1
        with disk_errors(self.target), self._mutex:
            if self._fd is not None:
                os.ftruncate(self._fd, 0)

    def write(self, offset: int, content: bytes | bytearray) -> None:
        """Write bytes at ``offset``. Raises DiskFull or FolderUnusable."""
        with disk_errors(self.target), self._mutex:
            if self._fd is None:
                return
            view = memoryview(content)
            os.lseek(self._fd, offset, os.SEEK_SET)
            while view:
                view = view[os.write(self._fd, view) :]
        self.done = added(self.done, offset, offset + len(content))

    def hash_into(self, digest: hashlib._Hash, start: int, end: int) -> None:
        """Hash the bytes from ``start`` to before ``end``. Blocks; for a thread."""
        with disk_errors(self.target), self.path.open("rb", buffering=0) as file:
            file.seek(start)
            while start < end and (chunk := file.read(min(_HASH_BYTES, end - start))):
                digest.update(chunk)
                start += len(chunk)

    # --- record and end ----------------------------------------------------------------------------

    def save(self) -> None:
        """Sync the bytes and their record to the disk. Blocks."""
        done = self.done
        with self._mutex:
            if self._fd is None:
                return
            duplicate = os.dup(self._fd)  # so that writes continue during the sync
        try:
            with disk_errors(self.target):
                os.fsync(duplicate)
                record = _Sidecar(self.remote.size, self.remote.sha256, self.remote.etag, os.getpid(), done)
                with self._mutex:
                    if not self._finished:
                        atomic_write(self._sidecar, msgspec.json.encode(record))
        finally:
            os.close(duplicate)

    def publish(self, url: str) -> None:
        """Give the file its final name, synced to the disk, and close it."""
        with self._mutex:
            self._finished = True
        with disk_errors(self.target):
            status = self.path.stat()
            remote = self.remote
            write_origin(
                self.target,
                Origin(url, status.st_size, status.st_mtime_ns, remote.sha256, remote.etag),
            )
            native.replace(self.path, self.target)
            _remove(self._sidecar)
            native.sync_folder(self.target.parent)
        self.close()

    def discard(self) -> None:
        """Delete the part file and its record."""
        with self._mutex:
            self._finished = True
        for path in (self.path, self._sidecar):
            _remove(path)
        self.close()

    def keep(self) -> None:
        """Save and close the file for a later run; an empty one is deleted."""
        if not self.done:
            self.discard()
            return
        with contextlib.suppress(LlamasupError):
            self.save()
        self.close()

    def close(self) -> None:
        with self._mutex:
            fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    # --- opening -----------------------------------------------------------------------------------

    def _open_part(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
        while True:
            fd = native.open_shared(self.path, flags, 0o666)
            try:
                self._lock(fd)
                # The previous owner may have published or deleted it meanwhile.
                if _is_file_at(fd, self.path):
                    if os.fstat(fd).st_nlink <= 1:  # some file systems report 0 for every file
                        return fd
                    # Another name shares these bytes: start over with a new file.
                    native.remove(self.path)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _lock(self, fd: int) -> None:
        try:
            native.lock(fd)
        except BlockingIOError:
            raise Busy(self._recorded().pid) from None

    def _read_sidecar(self) -> None:
        record = self._recorded()
        size = self.path.stat().st_size
        self.remote = RemoteFile(record.size, record.sha256, record.etag)
        self.done = checked(record.done, size)
        if not self.done and size:
            self.start_over()
        # Other processes read the pid from the record.
        record = msgspec.structs.replace(record, pid=os.getpid(), done=self.done)
        atomic_write(self._sidecar, msgspec.json.encode(record))

    def _recorded(self) -> _Sidecar:
        return _record(self._sidecar, _Sidecar) or _Sidecar()


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        native.remove(path)


def _is_file_at(fd: int, path: Path) -> bool:
    """Return whether a file is at the path. Raises FolderUnusable if it is not a regular file."""
    opened = os.fstat(fd)
    if not stat.S_ISREG(opened.st_mode):
        raise FolderUnusable(
            f"{path} is not a regular file, so the download cannot be written.",
            remedy="Remove it.",
        )
    try:
        return os.path.samestat(opened, path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


# --- records of finished files ---------------------------------------------------------------------


def origin_of_file(path: Path) -> Origin | None:
    """Return the origin of a finished file; None if it is unknown or the file has changed since."""
    found = _record(_origin_path(path), Origin)
    if found is None:
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return found if (found.size, found.mtime_ns) == (status.st_size, status.st_mtime_ns) else None


def write_origin(path: Path, origin: Origin) -> None:
    """Write the record of origin. Raises OSError."""
    atomic_write(_origin_path(path), msgspec.json.encode(origin), mode=0o644)


def add_names(path: Path, names: Sequence[str]) -> None:
    """Record that ``names`` refer to the file at ``path``. Raises the errors of ``disk_errors``."""
    origin = origin_of_file(path)
    if origin is None:  # replaced meanwhile
        return
    others = tuple(name for name in origin.names if name not in names)
    with disk_errors(path):
        write_origin(path, msgspec.structs.replace(origin, names=(*others, *names)[-_MAX_NAMES:]))


def leftovers_of(path: Path) -> tuple[Path, ...]:
    """Return the files that llamasup wrote for ``path``: the record of origin, the unfinished download.

    A ``.part`` without llamasup's record belongs to another program, and so does a record in another format.
    """
    origin, part, record = _origin_path(path), path.with_name(f"{path.name}.part"), _sidecar_path(path)
    files: list[Path] = [origin] if _record(origin, Origin) is not None else []
    sidecar = _record(record, _Sidecar)
    if sidecar is not None and sidecar.pid:  # all versions of llamasup write their process id
        files += [part, record] if part.is_file() and not part.is_symlink() else [record]
    return tuple(files)


def _record(path: Path, kind: type[_R]) -> _R | None:
    """The record at ``path``; None if it is missing or unreadable."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_SIDECAR_BYTES), type=kind)
    except (OSError, *INVALID_JSON):
        return None


def _origin_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.origin.json")


def _sidecar_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.part.json")


# --- errors ----------------------------------------------------------------------------------------

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the system about writing ``path`` into errors of llamasup."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _NO_ROOM:
            raise DiskFull(
                f"{printable(str(path))} cannot be written: {reason}.",
                remedy="Free disk space, then the same command continues the download; or choose another "
                "folder with --folder.",
            ) from error
        if isinstance(error, PermissionError) or error.errno in (errno.EROFS, errno.ENOTDIR, errno.ELOOP):
            raise FolderUnusable(
                f"{printable(str(path))} cannot be written: {reason}.",
                remedy="Give a folder that you may write to with --folder.",
            ) from error
        raise DownloadFailed(
            f"{printable(str(path))} cannot be written: {reason}.", remedy="Check the disk."
        ) from error
