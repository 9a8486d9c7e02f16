"""Reading the real machine."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llamasup.core.system.hardware import probe as effect
from llamasup.core.system.hardware.facts import read_hardware
from llamasup.core.system.native import native
from tests.kit.paths import FIXTURES

MACHINES = FIXTURES / "hardware"
MIB = 1 << 20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux_only
def test_this_machine_is_read_as_psutil_sees_it() -> None:
    machine = effect.hardware()
    assert machine.cpus_allowed == len(psutil.Process().cpu_affinity())
    assert 1 <= machine.physical_cores <= machine.cpus_allowed
    assert 0 < machine.memory_available_bytes <= machine.memory_total_bytes
    assert machine.memory_total_bytes <= psutil.virtual_memory().total
    assert machine.swap_total_bytes <= psutil.swap_memory().total
    assert machine.numa_nodes >= 1
    assert machine.huge_pages in ("always", "madvise", "never", None)


@linux_only
@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ("-v 8000000", "address_space_limit_bytes", 8_000_000 * 1024),
        ("-n 300", "open_files_limit", 300),
        ("-l 64", "memlock_limit_bytes", 64 * 1024),
    ],
)
def test_limits_of_the_shell_are_seen(options: str, field: str, value: int) -> None:
    program = f"from llamasup.core.system.hardware.probe import hardware; print(hardware().{field})"
    # The right to lock memory, which root has, makes its limit moot.
    plain = ["setpriv", "--bounding-set=-ipc_lock"] if os.geteuid() == 0 else []
    script = f'ulimit {options}; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *plain, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == str(value), done.stderr


@linux_only
def test_the_affinity_mask_is_that_of_this_process() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        machine = effect.hardware()
    finally:
        os.sched_setaffinity(0, before)
    assert (machine.cpus_allowed, machine.physical_cores) == (1, 1)


@linux_only
def test_the_control_groups_that_the_process_names_are_the_files_that_are_read() -> None:
    machine = read_hardware(effect.collect(MACHINES / "container"))
    assert machine.cpu_quota == 1.5
    assert machine.memory_total_bytes == 4 << 30


@linux_only
def test_the_nodes_of_a_machine_are_all_read() -> None:
    text = effect.collect(MACHINES / "server")
    assert text.node_cpus == {0: "0-63,128-191\n", 1: "64-127,192-255\n"}
    assert text.numa_balancing == "1\n"


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of this machine with 512 MiB, of whichever version it has."""
    for base, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup") / base / f"llamasup-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(512 * MIB))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("may not make a control group with a memory limit here")


@linux_only
def test_a_real_group_has_its_limit_and_is_not_full_of_files_that_were_read(
    memory_group: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").write_bytes(bytes(200 * MIB))
    program = (
        "import os, sys\n"
        f"open({str(memory_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        # Written anew, so that the page cache is this group's; then read twice, as a model is.
        f"path = {str(tmp_path / 'copy')!r}\n"
        f"copy = open(path, 'wb')\n"
        f"copy.write(open({str(tmp_path / 'model')!r}, 'rb').read())\n"
        "copy.flush(), os.fsync(copy.fileno())\n"
        "for _ in range(2): open(path, 'rb').read()\n"
        "from llamasup.core.system.hardware.probe import hardware\n"
        "machine = hardware()\n"
        "print(machine.memory_total_bytes, machine.cgroup_memory_limit_bytes, machine.memory_available_bytes)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    total, limit, available = map(int, done.stdout.split())
    assert total == limit == 512 * MIB
    assert 400 * MIB < available < 512 * MIB


def test_a_machine_without_proc_is_read_by_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_proc", False)
    machine = effect.hardware()
    assert machine.cpus_allowed == psutil.cpu_count()
    assert machine.memory_total_bytes == psutil.virtual_memory().total
    assert machine.memlock_limit_bytes == 0
    assert not machine.may_raise_priority
    assert machine.swap_total_bytes == psutil.swap_memory().total
    assert machine.open_files_limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
