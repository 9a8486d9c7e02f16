"""Measures CPU time, bytes read and memory of a process, and counts kills by the kernel's OOM killer.

A SIGKILL of the OOM killer leaves no other trace in the child. psutil is imported late (24 ms).
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from llamasup.core.system.hardware.facts import CpuUsage, cgroup_files
from llamasup.core.system.hardware.probe import system_text
from llamasup.core.system.native import native

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills(root: Path = Path("/")) -> int:
    """Return the number of kills so far; 0 if the system does not count them. ``root`` is for tests.

    The count of our own cgroup (v2 ``memory.events.local`` since 5.3, else ``memory.events``, which in 5.2
    counts the groups below, too; v1 ``memory.oom_control`` since 4.13), or else of the whole system
    (``/proc/vmstat``).
    A child is in its parent's cgroup, unless it was moved.
    """
    own = root / "proc/self"
    files = cgroup_files(system_text(own / "cgroup"), system_text(own / "mountinfo"))
    groups = dict.fromkeys(Path(name).parent for name in files if Path(name).name.startswith("memory."))
    for group in groups:
        for name in ("memory.events.local", "memory.events", "memory.oom_control"):
            if found := _COUNT.search(system_text(root / str(group).lstrip("/") / name)):
                return int(found[1])
    found = _COUNT.search(system_text(root / "proc/vmstat"))
    return int(found[1]) if found else 0


def cpu_usage(pid: int) -> CpuUsage | None:
    """Sum up the process and its descendants, because llama-server may be wrapped in a script.

    Takes some milliseconds (psutil lists all processes), so call it only for a suspected server. None if the
    process has exited or is not accessible.
    """
    import psutil

    try:
        root = psutil.Process(pid)
        stopped = root.status() == psutil.STATUS_STOPPED
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return None
    cpu_s, read_bytes = 0.0, 0
    for process in family:
        with suppress(psutil.Error):
            times = process.cpu_times()
            cpu_s += times.user + times.system
        # Unlike read_chars, read_bytes counts the pages that a memory map loads. Not on macOS.
        with suppress(psutil.Error, AttributeError, NotImplementedError):
            counters: Any = process
            read_bytes += counters.io_counters().read_bytes
    return CpuUsage(cpu_s, read_bytes, stopped)


def family_bytes(pid: int) -> int | None:
    """Return the memory of the process and its descendants without pages of mapped files.

    The system reads and drops these pages as it likes. Takes some milliseconds. None if the process has
    exited or is not accessible.
    """
    import psutil

    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return None
    own, *others = (load_usage(process) for process in (pid, *(each.pid for each in descendants)))
    if own is None:
        return None
    return own.anonymous_bytes + sum(usage.anonymous_bytes for usage in others if usage is not None)


class MemoryUsage(Struct, frozen=True):
    rss_bytes: int
    read_bytes: int
    """Bytes read by system calls; pages that a memory map loads count in ``rss_bytes`` instead."""


def memory_usage(pid: int) -> MemoryUsage | None:
    """Return the memory of a process; None if the process has exited or is not accessible."""
    import psutil

    try:
        process: Any = psutil.Process(pid)
        rss_bytes = process.memory_info().rss
    except psutil.Error:
        return None
    try:
        counters = process.io_counters()  # not on macOS
        read_bytes = getattr(counters, "read_chars", counters.read_bytes)  # on Windows the latter counts all
    except (psutil.Error, AttributeError, NotImplementedError):
        read_bytes = 0
    return MemoryUsage(rss_bytes, read_bytes)


class LoadUsage(Struct, frozen=True):
    """The bytes that a process has loaded so far, and its CPU time.

    ``file_bytes``: resident pages of mapped files; ``anonymous_bytes``: its other resident memory.
    ``read_bytes``: by system calls; ``disk_bytes``: fetched from a disk.
    """

    file_bytes: int
    anonymous_bytes: int
    read_bytes: int
    disk_bytes: int
    cpu_s: float = 0.0

    @property
    def loaded(self) -> tuple[int, int, int, int]:
        """The bytes that grow while a load makes progress.

        CPU time is no progress: a hung process may spin.
        """
        return self.file_bytes, self.anonymous_bytes, self.read_bytes, self.disk_bytes


def load_usage(pid: int) -> LoadUsage | None:
    """Measure a process; return None if it has exited or is not accessible. Takes 50 µs on Linux: called
    while a model loads, and before psutil is imported.
    """
    counts = native.load_counts(pid)
    return None if counts is None else LoadUsage(*counts)
