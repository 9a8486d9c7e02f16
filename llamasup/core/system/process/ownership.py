"""Records which processes belong to a run, so that another process can end them if the supervisor is killed.

A process belongs to a run by either of:

- ``child-PID.json`` in the run folder: PID and start time of a spawned child.
- ``LLAMASUP_RUN=FOLDER/CHILD`` in the child's environment, which all its descendants inherit, also those
  outside its process group. Not on Windows (a job object ends them); lost if a program clears its
  environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import atomic_write

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
