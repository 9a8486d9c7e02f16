"""A file that is being downloaded: ``NAME.part``, and beside it what is needed to go on after any end.

- ``NAME.part`` is locked by the process that writes it; a process that dies lets go by itself.
- ``NAME.part.json`` says which file on which server it will be, and which bytes of it are on the disk: it is
  written after they are (fdatasync), so that a power cut costs seconds of a download and nothing more.
- ``.NAME.origin.json`` is what stays beside the finished file: where it is from, and what it was then.

A ``NAME.part`` with a second hard link is never written to. A new file replaces it, so that the file under
the other name is unchanged.

Methods may be called from several threads; a closed file ignores them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from llamasup.downloads.remote_file import Ranges, RemoteFile, added, checked, prefix, total, why_not_resumed
from llamasup.errors import DiskFull, DownloadFailed, FolderUnusable, LlamasupError
from llamasup.system.storage.folders import atomic_write
from llamasup.system.text import INVALID_JSON, printable

__all__ = [
    "Busy",
    "Origin",
    "PartFile",
    "disk_errors",
    "leftovers_of",
    "origin_of_file",
    "remember_names",
    "remember_origin",
]

_HASH_BYTES = 4 << 20
# Ranges of ten parallel pieces in ten runs are some hundred bytes.
_MAX_SIDECAR_BYTES = 1 << 20
# Signatures differ each time, and nobody asks again with an old one.
_MAX_NAMES = 16


class Busy(Exception):
    """Another process is downloading this very file. ``pid`` is 0 where it cannot be told."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.pid = pid


class Origin(msgspec.Struct, frozen=True):
    """Where a finished file is from; ``size`` and ``mtime_ns`` as it was then. ``names``: what was asked for
    when this was what came (``hub.asked_as``), the last ones.
    """

    url: str
    size: int
    mtime_ns: int
    sha256: str | None = None
    etag: str | None = None
    names: tuple[str, ...] = ()


class _Sidecar(msgspec.Struct):
    pid: int = 0
    size: int | None = None
    sha256: str | None = None
    etag: str | None = None
    done: tuple[tuple[int, int], ...] = ()


_R = TypeVar("_R", Origin, _Sidecar)


class PartFile:
    """The ``.part`` of ``target``, ours alone until it is closed or published.

    Raises Busy while another process has it; DiskFull and FolderUnusable where it cannot be written.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(f"{target.name}.part")
        self._sidecar = _sidecar_path(target)
        self._mutex = threading.Lock()
        self._fd: int | None = None
        self._over = False  # published or discarded: nothing more is to be written beside it
        self.remote = RemoteFile()
        self.done: Ranges = ()
        self.resumed = False
        """Whether some of its bytes are of an earlier run."""
        self.epoch = 0
        """How often it has started over."""
        try:
            with disk_errors(target):
                self._fd = self._opened()
                self._read_sidecar()
        except BaseException:
            self.close()
            raise

    # --- what is here ------------------------------------------------------------------------------

    @property
    def done_bytes(self) -> int:
        return total(self.done)

    @property
    def from_start(self) -> int:
        """Bytes that are here from the very beginning."""
        return prefix(self.done)

    def become(self, remote: RemoteFile) -> str:
        """From now on it is to be ``remote``: what is here stays or goes. Returns why it goes, if it does."""
        why = why_not_resumed(self.remote, remote) if self.done else ""
        if why:
            self.start_over()
        self.remote = remote
        if remote.size is not None:
            self.done = checked(self.done, remote.size)
        self.resumed = self.done_bytes > 0
        return why

    def start_over(self) -> None:
        """Forget what is here."""
        self.done = ()
        self.resumed = False
        self.epoch += 1
        with disk_errors(self.target), self._mutex:
            if self._fd is not None:
                os.ftruncate(self._fd, 0)

    def write(self, offset: int, content: bytes | bytearray) -> None:
        """Put bytes in their place. Raises DiskFull or FolderUnusable."""
        with disk_errors(self.target), self._mutex:
            if self._fd is None:
                return
            view = memoryview(content)
            os.lseek(self._fd, offset, os.SEEK_SET)
            while view:
                view = view[os.write(self._fd, view) :]
        self.done = added(self.done, offset, offset + len(content))

    def hash_into(self, digest: hashlib._Hash, start: int, end: int) -> None:
        """Add what was written from ``start`` to before ``end``. Blocks; for a thread."""
        with disk_errors(self.target), self.path.open("rb", buffering=0) as file:
            file.seek(start)
            while start < end and (chunk := file.read(min(_HASH_BYTES, end - start))):
                digest.update(chunk)
                start += len(chunk)

    # --- what stays --------------------------------------------------------------------------------

    def save(self) -> None:
        """Make what is here survive everything. Blocks for as long as the disk takes."""
        done = self.done
        with self._mutex:
            if self._fd is None:
                return
            duplicate = os.dup(self._fd)  # writing goes on while the disk works
        try:
            with disk_errors(self.target):
                os.fsync(duplicate)
                record = _Sidecar(os.getpid(), self.remote.size, self.remote.sha256, self.remote.etag, done)
                with self._mutex:
                    if not self._over:
                        atomic_write(self._sidecar, msgspec.json.encode(record))
        finally:
            os.close(duplicate)

    def publish(self, url: str) -> None:
        """Give it its name, at once and for good, and let go of it."""
        with self._mutex:
            self._over = True
        with disk_errors(self.target):
            status = self.path.stat()
            remote = self.remote
            remember_origin(
                self.target,
                Origin(url, status.st_size, status.st_mtime_ns, remote.sha256, remote.etag),
            )
            self.path.replace(self.target)
            self._sidecar.unlink(missing_ok=True)
            _sync_folder(self.target.parent)
        self.close()

    def discard(self) -> None:
        """Remove it: it can become nothing."""
        with self._mutex:
            self._over = True
        for path in (self.path, self._sidecar):
            path.unlink(missing_ok=True)
        self.close()

    def keep(self) -> None:
        """Let go of it, so that a later run can go on; an empty one is removed."""
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

    def _opened(self) -> int:
        flags = os.O_RDWR | os.O_CREAT
        for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY", "O_NONBLOCK"):
            flags |= getattr(os, name, 0)
        while True:
            fd = os.open(self.path, flags, 0o666)
            try:
                self._lock(fd)
                # The last process to hold it may have published or removed it in the meantime.
                if _is_file_at(fd, self.path):
                    if os.fstat(fd).st_nlink <= 1:  # some file systems report 0 for every file
                        return fd
                    # Another name shares these bytes: leave them to it, and start over with a new file.
                    self.path.unlink()
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _lock(self, fd: int) -> None:
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(self._recorded().pid) from None
        except OSError:  # a file system without locks: as if there were nobody else
            return

    def _read_sidecar(self) -> None:
        record = self._recorded()
        size = self.path.stat().st_size
        self.remote = RemoteFile(record.size, record.sha256, record.etag)
        self.done = checked(record.done, size)
        if not self.done and size:
            self.start_over()
        # Who has it is told from the beginning.
        atomic_write(
            self._sidecar,
            msgspec.json.encode(_Sidecar(os.getpid(), record.size, record.sha256, record.etag, self.done)),
        )

    def _recorded(self) -> _Sidecar:
        return _record(self._sidecar, _Sidecar) or _Sidecar()


def _is_file_at(fd: int, path: Path) -> bool:
    """Raises FolderUnusable where something else is there."""
    opened = os.fstat(fd)
    if not stat.S_ISREG(opened.st_mode):
        raise FolderUnusable(
            f"{path}: is no file, and a download has to be written there.",
            remedy="Remove what is in its place.",
        )
    try:
        return os.path.samestat(opened, path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _sync_folder(path: Path) -> None:
    if sys.platform == "win32":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- beside a finished file ------------------------------------------------------------------------


def origin_of_file(path: Path) -> Origin | None:
    """Where a finished file is from; None where that is not known, or it is no longer the same file."""
    found = _record(_origin_path(path), Origin)
    if found is None:
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return found if (found.size, found.mtime_ns) == (status.st_size, status.st_mtime_ns) else None


def remember_origin(path: Path, origin: Origin) -> None:
    """Raises OSError."""
    atomic_write(_origin_path(path), msgspec.json.encode(origin), mode=0o644)


def remember_names(path: Path, names: Sequence[str]) -> None:
    """That the file at ``path`` is what ``names`` ask for. Raises what ``disk_errors`` does."""
    origin = origin_of_file(path)
    if origin is None:  # replaced meanwhile: whoever asks next finds out
        return
    others = tuple(each for each in origin.names if each not in names)
    with disk_errors(path):
        remember_origin(path, msgspec.structs.replace(origin, names=(*others, *names)[-_MAX_NAMES:]))


def leftovers_of(path: Path) -> tuple[Path, ...]:
    """The files that llamasup wrote for the file at ``path``: the record of origin, the unfinished download.

    A ``.part`` without llamasup's record belongs to another program, and so does a record in another format.
    """
    origin, part, record = _origin_path(path), path.with_name(f"{path.name}.part"), _sidecar_path(path)
    ours: list[Path] = [origin] if _record(origin, Origin) is not None else []
    sidecar = _record(record, _Sidecar)
    if sidecar is not None and sidecar.pid:  # every version of llamasup has written its process id
        ours += [part, record] if part.is_file() and not part.is_symlink() else [record]
    return tuple(ours)


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
    """Turn what the system says about writing ``path`` into our words."""
    try:
        yield
    except OSError as error:
        said = error.strerror or str(error)
        if error.errno in _NO_ROOM:
            raise DiskFull(
                f"{printable(str(path))}: cannot be written any further: {said}.",
                remedy="Make room there, or choose another folder with --folder; what has come is kept.",
            ) from error
        if isinstance(error, PermissionError) or error.errno in (errno.EROFS, errno.ENOTDIR, errno.ELOOP):
            raise FolderUnusable(
                f"{printable(str(path))}: cannot be written: {said}.",
                remedy="Give a folder that you may write to with --folder.",
            ) from error
        raise DownloadFailed(
            f"{printable(str(path))}: cannot be written: {said}.", remedy="Check the disk that holds it."
        ) from error
