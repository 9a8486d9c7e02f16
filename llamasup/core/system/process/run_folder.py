"""The run folder of one llamasup process: its sockets and the records of its children. And its ready file.

The ready file (``--ready-file``) holds the address of a llamasup while it serves. Its content is the event
``ready`` (``supervision/events.py``).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct

from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import (
    Claimed,
    atomic_write,
    claim,
    device_and_inode,
    private_folder,
    remove_folder,
    systemd_folder,
)
from llamasup.core.system.text import INVALID_JSON, json_text
from llamasup.errors import FolderUnusable, NothingWritable, UsageInvalid

# The longest name of a socket in the run folder, such as `child-3-12.sock`.
LONGEST_SOCKET_NAME = 24
# The file in the run folder with the start time of the process that made it.
OWNER = "owner"
# A file in the run folder of a process that serves nothing, and so has no control API.
NO_CONTROL = "no-control"


class RunFolder:
    """A new private folder for this run, removed with its content. Its path is short, for sockets.

    ``lock`` is the descriptor that holds the lock of the run (``claim``); None if folders cannot be locked.
    """

    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self._lock = lock
        self._pid = os.getpid()
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the folder. May be repeated."""
        atexit.unregister(self.close)
        if os.getpid() == self._pid:  # a forked copy of this process leaves it alone
            remove_folder(self.path)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_folder() -> RunFolder:
    """Create the folder of this run, in the first private folder that is short enough for a socket's path.

    Tried are ``$RUNTIME_DIRECTORY`` (systemd), ``$XDG_RUNTIME_DIR/llamasup``, the platform's runtime folder,
    ``/tmp/llamasup-UID``, and last an unguessable folder in ``/tmp``. Raises NothingWritable if all fail.
    """
    prefix = f"{os.getpid()}-"
    for base in _run_bases():
        if native.has_unix_sockets and _is_too_long(base / f"{prefix}12345678"):
            continue
        with contextlib.suppress(FolderUnusable, OSError):
            return _create(prefix, private_folder(base))
    try:
        last = _create(f"llamasup-{prefix}", _short_temporary_folder())
    except OSError as error:
        raise _nothing_writable(error.strerror or str(error)) from error
    try:
        private_folder(last.path)  # Windows: what it inherits from the temporary folder may be open to others
    except FolderUnusable:
        last.close()
        raise
    return last


def _create(prefix: str, base: Path) -> RunFolder:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        # Until it is claimed it looks stale, and another process may sweep it.
        with contextlib.suppress(Claimed, FileNotFoundError):
            lock = claim(path)
            if path.exists():
                with contextlib.suppress(OSError):  # a full disk: the lock is enough
                    (path / OWNER).write_text(native.start_of(os.getpid()) or "")
                return RunFolder(path, lock)
            if lock is not None:
                os.close(lock)


def private_runtime_folder() -> Path:
    """Return a folder for files that need no longer life than the login. Raises NothingWritable."""
    for base in _run_bases():
        with contextlib.suppress(FolderUnusable):
            if os.access(private_folder(base), os.W_OK):
                return base
    raise _nothing_writable("it is not this user's, or not writable")


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """Yield a folder for the time of a ``with`` block, in which a program can be asked for its options. The
    root folder if no folder is writable.

    It is a run folder without a control API, so that a sweep removes it if this process is killed. The
    temporary folder of Python is /tmp, which a container with a read-only root may not have.
    """
    try:
        base = private_runtime_folder()
    except NothingWritable:
        yield os.sep
        return
    with _create(f"{os.getpid()}-", base) as folder:
        with contextlib.suppress(OSError):  # a full disk
            (folder.path / NO_CONTROL).touch()
        yield str(folder.path)


def _nothing_writable(reason: str) -> NothingWritable:
    return NothingWritable(
        f"llamasup needs a folder for its sockets, and cannot use {_short_temporary_folder()}: {reason}.",
        remedy="Set TMPDIR or XDG_RUNTIME_DIR to a folder that this user can write to; "
        "in a container, mount a tmpfs.",
    )


def run_folders() -> Iterator[tuple[Path, int]]:
    """Return every run folder of this user, with the PID of the process that made it."""
    temporary = _short_temporary_folder()
    bases = dict.fromkeys((*_run_bases(), *native.login_folders()))
    for base, pattern in (*((base, r"(\d+)-.+") for base in bases), (temporary, r"llamasup-(\d+)-.+")):
        try:
            entries = sorted(base.iterdir())
        except OSError:  # missing, or not readable for this user
            continue
        for entry in entries:
            named = re.fullmatch(pattern, entry.name)
            if named and _is_own_folder(entry):
                yield entry, int(named[1])


def _is_own_folder(path: Path) -> bool:
    try:
        status = path.lstat()
        return stat.S_ISDIR(status.st_mode) and native.is_own_folder(path, status)
    except OSError:
        return False


def _is_too_long(folder: Path) -> bool:
    return len(os.fsencode(folder)) + 1 + LONGEST_SOCKET_NAME > native.socket_path_bytes


def _run_bases() -> Iterator[Path]:
    if given := systemd_folder("RUNTIME_DIRECTORY"):
        yield given
    if given_by_login := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(given_by_login) / "llamasup"
    yield from native.runtime_folders()
    yield _short_temporary_folder() / f"llamasup-{native.user()}"


def _short_temporary_folder() -> Path:
    """``$TMPDIR``, or /tmp if that is too long for the paths of sockets (on macOS it has 50 bytes)."""
    *preferred, last = native.temporary_folders()
    for folder in preferred:
        if not _is_too_long(folder / f"llamasup-{native.user()}/{os.getpid()}-12345678"):
            return folder
    return last


# --- the ready file -------------------------------------------------------------------------------


_CONNECT_S = 0.5
_MAX_BYTES = 65_536


class ReadyFile:
    """One run's ready file: written when requests are served, removed at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._written: tuple[int, int] | None = None

    def write(self, ready: Mapping[str, object]) -> None:
        """Write one JSON object and a line feed, atomically. Raises FolderUnusable."""
        try:
            atomic_write(self.path, json_text(ready).encode() + b"\n")
        except OSError as error:
            raise FolderUnusable(
                f"The folder {str(self.path.parent)!r} cannot be used: {error.strerror or error}.",
                remedy="Make the folder writable, or choose another file.",
            ) from error
        self._written = device_and_inode(self.path)

    def remove(self) -> None:
        """Remove it, unless another run has replaced it."""
        written, self._written = self._written, None
        if written is not None and device_and_inode(self.path) == written:
            with contextlib.suppress(OSError):
                native.remove(self.path)


def remove_stale(path: Path) -> None:
    """Before the start: remove the ready file of a run that has ended.

    Raises UsageInvalid if that run still serves, if the file is not a ready file, or if its folder is
    missing.
    """
    if not path.absolute().parent.is_dir():
        raise UsageInvalid(
            f"The folder of --ready-file {str(path)!r} does not exist.",
            remedy="Create the folder, or choose another file.",
        )
    try:
        old = _content(path)
    except FileNotFoundError:
        return
    except (OSError, *INVALID_JSON):
        raise UsageInvalid(
            f"--ready-file {str(path)!r} exists and is not a ready file of llamasup.",
            remedy="Choose another file: this one would be overwritten.",
        ) from None
    if old is not None and _serves(old):
        raise UsageInvalid(
            f"--ready-file {str(path)!r} belongs to a running llamasup: process {old.pid} at {old.url}.",
            remedy="Stop it, or choose another file.",
        )
    with contextlib.suppress(OSError):  # writing the new one will report the problem
        native.remove(path)


def remove_left_by(pid: int, path: Path) -> bool:
    """Remove the ready file that the dead process ``pid`` left at ``path``."""
    with contextlib.suppress(OSError, *INVALID_JSON):
        old = _content(path)
        if old is not None and old.pid == pid:
            native.remove(path)
            return True
    return False


class _Ready(Struct, tag_field="event", tag="ready"):
    pid: int
    host: str
    port: int
    url: str


def _content(path: Path) -> _Ready | None:
    """The content of a ready file; None if it is empty."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES)
    return msgspec.json.decode(content, type=_Ready) if content else None


def _serves(old: _Ready) -> bool:
    """Whether its process runs and its port is open; the PID alone may have been reused."""
    if native.start_of(old.pid) is None:
        return False
    try:
        socket.create_connection((old.host, old.port), _CONNECT_S).close()
    except (OSError, OverflowError):
        return False
    return True
