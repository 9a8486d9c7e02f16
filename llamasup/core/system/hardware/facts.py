"""The limits of this process: CPUs, memory, locked memory, priority, open files.

Parses the texts that :mod:`llamasup.core.system.hardware.probe` reads from /proc and /sys/fs/cgroup. Of
several limits on one resource (affinity and quota, host and cgroup, a cgroup and its parents) the tightest
counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from msgspec import Struct, field

_CAP_IPC_LOCK = 14
_CAP_SYS_NICE = 23
# llama-server requests at --prio 2: nice -10 and SCHED_FIFO at 80 (measured at b11434 with ps).
_NICE_LIMIT_WANTED = 20 + 10  # RLIMIT_NICE counts 20 - nice
_RT_PRIORITY_WANTED = 80
# In cgroup v1 "no limit" is the largest multiple of the page size; no machine has an exbibyte.
_NO_LIMIT_BYTES = 1 << 60
_MAX_CPUS = 8192  # the largest NR_CPUS
# 2^64 - 1 has 20; int() itself refuses text of more than 4,300.
_MAX_DIGITS = 20
_WHOLE_UID_RANGE = ("0", "0", "4294967295")


class Hardware(Struct, frozen=True):
    """The resources that this process may use. Sizes are bytes; ``None`` means no limit."""

    platform: str  # as sys.platform
    cpus_allowed: int  # logical CPUs in the affinity mask
    physical_cores: int  # those CPUs with SMT siblings counted once
    cpu_quota: float | None  # cores' worth of time by cgroup
    memory_total_bytes: int
    memory_available_bytes: int  # available without swapping and without the cgroup's OOM killer
    memlock_limit_bytes: int | None
    may_raise_priority: bool
    address_space_limit_bytes: int | None = None  # RLIMIT_AS; also counts mapped files and reserved pages
    cgroup_memory_limit_bytes: int | None = None  # the tightest; memory_total_bytes respects it
    swap_total_bytes: int = 0
    swap_free_bytes: int = 0
    open_files_limit: int | None = None
    cpu_sharers: int = 1  # processes of one model that compute on these CPUs at the same time
    numa_nodes: int = 1  # those with an allowed CPU
    numa_balancing: bool = False  # the kernel moves pages to the threads that use them
    huge_pages: str | None = None  # always, madvise, never; None if unknown
    gpu_drivers: frozenset[str] = frozenset()  # "NVIDIA", "AMD": vendors of GPUs with a driver
    has_ffmpeg: bool | None = None  # on PATH, with ffprobe: llama-server reads WebP and video with them


class HardwareText(Struct, frozen=True):
    """The texts that the probe read. An absent file is an empty text or a missing key."""

    platform: str
    cpus_allowed: frozenset[int]
    thread_siblings: Mapping[int, str]  # cpu → topology/thread_siblings_list, "0,64" or "0-1"
    meminfo: str = ""  # /proc/meminfo
    limits: str = ""  # /proc/self/limits
    status: str = ""  # /proc/self/status
    uid_map: str = ""  # /proc/self/uid_map
    cgroup: str = ""  # /proc/self/cgroup
    mountinfo: str = ""  # /proc/self/mountinfo
    cgroup_files: Mapping[str, str] = field(default_factory=dict[str, str])  # path → text
    node_cpus: Mapping[int, str] = field(default_factory=dict[int, str])  # node → node*/cpulist
    numa_balancing: str = ""  # /proc/sys/kernel/numa_balancing
    huge_pages: str = ""  # /sys/kernel/mm/transparent_hugepage/enabled


def read_hardware(text: HardwareText) -> Hardware:
    """Return the tightest limit of each kind in the texts."""
    groups = _groups(text.cgroup, text.mountinfo)
    files = text.cgroup_files
    counts = {name: count * 1024 for name, count in _counts(text.meminfo).items()}  # from KiB
    total, available = counts.get("MemTotal", 0), counts.get("MemAvailable", counts.get("MemFree", 0))
    swap_total, swap_free = counts.get("SwapTotal", 0), counts.get("SwapFree", 0)
    limits = tuple(_memory_limits(groups, files))
    for limit, used in limits:
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    for limit, used in _swap_limits(groups, files):
        swap_total = min(swap_total, limit)
        swap_free = min(swap_free, max(0, limit - used))
    capable = _capabilities(text.status) if _in_first_user_namespace(text.uid_map) else 0
    return Hardware(
        platform=text.platform,
        cpus_allowed=max(1, len(text.cpus_allowed)),
        physical_cores=_physical_cores(text.cpus_allowed, text.thread_siblings),
        cpu_quota=min(_cpu_quotas(groups, files), default=None),
        memory_total_bytes=total,
        memory_available_bytes=available,
        memlock_limit_bytes=_memlock_limit(text.limits, capable),
        may_raise_priority=_may_raise_priority(text.limits, capable),
        # A file without this row means no limit.
        address_space_limit_bytes=_soft_limit(text.limits, "Max address space") or None,
        cgroup_memory_limit_bytes=min((limit for limit, _ in limits), default=None),
        swap_total_bytes=swap_total,
        swap_free_bytes=swap_free,
        open_files_limit=_soft_limit(text.limits, "Max open files") or None,
        numa_nodes=_numa_nodes(text.cpus_allowed, text.node_cpus),
        numa_balancing=text.numa_balancing.strip() not in ("", "0"),
        huge_pages=_chosen(text.huge_pages),
    )


def cgroup_files(cgroup: str, mountinfo: str) -> tuple[str, ...]:
    """Return the files that may limit this process: of its groups and all their parents, v1 and v2."""
    return tuple(
        str(folder / name)
        for version, controllers, folder in _groups(cgroup, mountinfo)
        for name in _names(version, controllers)
    )


# --- processors ----------------------------------------------------------------------------------


def _physical_cores(allowed: frozenset[int], thread_siblings: Mapping[int, str]) -> int:
    """Cores with at least one allowed CPU. A CPU without a text counts as a core of its own."""
    cores = {frozenset(_cpu_list(thread_siblings.get(cpu, ""))) or frozenset({cpu}) for cpu in allowed}
    return max(1, len(cores))


def _cpu_list(text: str) -> Iterable[int]:
    """``0-3,8`` as 0, 1, 2, 3, 8. Parts that are not numbers are ignored."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if _is_number(first) and _is_number(last or first):
            yield from range(int(first), min(int(last or first), _MAX_CPUS) + 1)


def _numa_nodes(allowed: frozenset[int], node_cpus: Mapping[int, str]) -> int:
    """The number of nodes with an allowed CPU; the others are forbidden, or have only memory."""
    return max(1, sum(not allowed.isdisjoint(_cpu_list(cpus)) for cpus in node_cpus.values()))


# --- control groups ------------------------------------------------------------------------------

_Group = tuple[int, frozenset[str], PurePosixPath]  # version, controllers (v1), folder


def _groups(cgroup: str, mountinfo: str) -> tuple[_Group, ...]:
    """The folders of our groups and of all their parents, as they are mounted here."""
    mounts = tuple(_cgroup_mounts(mountinfo))
    found: list[_Group] = []
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        names, separator, path = rest.partition(":")
        if not separator:
            continue
        version, wanted = (1, frozenset(names.split(","))) if names else (2, frozenset[str]())
        for mount_version, controllers, root, point in mounts:
            if mount_version == version and wanted <= controllers:
                found += [(version, wanted, folder) for folder in _upwards(path, root, point)]
                break
    return tuple(found)


def _cgroup_mounts(mountinfo: str) -> Iterable[tuple[int, frozenset[str], str, str]]:
    """Version, controllers, root and mount point of every cgroup mount (proc(5), mountinfo)."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) >= 5 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            version = 2 if kind[0] == "cgroup2" else 1
            yield version, frozenset(kind[2].split(",")), _unescape(fields[3]), _unescape(fields[4])


def _unescape(field: str) -> str:
    """mountinfo writes blanks and backslashes in octal."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _upwards(path: str, root: str, point: str) -> tuple[PurePosixPath, ...]:
    """The group's folder under the mount point, then its parents, down to the mount point itself.

    In a container the mount's root may be our own group (then the mount point is the group) and the path may
    lie outside what is mounted (``/../other``): then the mount point is all that can be seen.
    """
    top, group = PurePosixPath(point), PurePosixPath(path)
    if ".." in group.parts or not group.is_relative_to(root):
        return (top,)
    below = group.relative_to(root)
    return (*(top / part for part in (below, *below.parents) if str(part) != "."), top)


def _names(version: int, controllers: frozenset[str]) -> tuple[str, ...]:
    if version == 2:
        swap = ("memory.swap.max", "memory.swap.current")
        return ("cpu.max", "memory.max", "memory.high", "memory.current", "memory.stat", *swap)
    cpu = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if "cpu" in controllers else ()
    memory = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    return cpu + (memory if "memory" in controllers else ())


def _cpu_quotas(groups: Iterable[_Group], files: Mapping[str, str]) -> Iterable[float]:
    for version, _, folder in groups:
        if version == 2:
            words = files.get(str(folder / "cpu.max"), "").split()  # "150000 100000", "max 100000"
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # -1: no limit
            words = [files.get(str(folder / name), "").strip() for name in names]
        if len(words) == 2 and all(map(_is_number, words)) and int(words[1]) > 0:
            yield int(words[0]) / int(words[1])


def _memory_limits(groups: Iterable[_Group], files: Mapping[str, str]) -> Iterable[tuple[int, int]]:
    """Limit and use of every group that has a limit.

    Page cache does not count as used, like in MemAvailable: the kernel drops it when memory is requested. A
    model file that was just downloaded or served would otherwise make its own container look full. Pages read
    twice are on the active list, so both lists count; locked and shared memory is on neither.
    """
    for version, _, folder in groups:
        v2 = version == 2
        limits = ("memory.max", "memory.high") if v2 else ("memory.limit_in_bytes",)
        limit = min((_number(files.get(str(folder / name), "")) for name in limits), default=_NO_LIMIT_BYTES)
        if limit >= _NO_LIMIT_BYTES:
            continue
        used = files.get(str(folder / ("memory.current" if v2 else "memory.usage_in_bytes")), "0")
        stat = _counts(files.get(str(folder / "memory.stat"), ""))
        lists = ("inactive_file", "active_file")
        droppable = sum(stat.get(name if v2 else f"total_{name}", 0) for name in lists)
        yield limit, max(0, _number(used) - droppable)


def _swap_limits(groups: Iterable[_Group], files: Mapping[str, str]) -> Iterable[tuple[int, int]]:
    """Limit and use of swap. Version 1 limits memory and swap together, which says little about swap."""
    for version, _, folder in groups:
        limit = files.get(str(folder / "memory.swap.max"), "") if version == 2 else ""
        if _number(limit) < _NO_LIMIT_BYTES:
            yield _number(limit), _number(files.get(str(folder / "memory.swap.current"), "0"))


def _number(text: str) -> int:
    """Bytes, or "no limit" for ``max``, an absent file and v1's huge number."""
    number = text.strip()
    return min(int(number), _NO_LIMIT_BYTES) if _is_number(number) else _NO_LIMIT_BYTES


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MAX_DIGITS


def _counts(text: str) -> dict[str, int]:
    """``MemTotal:  32594412 kB`` and ``inactive_file 4096`` by name, without lines that have no number."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) >= 2 and _is_number(pair[1])}


# --- memory and rights ---------------------------------------------------------------------------


def _chosen(text: str) -> str | None:
    """``always [madvise] never`` → madvise."""
    return next((word.strip("[]") for word in text.split() if word.startswith("[")), None)


def _capabilities(status: str) -> int:
    effective = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", status, re.MULTILINE)
    return int(effective[1], 16) if effective else 0


def _in_first_user_namespace(uid_map: str) -> bool:
    """Return False in a rootless container, where the kernel ignores our CAP_IPC_LOCK and CAP_SYS_NICE."""
    return tuple(uid_map.split()) in (_WHOLE_UID_RANGE, ())


def _memlock_limit(limits: str, capable: int) -> int | None:
    return None if capable >> _CAP_IPC_LOCK & 1 else _soft_limit(limits, "Max locked memory")


def _may_raise_priority(limits: str, capable: int) -> bool:
    if capable >> _CAP_SYS_NICE & 1:
        return True
    nice = _soft_limit(limits, "Max nice priority")
    realtime = _soft_limit(limits, "Max realtime priority")
    return (nice is None or nice >= _NICE_LIMIT_WANTED) and (
        realtime is None or realtime >= _RT_PRIORITY_WANTED
    )


def _soft_limit(limits: str, name: str) -> int | None:
    """The soft limit in /proc/self/limits: None if unlimited, 0 if the file does not contain it."""
    for line in limits.splitlines():
        if line.startswith(name):
            value = line.removeprefix(name).strip().partition(" ")[0]
            return int(value) if _is_number(value) else None
    return 0


class CpuUsage(Struct, frozen=True):
    """The CPU time and bytes read of a process. ``stopped``: suspended by a signal (SIGSTOP)."""

    cpu_s: float
    read_bytes: int
    stopped: bool = False
