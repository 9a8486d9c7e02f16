"""Cleans up after a llamasup that was killed or lost power.

``stale_runs`` lists, ``sweep`` removes: children that still run, the run folder with its sockets, the ready
file, and half-written files. Both touch only what belongs to this user and to a run that has ended (``claim``
in storage/folders.py). A process belongs to a run by either of:

- ``child-PID.json`` in the run folder: PID and start time of a spawned child.
- ``LLAMASUP_RUN=FOLDER/CHILD`` in the child's environment, which all its descendants inherit, also those
  outside its process group. Not on Windows (a job object ends them); lost if a program clears its
  environment.

The guardian (``guardian.py``) starts it as a process for one folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from msgspec import Struct

from llamasup.core.system.native import native
from llamasup.core.system.process.child import StaleRun
from llamasup.core.system.process.run_folder import OWNER, remove_left_by, run_folders
from llamasup.core.system.storage.folders import (
    Claimed,
    atomic_write,
    cache_folder,
    claim,
    remove_folder,
    state_folder,
)
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


def sweep() -> tuple[Swept, ...]:
    """Clean up after all stale runs. Never raises."""
    swept = [_swept(folder, pid) for folder, pid in run_folders()]
    _sweep_parts()
    return tuple(filter(None, swept))


def sweep_run(only: Path) -> None:
    """Clean up after the ended run with this folder. Tries for 2 s while a folder of this run exists.

    A process that was killed while it asked a program for its options has another folder. A child that the
    process was just starting holds the lock of a folder until its ``exec``.
    """
    of_run = [pid for folder, pid in run_folders() if folder == only]
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while left := [(folder, pid) for folder, pid in run_folders() if pid in of_run]:
        for folder, pid in left:
            _swept(folder, pid)
        if time.monotonic() > deadline_s:
            return
        time.sleep(_LOOK_AGAIN_S)


def _swept(folder: Path, pid: int) -> Swept | None:
    with _claimed_stale(folder, pid) as is_stale:
        if not is_stale:
            return None
        ended = kill_owned(folder)
        ready = _recorded_ready_file(folder)
        removed = ready is not None and remove_left_by(pid, ready)
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


# --- the processes of a run -----------------------------------------------------------------------


MARK = "LLAMASUP_RUN"
GONE_WITHIN_S = 2.0
_LOOK_AGAIN_S = 0.005
_MAX_ROUNDS = 10  # for a process that forks faster than it can be killed


class OwnedProcess(Struct, frozen=True):
    """A process that was killed; ``executable`` as it was spawned, empty if it was found by its tag."""

    pid: int
    executable: str = ""


def kill_if(pid: int, is_the_one: Callable[[], bool], *, group: bool = False) -> bool:
    """Kill ``pid`` (with ``group``: the process group that it leads) if ``is_the_one``."""
    # kill(2) reads 0 as our own group, and the group of 1 as every process.
    return pid > 1 and native.kill_if(pid, is_the_one, group=group)


def tag_environment(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return ``env`` with a tag that no other child has."""
    return {**env, MARK: f"{folder}/{secrets.token_hex(4)}"}


def record_child(folder: Path, pid: int, executable: str) -> None:
    """Record a child that was just spawned. A failure is ignored, as serving does not need the record."""
    record = {"pid": pid, "start": native.start_of(pid), "executable": executable}
    with contextlib.suppress(OSError):
        atomic_write(_record(folder, pid), json.dumps(record).encode())


def forget_child(folder: Path, pid: int) -> None:
    """Remove the record of a reaped child, whose PID may be reused."""
    with contextlib.suppress(OSError):
        _record(folder, pid).unlink()


def recorded_children(folder: Path) -> list[int]:
    """Return the children of the run with this folder."""
    return [pid for pid, start, _ in _records(folder) if _started_at(pid, start)]


def end_descendants(env: Mapping[str, str]) -> tuple[OwnedProcess, ...]:
    """Kill the processes with the tag in ``env``: descendants of an exited child outside its process group.

    Checks every process of this user. Waits until they are gone, 2 s at most.
    """
    mark = env.get(MARK)
    return () if mark is None else tuple(_kill_tagged(f"{MARK}={mark}\0"))


def kill_owned(folder: Path) -> tuple[OwnedProcess, ...]:
    """Kill the processes of an ended run. Waits until they are gone, 2 s at most.

    The executable is not compared: it changes with every ``exec``, for example of a script.
    """
    ended = []
    for pid, start, executable in _records(folder):
        is_alive = partial(_started_at, pid, start)
        if kill_if(pid, is_alive, group=True):
            ended.append(OwnedProcess(pid, executable))
            _wait_until_gone([is_alive])
    return (*ended, *_kill_tagged(f"{MARK}={folder}/"))


def _kill_tagged(entry: str) -> Iterator[OwnedProcess]:
    wanted = os.fsencode(entry)
    for _ in range(_MAX_ROUNDS):
        living = {pid: partial(native.is_tagged, pid, wanted) for pid in native.tagged(wanted)}
        killed = [pid for pid, is_alive in living.items() if kill_if(pid, is_alive)]
        if not killed:
            return
        _wait_until_gone([living[pid] for pid in killed])
        yield from map(OwnedProcess, killed)


def _started_at(pid: int, start: str) -> bool:
    return native.start_of(pid) == start


def _wait_until_gone(living: Sequence[Callable[[], bool]]) -> None:
    deadline_s = time.monotonic() + GONE_WITHIN_S
    for is_alive in living:
        while is_alive() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_AGAIN_S)


def _record(folder: Path, pid: int) -> Path:
    return folder / f"child-{pid}.json"


def _records(folder: Path) -> Iterator[tuple[int, str, str]]:
    for path in sorted(folder.glob("child-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(path.read_bytes())
            if record["start"]:
                yield int(record["pid"]), str(record["start"]), str(record["executable"])


def main() -> None:
    """Run as a process whose argument is the folder."""
    sweep_run(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
