"""What a llamasup left that ended without cleaning up: it was killed, or the machine lost power.

``leftovers`` looks, ``sweep`` removes: children that still run, the run folder with its sockets, the ready
file, half-written files. Only what belongs to this user and to a run that is certainly over: see ``claim`` in
files.py for the run, ``belongings.py`` for its processes.

``python -m llamasup.system.process.sweep FOLDER`` sweeps one folder: what the guardian does
(``guardian.py``).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from llamasup.errors import FolderUnusable
from llamasup.system.process import ready_file
from llamasup.system.process.exit import LeftFolder
from llamasup.system.process.identity import start_of
from llamasup.system.process.ownership import OwnedProcess, end_all_of
from llamasup.system.process.run_folder import OWNER, run_folders
from llamasup.system.storage.folders import Claimed, cache_folder, claim, state_folder

__all__ = ["Swept", "leftovers", "record_ready_file", "sweep"]

_CONNECT_S = 0.2
_READY_FILE = "ready-file"
_PART = re.compile(r"\..+\.(\d+)-[0-9a-f]{8}\.part")
# A file is written in milliseconds. Its process may be of another container, where numbers say nothing.
_PART_IS_OLD_S = 60.0


@dataclass(frozen=True, slots=True)
class Swept:
    """What was removed of one run."""

    folder: Path
    pid: int
    ended: tuple[OwnedProcess, ...] = ()
    ready_file: Path | None = None

    def __str__(self) -> str:
        processes = [
            f"process {each.pid} ({each.executable or 'one of its descendants'})" for each in self.ended
        ]
        ready_file = [] if self.ready_file is None else [str(self.ready_file)]
        what = ", ".join([str(self.folder), *ready_file, *processes])
        return f"Removed what a llamasup that was killed (process {self.pid}) had left: {what}."


# --- looking -------------------------------------------------------------------------------------


def leftovers() -> tuple[LeftFolder, ...]:
    """The run folders of processes that have ended, with the sockets in them that something listens on."""
    left = []
    for folder, pid in run_folders():
        with _taken(folder, pid) as taken:
            if taken:
                left.append(LeftFolder(str(folder), pid, tuple(map(str, _answering(folder)))))
    return tuple(left)


@contextmanager
def _taken(folder: Path, pid: int) -> Iterator[bool]:
    """Whether its run is over. Until the end of the block nobody else can take it."""
    try:
        lock = claim(folder)
    except (Claimed, OSError):
        yield False
        return
    try:
        yield folder.exists() and not _owner_lives(folder, pid)
    finally:
        if lock is not None:
            os.close(lock)


def _owner_lives(folder: Path, pid: int) -> bool:
    """Where there are no locks; and of a folder that a cleaner took away and its run has made again."""
    start = start_of(pid)
    try:
        return start is not None and (folder / OWNER).read_text() in ("", start)
    except OSError:
        return start is not None


def _answering(folder: Path) -> list[Path]:
    if sys.platform == "win32":
        return []
    try:
        return [path for path in sorted(folder.iterdir()) if _answers(path)]
    except OSError:
        return []


def _answers(path: Path) -> bool:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


# --- removing ------------------------------------------------------------------------------------


def record_ready_file(folder: Path, path: Path) -> None:
    """Write into the run folder where the ready file is, for whoever has to remove it."""
    with contextlib.suppress(OSError):
        (folder / _READY_FILE).write_bytes(os.fsencode(path))


def sweep(only: Path | None = None) -> tuple[Swept, ...]:
    """Remove what runs left that are over; with ``only``, that run's. Never raises: nobody waits for it."""
    swept = [
        each
        for folder, pid in run_folders()
        if only in (None, folder) and (each := _swept(folder, pid)) is not None
    ]
    if only is None:
        _sweep_parts()
    return tuple(swept)


def _swept(folder: Path, pid: int) -> Swept | None:
    with _taken(folder, pid) as taken:
        if not taken:
            return None
        ended = end_all_of(folder)
        ready = _remembered(folder)
        removed = ready is not None and ready_file.remove_of(pid, ready)
        shutil.rmtree(folder, ignore_errors=True)
        return Swept(folder, pid, ended, ready if removed else None)


def _remembered(folder: Path) -> Path | None:
    try:
        return Path(os.fsdecode((folder / _READY_FILE).read_bytes()))
    except OSError:
        return None


def _sweep_parts() -> None:
    """Half-written files of ours (``atomic_write``), in the folders where we write."""
    for place in (state_folder, cache_folder):
        with contextlib.suppress(OSError, FolderUnusable):
            for path in place().rglob(".*.part"):
                named = _PART.fullmatch(path.name)
                if named and start_of(int(named[1])) is None and _is_old(path):
                    path.unlink()


def _is_old(path: Path) -> bool:
    return datetime.now(UTC).timestamp() - path.lstat().st_mtime > _PART_IS_OLD_S


if __name__ == "__main__":
    sweep(only=Path(sys.argv[1]))
