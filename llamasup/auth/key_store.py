"""Changes a file of API keys: one writer at a time, the whole file or nothing, everybody's lines kept."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

from llamasup.auth.key_source import read_text
from llamasup.errors import ConfigInvalid, FolderUnusable
from llamasup.system.storage.folders import atomic_write, private_folder

__all__ = ["change_key_file", "default_key_file", "key_file_text"]

# Another command holds the lock for milliseconds; who holds it longer is no command of ours.
_LOCK_S = 10.0
_LOCK_POLL_S = 0.02


def default_key_file() -> Path:
    """``~/.config/llamasup/keys``, or where the platform has such files."""
    import platformdirs

    return platformdirs.user_config_path("llamasup", appauthor=False) / "keys"


def key_file_text(path: Path) -> str | None:
    """What the file says; None if it is not there. Raises ConfigInvalid."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    except OSError:
        pass  # reading it says why
    else:
        if not stat.S_ISREG(status.st_mode):
            what = "is a symlink" if stat.S_ISLNK(status.st_mode) else "is no file"
            raise ConfigInvalid(
                f"The API key file {str(path)!r} {what}.", remedy="Give the path of the file itself."
            )
    return read_text(path, follow=False)[0]


def change_key_file(path: Path, change: Callable[[str | None], str]) -> None:
    """Give the file the text that ``change`` makes of its own (None: there is none).

    A new file is 0600; one that was there keeps its mode and its owner. Whatever ``change`` raises leaves the
    file as it was. Raises ConfigInvalid and FolderUnusable.
    """
    with _locked(_folder_of(path)):
        text = change(key_file_text(path))
        try:
            before = path.stat() if path.exists() else None
            mode = 0o600 if before is None else stat.S_IMODE(before.st_mode)
            atomic_write(path, text.encode(), durable=True, mode=mode)
            if before is not None and sys.platform != "win32":
                after = path.stat()
                if (after.st_uid, after.st_gid) != (before.st_uid, before.st_gid):
                    with suppress(PermissionError):  # only root can give a file away
                        os.chown(path, before.st_uid, before.st_gid)
        except OSError as error:
            raise _unwritable(path, error.strerror or str(error)) from error


def _folder_of(path: Path) -> Path:
    folder = path.parent
    if path == default_key_file():
        return private_folder(folder)
    if not folder.is_dir():
        raise _unwritable(path, "there is no such folder")
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other commands out, by a lock on the folder: it leaves no file behind, and ends with us."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unwritable(folder, error.strerror or str(error)) from error
    try:
        deadline = monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if monotonic() > deadline:
                    raise _unwritable(folder, f"another program has locked it for {_LOCK_S:g} s") from None
                sleep(_LOCK_POLL_S)
            except OSError:
                break  # a file system without locks
        yield
    finally:
        os.close(fd)


def _unwritable(path: Path, reason: str) -> FolderUnusable:
    return FolderUnusable(
        f"{str(path)!r} cannot be written: {reason}.",
        remedy="Give the path of a file in a folder that you may write to.",
    )
