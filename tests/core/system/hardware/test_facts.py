"""Captured /proc and /sys texts: the tightest limit of each kind counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llamasup.core.system.hardware.facts import Hardware, HardwareText, cgroup_files, read_hardware
from tests.kit.paths import FIXTURES

MACHINES = FIXTURES / "hardware"
GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10


def captured(name: str, siblings: Mapping[int, str]) -> HardwareText:
    """The texts of one machine; ``siblings`` is also its affinity mask."""
    root = MACHINES / name

    def text(path: str) -> str:
        file = root / path.lstrip("/")
        return file.read_text() if file.exists() else ""

    cgroup, mountinfo = text("proc/self/cgroup"), text("proc/self/mountinfo")
    nodes = (root / "sys/devices/system/node").glob("node*")
    return HardwareText(
        platform="linux",
        cpus_allowed=frozenset(siblings),
        thread_siblings=siblings,
        meminfo=text("proc/meminfo"),
        limits=text("proc/self/limits"),
        status=text("proc/self/status"),
        uid_map=text("proc/self/uid_map"),
        cgroup=cgroup,
        mountinfo=mountinfo,
        cgroup_files={path: text(path) for path in cgroup_files(cgroup, mountinfo)},
        node_cpus={int(node.name.removeprefix("node")): (node / "cpulist").read_text() for node in nodes},
        numa_balancing=text("proc/sys/kernel/numa_balancing"),
        huge_pages=text("sys/kernel/mm/transparent_hugepage/enabled"),
    )


def threads_of(cores: int) -> Mapping[int, str]:
    """So many cores of two threads, numbered as Linux numbers them on most machines."""
    return {cpu: f"{cpu % cores},{cpu % cores + cores}\n" for cpu in range(2 * cores)}


def vm() -> HardwareText:
    return captured("vm-cgroup-v1", {0: "0\n", 1: "1\n"})


def laptop() -> HardwareText:
    """Four cores with two threads each, and eight with one."""
    performance = {cpu: f"{cpu & ~1}-{cpu | 1}\n" for cpu in range(8)}
    return captured("laptop", performance | {cpu: f"{cpu}\n" for cpu in range(8, 16)})


def container() -> HardwareText:
    return captured("container", threads_of(8))


def server() -> HardwareText:
    return captured("server", threads_of(128))


def test_a_virtual_machine_with_cgroup_v1_and_no_limits() -> None:
    assert read_hardware(vm()) == Hardware(
        platform="linux",
        cpus_allowed=2,
        physical_cores=2,
        cpu_quota=None,
        memory_total_bytes=24684084 * KIB,
        memory_available_bytes=read_meminfo("vm-cgroup-v1", "MemAvailable"),
        memlock_limit_bytes=None,  # root with CAP_IPC_LOCK
        may_raise_priority=True,  # and CAP_SYS_NICE
        open_files_limit=20000,
        huge_pages="madvise",
    )


def read_meminfo(name: str, key: str) -> int:
    lines = (MACHINES / name / "proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":")) * KIB


def test_a_laptop_counts_the_threads_of_a_core_once() -> None:
    machine = read_hardware(laptop())
    assert (machine.cpus_allowed, machine.physical_cores) == (16, 12)
    assert machine.cpu_quota is None
    assert machine.memory_available_bytes == 21483920 * KIB
    assert machine.memlock_limit_bytes == 8 << 20
    assert not machine.may_raise_priority


def test_a_container_has_its_quota_and_its_memory_and_not_those_of_the_host() -> None:
    machine = read_hardware(container())
    assert machine.cpu_quota == 1.5
    assert machine.memory_total_bytes == 4 * GIB
    # 1.5 GiB in use, of which 1 GiB is page cache.
    assert machine.memory_available_bytes == 3.5 * GIB
    assert machine.cgroup_memory_limit_bytes == 4 * GIB
    assert machine.memlock_limit_bytes == 64 * KIB
    assert not machine.may_raise_priority


def test_a_server_obeys_the_tightest_of_nested_limits() -> None:
    machine = read_hardware(server())
    assert (machine.cpus_allowed, machine.physical_cores) == (256, 128)
    assert machine.cpu_quota == 64  # the slice's 64, not the service's 96
    assert machine.memory_total_bytes == 512 * GIB  # the slice's
    assert machine.memory_available_bytes == 412 * GIB
    assert machine.memlock_limit_bytes is None
    assert machine.may_raise_priority  # by RLIMIT_NICE and RLIMIT_RTPRIO, without a capability
    assert machine.open_files_limit == 65536
    assert (machine.numa_nodes, machine.numa_balancing) == (2, True)


def test_page_cache_does_not_fill_a_cgroup_v1_container() -> None:
    machine = read_hardware(captured("docker-cgroup-v1", threads_of(4)))
    assert machine.cpu_quota == 2.5
    assert machine.memory_total_bytes == machine.cgroup_memory_limit_bytes == 8 * GIB
    assert machine.memory_available_bytes == 7 * GIB  # 6 of the 7 GiB in use are page cache
    assert machine.memlock_limit_bytes == 64 * KIB  # root, but without CAP_IPC_LOCK
    assert not machine.may_raise_priority
    assert machine.swap_total_bytes == 2097148 * KIB
    assert machine.open_files_limit == 1048576


def test_a_rootless_container_has_the_memory_of_its_group_and_no_swap() -> None:
    machine = read_hardware(captured("podman-rootless", threads_of(4)))
    assert machine.cpu_quota is None
    assert machine.memory_total_bytes == 6 * GIB
    assert machine.memory_available_bytes == 3 * GIB + (64 + 2700) * MIB
    assert (machine.swap_total_bytes, machine.swap_free_bytes) == (0, 0)  # though the host has some
    assert machine.memlock_limit_bytes == 8 * MIB


def test_a_systemd_service_has_the_limits_of_its_unit() -> None:
    machine = read_hardware(captured("systemd-service", threads_of(6)))
    assert machine.cpu_quota == 4
    assert machine.memory_total_bytes == 20 * GIB  # MemoryHigh: above it the service is throttled
    assert machine.memory_available_bytes == 19 * GIB
    assert (machine.swap_total_bytes, machine.swap_free_bytes) == (2 * GIB, 1 * GIB)
    assert machine.memlock_limit_bytes is None  # LimitMEMLOCK=infinity
    assert machine.open_files_limit == 1024


def test_wsl_has_hybrid_groups_and_no_limits() -> None:
    machine = read_hardware(captured("wsl2", threads_of(8)))
    assert (machine.cpus_allowed, machine.physical_cores, machine.cpu_quota) == (16, 8, None)
    assert machine.memory_total_bytes == 16206352 * KIB
    assert machine.memory_available_bytes == 15051260 * KIB
    assert machine.cgroup_memory_limit_bytes is None
    assert machine.huge_pages == "always"
    assert machine.numa_nodes == 1


def test_only_nodes_with_an_allowed_cpu_count() -> None:
    text = server()
    one_socket = replace(text, cpus_allowed=frozenset(range(64)))
    assert read_hardware(one_socket).numa_nodes == 1
    with_memory_only = replace(text, node_cpus={**text.node_cpus, 2: "\n"})
    assert read_hardware(with_memory_only).numa_nodes == 2


def test_only_allowed_cpus_count_and_a_core_counts_once_even_if_half_of_it_is_allowed() -> None:
    text = laptop()
    some = replace(text, cpus_allowed=frozenset({0, 2, 3, 9}))
    assert read_hardware(some).cpus_allowed == 4
    assert read_hardware(some).physical_cores == 3


@pytest.mark.parametrize("unreadable", ["", "garbage\n", "-\n"])
def test_a_cpu_whose_siblings_cannot_be_read_is_a_core_of_its_own(unreadable: str) -> None:
    text = replace(laptop(), cpus_allowed=frozenset({0, 1}), thread_siblings={0: unreadable})
    assert read_hardware(text).physical_cores == 2


def test_memory_high_is_a_limit_too() -> None:
    text = container()
    files = {**text.cgroup_files, "/sys/fs/cgroup/memory.high": "3221225472\n"}
    assert read_hardware(replace(text, cgroup_files=files)).memory_total_bytes == 3 * GIB


def test_use_above_the_limit_leaves_zero_bytes() -> None:
    text = container()
    files = {**text.cgroup_files, "/sys/fs/cgroup/memory.current": "9999999999999\n"}
    assert read_hardware(replace(text, cgroup_files=files)).memory_available_bytes == 0


def test_cgroup_v1_limits_are_read_from_the_controllers_own_mounts() -> None:
    text = vm()
    limited = {
        **text.cgroup_files,
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
        "/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": str(2 * GIB),
        "/sys/fs/cgroup/memory/jobs/memory.usage_in_bytes": str(1 * GIB),
        "/sys/fs/cgroup/memory/jobs/memory.stat": f"total_inactive_file {GIB // 2}\n",
    }
    machine = read_hardware(replace(text, cgroup_files=limited))
    assert machine.cpu_quota == 0.5
    assert machine.memory_total_bytes == 2 * GIB
    assert machine.memory_available_bytes == 1.5 * GIB


def test_quota_with_zero_period_is_ignored() -> None:
    text = container()
    files = {**text.cgroup_files, "/sys/fs/cgroup/cpu.max": "150000 0\n"}
    assert read_hardware(replace(text, cgroup_files=files)).cpu_quota is None


def test_a_container_that_sees_the_hosts_group_names_finds_its_group_at_the_mount_point() -> None:
    files = cgroup_files(
        "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n",
        "36 31 0:33 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "37 31 0:34 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n",
    )
    assert "/sys/fs/cgroup/memory/memory.limit_in_bytes" in files
    assert "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us" in files
    assert not any("docker" in path for path in files)


@pytest.mark.parametrize("path", ["/../sibling", "/elsewhere"])
def test_a_group_outside_what_is_mounted_is_looked_for_at_the_mount_point(path: str) -> None:
    mount = "30 23 0:26 /mine /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    folders = {Path(file).parent for file in cgroup_files(f"0::{path}\n", mount)}
    assert folders == {Path("/sys/fs/cgroup")}


def test_a_mount_point_with_a_blank_in_its_name_is_found() -> None:
    mount = "30 23 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw\n"
    assert "/my groups/a/memory.max" in cgroup_files("0::/a\n", mount)


@pytest.mark.parametrize(
    ("cgroup", "mountinfo"),
    [
        ("", ""),
        ("nonsense\n", "nonsense\n"),
        ("0::/a\n", "30 23 0:26 / /proc rw - proc proc rw\n"),
        ("7:pids:/a\n", "30 23 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"),
    ],
)
def test_without_a_mounted_group_there_is_no_file_to_read(cgroup: str, mountinfo: str) -> None:
    assert cgroup_files(cgroup, mountinfo) == ()


def test_root_in_a_rootless_container_has_no_right_to_lock_memory_or_raise_priority() -> None:
    rootless = replace(vm(), uid_map="         0       1000          1\n         1     100000      65536\n")
    machine = read_hardware(rootless)
    assert machine.memlock_limit_bytes == 8 << 20
    assert not machine.may_raise_priority


def test_an_address_space_limit_is_the_soft_one() -> None:
    row = "Max address space         {}            unlimited            bytes     \n"
    limited = replace(vm(), limits=row.format(2 * GIB))
    assert read_hardware(limited).address_space_limit_bytes == 2 * GIB
    assert read_hardware(replace(vm(), limits=row.format("unlimited"))).address_space_limit_bytes is None
    assert read_hardware(vm()).address_space_limit_bytes is None


def test_empty_texts_give_no_resources() -> None:
    machine = read_hardware(HardwareText("linux", frozenset(), {}))
    assert machine == Hardware("linux", 1, 1, None, 0, 0, 0, may_raise_priority=False)


def test_kernels_before_memavailable_count_what_is_free() -> None:
    text = HardwareText("linux", frozenset({0}), {}, meminfo="MemTotal: 2048 kB\nMemFree: 1024 kB\n")
    assert read_hardware(text).memory_available_bytes == 1024 * KIB


_NAMES = ("MemTotal:", "MemAvailable:", "SwapTotal:", "CapEff:", "Max open files", "inactive_file", "kB")
_VALUES = ("max", "-1", "7", "9" * 30, "unlimited", "zz", "0-", "3-1", "²", "[always]", "0::/a", "1:memory:/")
_BETWEEN = (" ", "  ", "\t", "\n", ":", ",", "\\040")
_FRAGMENTS = st.sampled_from([*_NAMES, *_VALUES, *_BETWEEN])
_TEXTS = st.lists(_FRAGMENTS, max_size=25).map("".join)


@given(_TEXTS, _TEXTS, _TEXTS, _TEXTS)
def test_no_text_at_all_makes_the_reader_raise(one: str, two: str, three: str, four: str) -> None:
    text = replace(
        container(),
        meminfo=one,
        limits=two,
        status=three,
        huge_pages=four,
        uid_map=four,
        thread_siblings={0: one},
        node_cpus={0: two},
        cgroup_files={f"/sys/fs/cgroup/{name}": three for name in ("cpu.max", "memory.max", "memory.current")}
        | {"/sys/fs/cgroup/memory.stat": four, "/sys/fs/cgroup/memory.swap.max": one},
    )
    machine = read_hardware(text)
    assert machine.memory_available_bytes >= 0
    assert cgroup_files(one, two) == () or "cgroup" in two


def test_too_long_number_is_ignored() -> None:
    """Python refuses to turn more than 4,300 digits into a number."""
    huge = "9" * 5000
    text = HardwareText(
        platform="linux",
        cpus_allowed=frozenset({0}),
        thread_siblings={0: f"{huge},0-{huge}"},
        meminfo=f"MemTotal: {huge} kB\nMemAvailable: 4096 kB\n",
        limits=f"Max open files {huge} {huge} files\n",
        cgroup="0::/\n",
        mountinfo="30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        cgroup_files={
            "/sys/fs/cgroup/cpu.max": f"{huge} 100000\n",
            "/sys/fs/cgroup/memory.max": f"{huge}\n",
        },
    )
    read = read_hardware(text)
    assert (read.physical_cores, read.cpu_quota, read.open_files_limit) == (1, None, None)
    assert (read.memory_total_bytes, read.cgroup_memory_limit_bytes) == (0, None)
