"""Processes and files that a run left behind. The environment of a process shows the run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from tests.kit.patience import PATIENCE_S

__all__ = ["Remains", "folders_of", "processes_of", "remains_of", "seconds_until_gone"]


Remains = tuple[str, ...]


def folders_of(home: Path) -> dict[str, str]:
    """The environment of a llamasup with its own folders in ``home``. Creates the folders.

    All runs share one cache, because reading the capabilities of a runtime takes 0.2 s.
    """
    names = {
        "XDG_RUNTIME_DIR": "run",
        "XDG_STATE_HOME": "state",
        "XDG_CONFIG_HOME": "config",
        "TMPDIR": "tmp",
    }
    for name in names.values():
        (home / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    return {variable: str(home / name) for variable, name in names.items()}


def processes_of(home: Path) -> tuple[int, ...]:
    """The living processes with ``home`` in their environment: llamasup, its guardian and all descendants.

    (The environment of a child has the run folder in LLAMASUP_RUN.)
    """
    mark = b"=" + os.fsencode(home) + b"/"
    return tuple(pid for pid, environment in _environments() if mark in environment)


def _environments() -> Iterator[tuple[int, bytes]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                environment = (entry / "environ").read_bytes()
            except OSError:  # the process has ended, or belongs to another user
                continue
            if state != "Z":
                yield int(entry.name), environment


def seconds_until_gone(home: Path) -> float:
    """Wait until no process of ``home`` lives."""
    began = time.monotonic()
    while living := processes_of(home):
        assert time.monotonic() - began < PATIENCE_S, living
        time.sleep(0.005)
    return time.monotonic() - began


def _paths_below(folder: Path) -> list[str]:
    """All paths below ``folder``, which may disappear meanwhile. (A glob would raise an error then.)"""
    return [
        str(Path(above, name)) for above, folders, files in os.walk(folder) for name in (*folders, *files)
    ]


def remains_of(home: Path, ready_file: Path) -> Remains:
    """Everything that a finished run should have removed. Logs and the load history may stay."""
    deadline_s = time.monotonic() + PATIENCE_S  # the guardian ends a moment after llamasup
    while (processes := processes_of(home)) and time.monotonic() < deadline_s:
        time.sleep(0.005)
    left = [f"process {pid}" for pid in processes]
    left += _paths_below(home / "run" / "llamasup")
    left += [str(path) for path in (home / "tmp").iterdir()]
    left += [str(path) for path in home.glob("**/*.part")]
    return (*left, str(ready_file)) if ready_file.exists() else tuple(left)
