"""Which processes belong to a run, written down so that somebody else can end them when it cannot.

Two marks, either of which is enough:

- ``child-PID.json`` in the run folder: number and start time of a child that was spawned.
- ``LLAMASUP_RUN=FOLDER/CHILD`` in the child's environment, which its descendants inherit, those too that
  have left its process group. Read from ``/proc``, so only on Linux; lost where a program clears its
  environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llamasup.system.process.identity import carries, kill_if, processes_tagged, start_of
from llamasup.system.storage.folders import atomic_write

__all__ = ["OwnedProcess", "end_all_of", "end_descendants", "forget_child", "record_child", "tag_environment"]

MARK = "LLAMASUP_RUN"
GONE_WITHIN_S = 2.0
_LOOK_AGAIN_S = 0.005
_ROUNDS = 10  # a process that forks faster than it can be killed is not followed for ever


@dataclass(frozen=True, slots=True)
class OwnedProcess:
    """A process that was ended; ``executable`` as it was spawned, empty where only the mark told."""

    pid: int
    executable: str = ""


def tag_environment(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """``env`` with a mark that no other child carries."""
    return {**env, MARK: f"{folder}/{secrets.token_hex(4)}"}


def record_child(folder: Path, pid: int, executable: str) -> None:
    """Write down a child that has just been spawned. What cannot be written is not needed to serve."""
    record = {"pid": pid, "start": start_of(pid), "executable": executable}
    with contextlib.suppress(OSError):
        atomic_write(_record(folder, pid), json.dumps(record).encode())


def forget_child(folder: Path, pid: int) -> None:
    """It has been reaped: from now on its number may be anybody's."""
    with contextlib.suppress(OSError):
        _record(folder, pid).unlink()


def end_descendants(env: Mapping[str, str]) -> tuple[OwnedProcess, ...]:
    """End what carries the mark in ``env``: what a child that has ended left outside its process group.

    Looks at every process of this user. Waits until they are gone, 2 s at most.
    """
    mark = env.get(MARK)
    return () if mark is None else tuple(_end_carriers(f"{MARK}={mark}\0"))


def end_all_of(folder: Path) -> tuple[OwnedProcess, ...]:
    """End what a run that is over has left alive. Waits until they are gone, 2 s at most.

    The executable is not compared: it is another one after every ``exec``, of a script for example.
    """
    ended = []
    for pid, start, executable in _records(folder):
        lives = partial(_began_at, pid, start)
        if kill_if(pid, lives, group=sys.platform != "win32"):
            ended.append(OwnedProcess(pid, executable))
            _await_gone([lives])
    return (*ended, *_end_carriers(f"{MARK}={folder}/"))


def _end_carriers(entry: str) -> Iterator[OwnedProcess]:
    wanted = os.fsencode(entry)
    for _ in range(_ROUNDS):
        living = {pid: partial(carries, pid, wanted) for pid in processes_tagged(wanted)}
        killed = [pid for pid, lives in living.items() if kill_if(pid, lives)]
        if not killed:
            return
        _await_gone([living[pid] for pid in killed])
        yield from map(OwnedProcess, killed)


def _began_at(pid: int, start: str) -> bool:
    return start_of(pid) == start


def _await_gone(living: Sequence[Callable[[], bool]]) -> None:
    deadline_s = time.monotonic() + GONE_WITHIN_S
    for lives in living:
        while lives() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_AGAIN_S)


def _record(folder: Path, pid: int) -> Path:
    return folder / f"child-{pid}.json"


def _records(folder: Path) -> Iterator[tuple[int, str, str]]:
    for path in sorted(folder.glob("child-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(path.read_bytes())
            if record["start"] is not None:
                yield int(record["pid"]), str(record["start"]), str(record["executable"])
