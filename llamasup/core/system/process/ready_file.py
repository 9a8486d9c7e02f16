"""The ready file (``--ready-file``): holds the address of a llamasup while it serves.

Its content is the event ``ready`` (``supervision/events.py``).
"""

from __future__ import annotations

import contextlib
import json
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import atomic_write, device_and_inode
from llamasup.core.system.text import INVALID_JSON, json_text
from llamasup.errors import FolderUnusable, UsageInvalid

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
        status = path.lstat()
        content = _content(path, status.st_mode)
        old = json.loads(content) if content else None
    except FileNotFoundError:
        return
    except (OSError, *INVALID_JSON):
        raise _foreign(path) from None
    if old is not None and not _is_ready(old):
        raise _foreign(path)
    if old is not None and _serves(old):
        raise UsageInvalid(
            f"--ready-file {str(path)!r} belongs to a running llamasup: "
            f"process {old['pid']} at {old['url']}.",
            remedy="Stop it, or choose another file.",
        )
    with contextlib.suppress(OSError):  # writing the new one will report the problem
        native.remove(path)


def remove_left_by(pid: int, path: Path) -> bool:
    """Remove the ready file that the dead process ``pid`` left at ``path``."""
    with contextlib.suppress(OSError, *INVALID_JSON):
        old = json.loads(_content(path, path.lstat().st_mode))
        if _is_ready(old) and old["pid"] == pid:
            native.remove(path)
            return True
    return False


def _content(path: Path, mode: int) -> bytes:
    if not stat.S_ISREG(mode):
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        return file.read(_MAX_BYTES)


def _is_ready(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and content.get("event") == "ready"
        and isinstance(content.get("pid"), int)
        and isinstance(content.get("host"), str)
        and isinstance(content.get("port"), int)
        and isinstance(content.get("url"), str)
    )


def _foreign(path: Path) -> UsageInvalid:
    return UsageInvalid(
        f"--ready-file {str(path)!r} exists and is not a ready file of llamasup.",
        remedy="Choose another file: this one would be overwritten.",
    )


def _serves(old: Mapping[str, Any]) -> bool:
    """Whether its process runs and its port is open; the PID alone may have been reused."""
    if native.start_of(old["pid"]) is None:
        return False
    try:
        socket.create_connection((old["host"], old["port"]), _CONNECT_S).close()
    except (OSError, OverflowError):
        return False
    return True
