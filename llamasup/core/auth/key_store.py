"""Changes a key file: one writer at a time, atomically, without losing lines of others."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from llamasup.core.auth.key_source import read_text
from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import atomic_write, private_folder
from llamasup.errors import ConfigInvalid, FolderUnusable

# A command holds the lock for milliseconds.
_LOCK_TIMEOUT_S = 10.0
_LOCK_POLL_INTERVAL_S = 0.02


def default_key_file() -> Path:
    """Return ``~/.config/llamasup/keys``, or the equivalent of the platform."""
    import platformdirs

    return platformdirs.user_config_path("llamasup", appauthor=False) / "keys"


def key_file_text(path: Path) -> str | None:
    """Read the text of the file. None: it is missing. Raises ConfigInvalid."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    except OSError:
        pass  # reading it reports the reason
    else:
        if not stat.S_ISREG(status.st_mode):
            what = "is a symlink" if stat.S_ISLNK(status.st_mode) else "is not a regular file"
            raise ConfigInvalid(
                f"The API key file {str(path)!r} {what}.", remedy="Give the path of the file itself."
            )
    return read_text(path, follow=False)[0]


def change_key_file(path: Path, change: Callable[[str | None], str]) -> None:
    """Replace the text of the file (None: it is missing) with the result of ``change``.

    A new file has mode 0600; an existing one keeps its mode and its owner. If ``change`` raises, the file is
    unchanged. Raises ConfigInvalid and FolderUnusable.
    """
    with _locked(_folder_of(path)):
        text = change(key_file_text(path))
        try:
            before = path.stat() if path.exists() else None
            mode = 0o600 if before is None else stat.S_IMODE(before.st_mode)
            atomic_write(path, text.encode(), durable=True, mode=mode)
            if before is not None:
                native.give_back(path, before)
        except OSError as error:
            raise _unwritable(path, error.strerror or str(error)) from error


def _folder_of(path: Path) -> Path:
    folder = path.parent
    if path == default_key_file():
        try:
            return private_folder(folder)
        except FolderUnusable as error:
            raise FolderUnusable(error.message, remedy=f"{error.remedy} Or give another --file.") from None
    if not folder.is_dir():
        raise _unwritable(path, "the folder does not exist")
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other commands out by a lock on the folder; it needs no lock file and ends with the process."""
    try:
        fd = native.open_folder(folder.resolve())  # the folder may be a symlink, the file may not
    except OSError as error:
        raise _unwritable(folder, error.strerror or str(error)) from error
    if fd is None:  # Windows: two commands at the same moment are rare, and each replaces the whole file
        yield
        return
    try:
        deadline = monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                native.lock(fd)
                break
            except BlockingIOError:
                if monotonic() > deadline:
                    raise _unwritable(
                        folder, f"another program has held its lock for {_LOCK_TIMEOUT_S:g} s"
                    ) from None
                sleep(_LOCK_POLL_INTERVAL_S)
        yield
    finally:
        os.close(fd)


def _unwritable(path: Path, reason: str) -> FolderUnusable:
    return FolderUnusable(
        f"{str(path)!r} cannot be written: {reason}.",
        remedy="Give the path of a file in a folder that you may write to.",
    )
