"""Which file systems hold no files of anybody's: what the kernel shows of itself as files."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["pseudo_devices"]

# Not tmpfs: /dev/shm is where people put models that are to load quickly.
_PSEUDO = frozenset(
    {"proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "securityfs", "selinuxfs", "smackfs"}
    | {"debugfs", "tracefs", "configfs", "pstore", "efivarfs", "bpf", "nsfs", "mqueue", "hugetlbfs"}
    | {"fusectl", "binfmt_misc", "rpc_pipefs", "nfsd", "resctrl"}
)


def pseudo_devices(mountinfo: str) -> frozenset[tuple[int, int]]:
    """Major and minor number of each, of /proc/self/mountinfo (proc(5)); what is no such line is none."""
    return frozenset(_devices(mountinfo))


def _devices(mountinfo: str) -> Iterator[tuple[int, int]]:
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 3 or not kind or kind[0] not in _PSEUDO:
            continue
        major, _, minor = fields[2].partition(":")
        if all(number.isdecimal() and len(number) < 10 for number in (major, minor)):
            yield int(major), int(minor)
