"""Reads :mod:`llamasup.system.hardware.facts`: files of /proc and /sys on Linux, psutil elsewhere.

Any file of the kernel may be absent or unreadable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from llamasup.system.hardware.facts import Hardware, HardwareText, cgroup_files, read_hardware

__all__ = ["collect", "hardware", "system_text"]


def system_text(path: Path) -> str:
    """The file's text; empty where it is absent or closed to us, which is usual in containers."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def hardware() -> Hardware:
    """What this process may use, now. About 1 ms on Linux with two CPUs; never cached: memory changes."""
    return read_hardware(collect()) if sys.platform == "linux" else _elsewhere()


def collect(root: Path = Path("/")) -> HardwareText:
    """The texts of this process on Linux. ``root`` is for tests: where /proc and /sys are looked for."""
    own = root / "proc/self"
    cgroup, mountinfo = system_text(own / "cgroup"), system_text(own / "mountinfo")
    cpus = frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else frozenset[int]()
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
        names = os.listdir(folder)  # noqa: PTH208 - names are all that is wanted
    except OSError:  # a kernel without NUMA, or /sys is hidden
        return
    for name in names:
        number = name.removeprefix("node")
        if name.startswith("node") and number.isdecimal():
            yield int(number), system_text(folder / name / "cpulist")


def _elsewhere() -> Hardware:
    """macOS, Windows and the BSDs: no cgroups. psutil costs 24 ms to import, so only here."""
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    logical = psutil.cpu_count() or 1
    return Hardware(
        platform=sys.platform,
        cpus_allowed=logical,
        physical_cores=psutil.cpu_count(logical=False) or logical,
        cpu_quota=None,
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        # Not known to be enough: the plan then leaves memory unlocked and says so.
        memlock_limit_bytes=0,
        may_raise_priority=False,
        swap_total_bytes=swap.total,
        swap_free_bytes=swap.free,
        open_files_limit=_open_files_limit(),
    )


def _open_files_limit() -> int | None:
    """The soft limit; 256 on macOS unless raised."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft in (resource.RLIM_INFINITY, 2**63 - 1) else soft  # macOS has a number for it
