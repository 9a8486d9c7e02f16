"""Checks of the machine: memory, processors, rights and limits. ``report.py`` lists all checks."""

from __future__ import annotations

from collections.abc import Iterator

from llamasup.core.system.text import memory_text
from llamasup.features.doctor.facts import Check, Facts

_MIB = 1 << 20
# The demo model runs in 40 MiB; the smallest models of use have some 300 MB.
_MIN_MEMORY = 512 * _MIB


def check_memory(facts: Facts) -> Iterator[Check]:
    machine = facts.hardware
    found = f"{memory_text(machine.memory_available_bytes)} free of {memory_text(machine.memory_total_bytes)}"
    if machine.cgroup_memory_limit_bytes is not None:
        found += f", limited to {memory_text(machine.cgroup_memory_limit_bytes)} by cgroup"
    if machine.swap_total_bytes:
        found += (
            f"; swap {memory_text(machine.swap_free_bytes)} free of {memory_text(machine.swap_total_bytes)}"
        )
    if machine.memory_available_bytes >= _MIN_MEMORY:
        yield Check("memory", True, found)
    elif machine.cgroup_memory_limit_bytes == machine.memory_total_bytes:
        yield Check("memory", False, found, "Raise the limit (MemoryMax=, --memory), or free memory.")
    else:
        yield Check("memory", False, found, "Stop other programs: hardly any model fits into this memory.")


def check_locked_memory(facts: Facts) -> Iterator[Check]:
    if facts.hardware.platform != "linux":
        return
    limit = facts.hardware.memlock_limit_bytes
    if limit is None:
        yield Check("locked memory", True, "unlimited")
    else:
        yield Check(
            "locked memory",
            True,
            f"at most {memory_text(limit)}: other programs can push larger models out of memory",
            "To lift the limit: LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 in a container, or a "
            "memlock line in /etc/security/limits.conf.",
        )


def check_address_space(facts: Facts) -> Iterator[Check]:
    """Check the limit of mapped memory. llama-server maps the whole model file, 8 MiB and more for each
    thread, and for CUDA all memory of the GPUs.
    """
    machine = facts.hardware
    limit = machine.address_space_limit_bytes
    gpu_bytes = sum(device.total_bytes for device in facts.devices if not device.shares_host_memory)
    if limit is None:
        yield Check("address space", True, "unlimited")
    elif limit >= machine.memory_total_bytes + gpu_bytes:
        yield Check("address space", True, f"limited to {memory_text(limit)}")
    else:
        yield Check(
            "address space",
            False,
            f"limited to {memory_text(limit)}, less than the memory: models that fit fail to load",
            "Remove the limit: ulimit -v unlimited, or LimitAS=infinity in a unit. To limit memory, use a "
            "cgroup (MemoryMax=).",
        )


def check_cpu(facts: Facts) -> Iterator[Check]:
    machine = facts.hardware
    found = f"{machine.physical_cores} cores, {machine.cpus_allowed} CPUs allowed"
    if machine.cpu_quota is None:
        yield Check("CPU", True, found)
        return
    found += f", limited to the time of {machine.cpu_quota:.3g} by cgroup"
    if machine.cpu_quota >= 1:
        yield Check("CPU", True, found)
    else:
        yield Check(
            "CPU",
            False,
            f"{found}: all processes pause for the rest of each period",
            "Raise the limit to one CPU at least (CPUQuota=100%, --cpus 1).",
        )


def check_numa(facts: Facts) -> Iterator[Check]:
    machine = facts.hardware
    if machine.numa_nodes == 1:
        return
    found = f"{machine.numa_nodes} nodes"
    remedy = (
        "Spread threads and weights over the nodes with -- --numa distribute (almost twice as fast in "
        "llama.cpp's #13850), with an empty page cache at the first start. Or use one node: "
        "numactl --cpunodebind=0 --membind=0."
    )
    if machine.numa_balancing:
        # ggml warns: "has been observed to impair performance" (b11434).
        found += ", and the kernel moves pages between them"
        remedy = f"Turn that off, since it slows llama.cpp down: sysctl kernel.numa_balancing=0. {remedy}"
    yield Check("NUMA", not machine.numa_balancing or bool(facts.devices), found, remedy)


def check_huge_pages(facts: Facts) -> Iterator[Check]:
    """Report the setting for information: none is known to hurt. It does not affect weights, which are mapped
    files, and llama.cpp was as fast with it as without (#22022).
    """
    if facts.hardware.huge_pages is not None:
        yield Check("transparent huge pages", True, facts.hardware.huge_pages)


def check_priority(facts: Facts) -> Iterator[Check]:
    if facts.hardware.may_raise_priority:
        yield Check("priority", True, "can be raised")
    elif facts.hardware.platform == "linux":
        yield Check(
            "priority",
            True,
            "cannot be raised: on a busy machine, other programs slow the model down",
            "To allow it: LimitNICE=-10 and LimitRTPRIO=80 in a unit, or the capability SYS_NICE.",
        )


# Each client needs a connection to llamasup and one from there to llama-server. Some 40 other files are open.
_OTHER_FILES = 40
_MIN_CLIENTS = 100
_MANY_CLIENTS = 1000


def check_open_files(facts: Facts) -> Iterator[Check]:
    limit = facts.hardware.open_files_limit
    if limit is None:
        yield Check("open files", True, "unlimited")
        return
    clients = max(0, limit - _OTHER_FILES) // 2
    found = f"at most {limit}: enough for about {clients} clients at a time"
    if clients >= _MANY_CLIENTS:
        yield Check("open files", True, found)
    else:
        remedy = "Raise the limit: ulimit -n 65536, or LimitNOFILE=65536 in a unit."
        yield Check("open files", clients >= _MIN_CLIENTS, found, remedy)
