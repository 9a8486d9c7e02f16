"""Reads the resources that this process may use, what other processes use, and kills by the OOM killer.

On Linux, the sources are files of /proc and /sys, any of which may be absent or unreadable; elsewhere psutil,
which is imported late (24 ms). A SIGKILL of the OOM killer leaves no other trace in the child.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.system.hardware.devices import is_amd_card
from llamasup.core.system.hardware.facts import CpuUsage, Hardware, HardwareText, cgroup_files, read_hardware
from llamasup.core.system.native import native

_KFD_NODES = "sys/class/kfd/kfd/topology/nodes"


def system_text(path: Path) -> str:
    """Return the file's text; empty if it is absent or not readable, which is common in containers."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def hardware() -> Hardware:
    """Return the resources that this process may use.

    Takes 1 ms on Linux with two CPUs. Nothing is cached, as memory changes.
    """
    found = read_hardware(collect()) if native.has_proc else _by_psutil()
    has_ffmpeg = all(map(shutil.which, ("ffmpeg", "ffprobe")))
    return replace(found, has_ffmpeg=has_ffmpeg, gpu_drivers=gpu_drivers())


def gpu_drivers(root: Path = Path("/")) -> frozenset[str]:
    """Return the vendors of GPUs with a driver that this process can use, by files of Linux."""
    found = set()
    # A container may have /dev/nvidia1 alone; /dev/nvidiactl alone is no GPU.
    if any((root / "dev").glob("nvidia[0-9]*")):
        found.add("NVIDIA")
    nodes = (root / _KFD_NODES).glob("*/properties") if (root / "dev/kfd").exists() else ()
    if any(is_amd_card(system_text(node)) for node in nodes):
        found.add("AMD")
    return frozenset(found)


def collect(root: Path = Path("/")) -> HardwareText:
    """Return the texts of this process on Linux. ``root`` is for tests: the parent of /proc and /sys."""
    own = root / "proc/self"
    cgroup, mountinfo = system_text(own / "cgroup"), system_text(own / "mountinfo")
    cpus = native.cpus()
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    limit_texts = {path: system_text(root / path.lstrip("/")) for path in cgroup_files(cgroup, mountinfo)}
    return HardwareText(
        platform=sys.platform,
        cpus_allowed=cpus,
        thread_siblings={cpu: system_text(root / topology.format(cpu)) for cpu in cpus},
        meminfo=system_text(root / "proc/meminfo"),
        limits=system_text(own / "limits"),
        status=system_text(own / "status"),
        uid_map=system_text(own / "uid_map"),
        cgroup=cgroup,
        mountinfo=mountinfo,
        cgroup_files={path: text for path, text in limit_texts.items() if text},
        node_cpus=dict(_node_cpus(root / "sys/devices/system/node")),
        numa_balancing=system_text(root / "proc/sys/kernel/numa_balancing"),
        huge_pages=system_text(root / "sys/kernel/mm/transparent_hugepage/enabled"),
    )


def _node_cpus(folder: Path) -> Iterator[tuple[int, str]]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 - only names are needed
    except OSError:  # a kernel without NUMA, or /sys is hidden
        return
    for name in names:
        number = name.removeprefix("node")
        if name.startswith("node") and number.isdecimal():
            yield int(number), system_text(folder / name / "cpulist")


def _by_psutil() -> Hardware:
    """Collect the facts on macOS, Windows and the BSDs, which have no cgroups.

    psutil takes 24 ms to import.
    """
    import psutil

    memory = psutil.virtual_memory()
    try:
        swap_total_bytes, swap_free_bytes = (swap := psutil.swap_memory()).total, swap.free
    except (psutil.Error, OSError, RuntimeError):  # Windows without performance counters
        swap_total_bytes = swap_free_bytes = 0
    logical = psutil.cpu_count() or 1
    return Hardware(
        platform=sys.platform,
        cpus_allowed=logical,
        physical_cores=psutil.cpu_count(logical=False) or logical,
        cpu_quota=None,
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        # Unknown: the plan then does not lock memory, and gives this reason.
        memlock_limit_bytes=0,
        may_raise_priority=False,
        swap_total_bytes=swap_total_bytes,
        swap_free_bytes=swap_free_bytes,
        open_files_limit=native.files_limit(),
    )


# --- what processes use ---------------------------------------------------------------------------


_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills(root: Path = Path("/")) -> int:
    """Return the number of kills so far; 0 if the system does not count them. ``root`` is for tests.

    The count of our own cgroup (v2 ``memory.events.local`` since 5.3, else ``memory.events``, which in 5.2
    also counts the groups below; v1 ``memory.oom_control`` since 4.13), or else of the whole system
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

    The system reads and drops these pages when it needs to. Takes some milliseconds. None if the process has
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
    def rss_bytes(self) -> int:
        return self.file_bytes + self.anonymous_bytes

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
