"""Collects the inputs of hardware/facts.py: files of /proc and /sys on Linux, psutil elsewhere.

Any of these files may be absent or unreadable.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from llamasup.core.system.hardware.facts import Hardware, HardwareText, cgroup_files, read_hardware
from llamasup.core.system.native import native


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
    return replace(found, has_ffmpeg=all(map(shutil.which, ("ffmpeg", "ffprobe"))))


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
