"""What a run has left behind: processes by the mark in their environment, and files in its folders."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from tests.patience import PATIENCE_S

__all__ = ["Remains", "folders_of", "processes_of", "remains_of", "seconds_until_gone"]


GONE_WITHIN_S = 2.0  # S14
Remains = tuple[str, ...]


def folders_of(home: Path) -> dict[str, str]:
    """The environment of a llamasup with folders of its own in ``home``; they are made.

    The cache is whoever's it is: asking a runtime what it can do takes 0.2 s each time.
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
    """Whoever lives and has ``home`` in its environment: llamasup, its guardian, its children and theirs.

    (The children by LLAMASUP_RUN, the path of their run folder.)
    """
    mark = b"=" + os.fsencode(home) + b"/"
    return tuple(pid for pid, environment in _environments() if mark in environment)


def _environments() -> Iterator[tuple[int, bytes]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                environment = (entry / "environ").read_bytes()
            except OSError:  # it has ended, or is another user's
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
    """As it is, also while it goes: a glob ends with an error at what is gone when it comes there."""
    return [
        str(Path(above, name)) for above, folders, files in os.walk(folder) for name in (*folders, *files)
    ]


def remains_of(home: Path, ready_file: Path) -> Remains:
    """All that a finished run should have removed. Logs and its load history may stay."""
    deadline_s = time.monotonic() + GONE_WITHIN_S  # the guardian ends a moment after llamasup
    while (processes := processes_of(home)) and time.monotonic() < deadline_s:
        time.sleep(0.005)
    left = [f"process {pid}" for pid in processes]
    left += _paths_below(home / "run" / "llamasup")
    left += [str(path) for path in (home / "tmp").iterdir()]
    left += [str(path) for path in home.glob("**/*.part")]
    return (*left, str(ready_file)) if ready_file.exists() else tuple(left)
