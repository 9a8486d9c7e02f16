"""Private folders and files of this user: creates, opens, locks and replaces them.

Folders have mode 0700, files 0600. Files appear under their name only when complete. Symlinks are never
followed (X13).
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

from llamasup.core.system.native import native
from llamasup.errors import FolderUnusable

# The command that writes to the pipe may first ask the user for a password.
PIPE_WAIT_S = 60.0
_GONE_WITHIN_S = 1.0
_GONE_POLL_S = 0.02
# O_NONBLOCK: opening a FIFO would wait for a writer.
_NO_WAIT = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
_OF_FILE_SYSTEMS = {"lost+found"}
_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)


def private_folder(path: Path) -> Path:
    """Make ``path`` a folder that only this user can enter, with the parents it needs.

    Raises FolderUnusable: a file or a symlink is at ``path``, another user owns it, or permission is denied.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise unusable(path, "it is a symlink" if stat.S_ISLNK(status.st_mode) else "it is not a folder")
        if problem := native.make_private(path, status):
            raise unusable(path, problem)
    except OSError as error:
        raise unusable(path, error.strerror or str(error)) from error
    return path


def given_folder(path: Path, own: str) -> Path:
    """Use a folder that the user names. A missing one is made private. An existing one keeps its mode, and
    must be empty, or have the entry ``own``, which shows that llamasup has used it before.

    Raises FolderUnusable.
    """
    if not os.path.lexists(path):
        return private_folder(path)
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or not native.is_own_folder(path, status):
            raise unusable(path, "it is not a folder of this user")
        if native.is_open_to_others(status) and status.st_mode & 0o022:
            raise unusable(path, f"other users can write to it (mode {stat.S_IMODE(status.st_mode):04o})")
        names = {entry.name for entry in path.iterdir()} - _OF_FILE_SYSTEMS
    except OSError as error:
        raise unusable(path, error.strerror or str(error)) from error
    if names and own not in names:
        raise FolderUnusable(
            f"The folder {str(path)!r} cannot be used: it has other files, such as {min(names)!r}.",
            remedy="Choose an empty folder, or one that does not exist.",
        )
    return path


def remove_folder(path: Path) -> None:
    """Remove a folder with its content. Waits 1 s at most for processes that are just ending: on Windows, a
    folder with an open file, or in which a process works, stays. Never raises.
    """
    until = monotonic() + _GONE_WITHIN_S
    while True:
        shutil.rmtree(path, ignore_errors=True)
        if not native.keeps_open_files or not path.exists() or monotonic() > until:
            return
        sleep(_GONE_POLL_S)


def unusable(path: Path, reason: str) -> FolderUnusable:
    remedy = "Make it a folder that only you can access, or remove it."
    if not os.path.lexists(path):
        remedy = "Let this user make it, or set $HOME to a folder that this user can write to."
    return FolderUnusable(f"The folder {str(path)!r} cannot be used: {reason}.", remedy=remedy)


def open_private(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of this user, never through a symlink. ``flags`` may create it (0600).

    Raises OSError; with an errno of None for a file of another type or owner.
    """
    fd = native.open_shared(path, flags | _NO_WAIT | _NO_FOLLOW)
    status = os.fstat(fd)
    if not (stat.S_ISREG(status.st_mode) and native.is_own(status)):
        os.close(fd)
        raise OSError(f"not a regular file of this user (mode {status.st_mode:o}, owner {status.st_uid})")
    return fd


def device_and_inode(path: str | Path, *, follow: bool = False) -> tuple[int, int] | None:
    """Return two numbers that tell whether two paths are the same file. None if ``path`` cannot be read."""
    try:
        status = os.stat(path, follow_symlinks=follow)  # noqa: PTH116 - str or Path
    except OSError:
        return None
    return status.st_dev, status.st_ino


def atomic_write(path: Path, content: bytes, *, durable: bool = False, mode: int = 0o600) -> None:
    """Replace the content of ``path`` in one step: a reader sees the old file or the new one.

    ``durable``: the new file also survives a power cut (fsync of the file and its folder). Raises OSError.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            if mode != 0o600:
                native.set_mode(file.fileno(), mode)  # whatever the umask says
            if durable:
                file.flush()
                os.fsync(file.fileno())
        native.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if durable:
        native.sync_folder(path.parent)


def expanded(path: str | Path) -> Path:
    """Return ``path`` with a home folder in place of its ``~``, or unchanged if there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path raises for "~nobody"


def read_bounded(path: Path, most_bytes: int, *, flags: int = 0) -> tuple[bytes, os.stat_result]:
    """Return at most ``most_bytes`` of a file that the user names, and its status.

    A pipe (``<(command)``) is read to its end, and must be closed within ``PIPE_WAIT_S``; otherwise a named
    pipe without a writer would block the start for ever. ``flags``: more flags for os.open(). Raises OSError.
    """
    flags |= os.O_RDONLY | _NO_WAIT | getattr(os, "O_NOCTTY", 0)
    with os.fdopen(os.open(path, flags), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        wait = None if stat.S_ISREG(status.st_mode) else _pipe_wait(file.fileno())
        content = b""
        while len(content) < most_bytes:
            if wait is not None:
                wait()
            piece = file.read(most_bytes - len(content))
            if not piece:
                break
            content += piece
    return content, status


def _pipe_wait(fd: int) -> Callable[[], None]:
    until = monotonic() + PIPE_WAIT_S

    def wait() -> None:
        if not native.readable([fd], until - monotonic()):
            raise TimeoutError(errno.ETIMEDOUT, f"it is a pipe that was not closed within {PIPE_WAIT_S:g} s")

    return wait


# --- the standard folders ------------------------------------------------------------------------


def state_folder() -> Path:
    """Return the folder for logs and data of later runs.

    It is ``~/.local/state/llamasup``, or systemd's StateDirectory=.
    """
    return _folder("STATE_DIRECTORY", "user_state_path")


def has_state() -> bool:
    """Return whether there is a state folder. Without one, llamasup serves and keeps nothing."""
    try:
        state_folder()
    except FolderUnusable:
        return False
    return True


def cache_folder() -> Path:
    """Return the folder for data that can be computed again.

    It is ``~/.cache/llamasup``, or systemd's CacheDirectory=.
    """
    return _folder("CACHE_DIRECTORY", "user_cache_path")


def models_folder() -> Path:
    """Return the folder for downloaded models, which may not exist yet.

    It is ``~/.local/share/llamasup/models``, or with systemd a folder in StateDirectory=.
    """
    if given := systemd_folder("STATE_DIRECTORY"):
        return given / "models"
    import platformdirs

    return platformdirs.user_data_path("llamasup", appauthor=False) / "models"


def _folder(systemd_variable: str, kind: str) -> Path:
    if given := systemd_folder(systemd_variable):
        return private_folder(given)
    import platformdirs

    try:
        return private_folder(getattr(platformdirs, kind)("llamasup", appauthor=False))
    except RuntimeError:  # no HOME, and no entry of this user
        message = "The home folder of this user is unknown."
    except FolderUnusable as error:
        message = error.message
    names = "LOCALAPPDATA" if os.name == "nt" else f"HOME or XDG_{kind.split('_')[1].upper()}_HOME"
    raise FolderUnusable(message, remedy=f"Set {names} to a folder that only you can access.")


def systemd_folder(variable: str) -> Path | None:
    # systemd.exec(5): set by RuntimeDirectory= and similar settings; several are separated by colons.
    first = os.environ.get(variable, "").partition(":")[0]
    # With DynamicUser= systemd makes a symlink: /var/lib/x -> private/x.
    return Path(first).resolve() if first else None


class Claimed(Exception):
    """Another running process holds this folder or file."""


def claim(folder: Path) -> int | None:
    """Lock ``folder`` for as long as the returned descriptor is open, or until this process dies.

    A lock is exact where a process ID and its start time are not: it ignores clock changes, works across
    containers, and only one of two processes that find an abandoned folder gets it. None where folders
    cannot be locked (Windows, NFS). Raises Claimed if another process holds it, OSError if it is no folder.
    """
    fd = native.open_folder(folder)
    return None if fd is None else _locked(fd, folder)


def claim_file(path: Path) -> int | None:
    """Lock a file as ``claim`` locks a folder. The file stays. Raises OSError if it cannot be created."""
    return _locked(os.open(path, os.O_RDWR | os.O_CREAT | _NO_WAIT | _NO_FOLLOW, 0o600), path)


def _locked(fd: int, path: Path) -> int | None:
    try:
        if native.lock(fd):
            return fd
    except BlockingIOError:
        os.close(fd)
        raise Claimed(str(path)) from None
    os.close(fd)
    return None
