"""Watches the llama-servers of other llamasups of this user, to which a tuning yields.

A server works if its CPU time grows: that is seen without asking it, and also while it loads a model. An
idle llama-server uses none, except for questions of its llamasup (a health check each 5 s takes 0.3 ms of
CPU time, and /metrics or /slots 0.5 ms: b11434 with 4 slots).
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from llamasup.core.system.native import native
from llamasup.core.system.process.run_folder import NO_CONTROL, run_folders
from llamasup.core.system.process.sweep import recorded_children

POLL_S = 0.005
"""The time between two looks. A look takes 1 µs for each server."""
_WINDOW_S = 0.1
# Several questions of its llamasup at once take less, and one token of a tiny model takes more.
_BUSY_CPU_S = 0.004
_LOOK_AGAIN_S = 0.5


class Neighbours:
    """The other llama-servers. ``folder`` is the run folder of this process, whose children do not count."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looked_s = float("-inf")
        self._seen: dict[int, deque[tuple[float, float]]] = {}

    def are_busy(self) -> bool:
        """Whether one of them has worked in the last 100 ms. To be called each ``POLL_S``."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_AGAIN_S:
            self._looked_s = now_s
            self._seen = {pid: self._seen.get(pid, deque()) for pid in self._pids()}
        busy = [pid for pid, seen in self._seen.items() if _works(pid, seen, now_s)]
        return bool(busy)

    def _pids(self) -> list[int]:
        """The children of other llamasups, but not those of other tunings, which would wait for this one."""
        folders = (path for path, _ in run_folders() if path != self._folder)
        return [
            pid for path in folders if not (path / NO_CONTROL).exists() for pid in recorded_children(path)
        ]


def _works(pid: int, seen: deque[tuple[float, float]], now_s: float) -> bool:
    """Take a sample of the CPU time. ``seen``: those of the last 100 ms, with their times."""
    cpu_s = native.cpu_time_s(pid)
    if cpu_s is None:
        return False
    seen.append((now_s, cpu_s))
    while seen[0][0] < now_s - _WINDOW_S:
        seen.popleft()
    return cpu_s - seen[0][1] >= _BUSY_CPU_S
