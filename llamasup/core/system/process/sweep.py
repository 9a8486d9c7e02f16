"""Cleans up after a llamasup that was killed or lost power.

``stale_runs`` lists, ``sweep`` removes: children that still run, the run folder with its sockets, the ready
file, and half-written files. Both touch only what belongs to this user and to a run that has ended: see
``claim`` in storage/folders.py for the run, ``ownership.py`` for its processes.

The guardian (``guardian.py``) starts it as a process for one folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from llamasup.core.system.native import native
from llamasup.core.system.process import ready_file
from llamasup.core.system.process.exit import StaleRun
from llamasup.core.system.process.ownership import OwnedProcess, kill_owned
from llamasup.core.system.process.run_folder import OWNER, run_folders
from llamasup.core.system.storage.folders import Claimed, cache_folder, claim, remove_folder, state_folder
from llamasup.errors import FolderUnusable

_CONNECT_S = 0.2
_READY_FILE = "ready-file"
_PART = re.compile(r"\..+\.(\d+)-[0-9a-f]{8}\.part")
# A file is written in milliseconds. The PID in its name may be of another container.
_PART_IS_OLD_S = 60.0


class Swept(Struct, frozen=True):
    """The processes and files of one stale run that were removed."""

    folder: Path
    pid: int
    ended: tuple[OwnedProcess, ...] = ()
    ready_file: Path | None = None

    def __str__(self) -> str:
        processes = [
            f"process {process.pid} ({process.executable or 'a descendant'})" for process in self.ended
        ]
        ready_file = [] if self.ready_file is None else [str(self.ready_file)]
        removed = ", ".join([str(self.folder), *ready_file, *processes])
        return f"Cleaned up after a killed llamasup (process {self.pid}): removed {removed}."


def stale_runs() -> tuple[StaleRun, ...]:
    """Return the run folders of processes that have exited, and their sockets that still listen."""
    stale = []
    for folder, pid in run_folders():
        with _claimed_stale(folder, pid) as is_stale:
            if is_stale:
                stale.append(StaleRun(str(folder), pid, tuple(map(str, _listening_sockets(folder)))))
    return tuple(stale)


@contextmanager
def _claimed_stale(folder: Path, pid: int) -> Iterator[bool]:
    """Whether the run of ``folder`` has ended. No other process can claim it until the end of the block."""
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
    """Check the owner's process, where locks do not exist or the run made a removed folder again."""
    start = native.start_of(pid)
    try:
        return start is not None and (not start or (folder / OWNER).read_text() in ("", start))
    except OSError:
        return start is not None


def _listening_sockets(folder: Path) -> list[Path]:
    try:
        return [path for path in sorted(folder.iterdir()) if _is_listening(path)]
    except OSError:
        return []


def _is_listening(path: Path) -> bool:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with native.unix_socket() as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def record_ready_file(folder: Path, path: Path) -> None:
    """Record the path of the ready file in the run folder, for a later sweep."""
    with contextlib.suppress(OSError):
        (folder / _READY_FILE).write_bytes(os.fsencode(path))


def sweep(only: Path | None = None) -> tuple[Swept, ...]:
    """Clean up after stale runs; with ``only`` after that run. Never raises."""
    swept = [_swept(folder, pid) for folder, pid in run_folders() if only in (None, folder)]
    if only is None:
        _sweep_parts()
    return tuple(filter(None, swept))


def _swept(folder: Path, pid: int) -> Swept | None:
    with _claimed_stale(folder, pid) as is_stale:
        if not is_stale:
            return None
        ended = kill_owned(folder)
        ready = _recorded_ready_file(folder)
        removed = ready is not None and ready_file.remove_left_by(pid, ready)
        remove_folder(folder)
        return Swept(folder, pid, ended, ready if removed else None)


def _recorded_ready_file(folder: Path) -> Path | None:
    try:
        return Path(os.fsdecode((folder / _READY_FILE).read_bytes()))
    except OSError:
        return None


def _sweep_parts() -> None:
    """Remove half-written files of ``atomic_write``."""
    for base in (state_folder, cache_folder):
        with contextlib.suppress(OSError, FolderUnusable):
            for path in base().rglob(".*.part"):
                named = _PART.fullmatch(path.name)
                if named and native.start_of(int(named[1])) is None and _is_old(path):
                    path.unlink()


def _is_old(path: Path) -> bool:
    return datetime.now(UTC).timestamp() - path.lstat().st_mtime > _PART_IS_OLD_S


def main() -> None:
    """Run as a process whose argument is the folder."""
    sweep(only=Path(sys.argv[1]))


if __name__ == "__main__":
    main()
