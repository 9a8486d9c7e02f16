"""Reading the real machine."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from llamasup.core.system.hardware import probe as effect
from llamasup.core.system.hardware.facts import CpuUsage, read_hardware
from llamasup.core.system.hardware.probe import (
    LoadUsage,
    cpu_usage,
    family_bytes,
    load_usage,
    oom_kills,
)
from llamasup.core.system.native import native
from tests.kit.paths import FIXTURES
from tests.kit.patience import PATIENCE_S

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


# --- what processes use ---------------------------------------------------------------------------


def until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def of(pid: int) -> CpuUsage:
    spent = cpu_usage(pid)
    assert spent is not None
    return spent


@pytest.mark.parametrize("script", ["while :; do :; done", "(while :; do :; done) & wait"])
def test_cpu_time_includes_descendants(script: str) -> None:
    with subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True) as child:
        try:
            until(lambda: of(child.pid).cpu_s > 0.2)
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def test_stopped_process_is_detected() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as child:
        try:
            assert not of(child.pid).stopped
            child.send_signal(signal.SIGSTOP)
            until(lambda: of(child.pid).stopped)
        finally:
            child.kill()


def test_exited_process_has_no_usage() -> None:
    with subprocess.Popen(["/bin/true"]) as child:
        child.wait()
    assert cpu_usage(child.pid) is None
    assert load_usage(child.pid) is None


READS_A_FILE = """
import mmap, sys
file = open(sys.argv[1], "rb")
sys.stdin.readline()
file.read({bytes})
sys.stdin.readline()
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
total = sum(mapped[at] for at in range(0, len(mapped), 4096))
sys.stdin.readline()
taken = b"x" * {bytes}
while True:
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_usage_of_a_load_tells_read_mapped_and_other_memory_apart(tmp_path: Path) -> None:
    size = 8 << 20
    (tmp_path / "file").write_bytes(bytes(size))
    command = [sys.executable, "-c", READS_A_FILE.format(bytes=size), str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None

        def now() -> LoadUsage:
            usage = load_usage(child.pid)
            assert usage is not None
            return usage

        try:
            for name in ("read_bytes", "file_bytes", "anonymous_bytes"):
                before = getattr(now(), name)
                child.stdin.write(b"\n")
                child.stdin.flush()
                # The kernel counts the pages of each CPU apart: a sum may lack some hundred of them.
                until(lambda before=before, name=name: getattr(now(), name) >= before + size // 2)  # type: ignore[misc]
            before_s = now().cpu_s
            until(lambda: now().cpu_s >= before_s + 0.02)
        finally:
            child.kill()


EVENTS = "low 0\nhigh 0\nmax 12\noom 4\noom_kill {}\noom_group_kill 0\n"
V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
VMSTAT = "nr_free_pages 1\noom_kill 7\nswap_ra 0\n"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("more", "kills"),
    [({}, 3), ({"sys/fs/cgroup/user.slice/app.service/memory.events.local": EVENTS.format(1)}, 1)],
    ids=["with those below it, before Linux 5.3", "alone"],
)
def test_cgroup_v2_counts_our_own_group(more: dict[str, str], kills: int, tmp_path: Path) -> None:
    root = system(
        tmp_path,
        {
            **more,
            "proc/self/cgroup": "0::/user.slice/app.service\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/user.slice/app.service/memory.events": EVENTS.format(3),
            "sys/fs/cgroup/user.slice/memory.events": EVENTS.format(99),
            "proc/vmstat": VMSTAT,
        },
    )
    assert oom_kills(root) == kills


def test_a_group_without_the_memory_controller_is_counted_with_its_parent(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/app.service\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/user.slice/memory.events": EVENTS.format(5),
        },
    )
    assert oom_kills(root) == 5


def test_cgroup_v1_counts_the_memory_controllers_group(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/1\n1:name=systemd:/docker/1\n",
            "proc/self/mountinfo": V1_MOUNT,
            "sys/fs/cgroup/memory/docker/1/memory.oom_control": V1_CONTROL.format(2),
        },
    )
    assert oom_kills(root) == 2


@pytest.mark.parametrize("control", ["oom_kill_disable 0\nunder_oom 0\n", ""])  # before Linux 4.13
def test_count_of_the_whole_system_is_the_fallback(control: str, tmp_path: Path) -> None:
    root = system(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/a\n",
            "proc/self/mountinfo": V1_MOUNT,
            "sys/fs/cgroup/memory/a/memory.oom_control": control,
            "proc/vmstat": VMSTAT,
        },
    )
    assert oom_kills(root) == 7


def test_system_without_counter_counts_zero(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the clock of another process")
def test_cpu_time_is_that_of_the_clock_of_the_process() -> None:
    before_s = time.process_time()
    seen_s = native.cpu_time_s(os.getpid())
    after_s = time.process_time()
    assert seen_s is not None
    assert before_s <= seen_s <= after_s
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as child:
        pass
    assert native.cpu_time_s(child.pid) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_count_only_grows_on_this_system() -> None:
    first = oom_kills()
    assert 0 <= first <= oom_kills()


USES_MEMORY = "import sys; kept = bytearray(40 << 20); print(flush=True); sys.stdin.read()"


def test_memory_includes_descendants() -> None:
    command = ["/bin/sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, USES_MEMORY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        own, family = load_usage(child.pid), family_bytes(child.pid)
        child.stdin.close()
    assert own is not None
    assert own.anonymous_bytes < 40 << 20
    assert family is not None
    assert family > 40 << 20
    assert family_bytes(child.pid) is None


PROCESSOR = "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\n"
RENOIR = "cpu_cores_count 0\nsimd_count 28\ngfx_target_version 90012\n"
MI50 = "cpu_cores_count 0\nsimd_count 240\ngfx_target_version 90006\n"


@pytest.mark.parametrize(
    ("files", "nodes", "vendors"),
    [
        ((), (), set()),
        (("nvidiactl", "nvidia-uvm"), (), set()),
        (("nvidiactl", "nvidia0"), (), {"NVIDIA"}),
        (("nvidia3",), (), {"NVIDIA"}),  # a container with one GPU of several
        (("kfd",), (PROCESSOR, RENOIR), set()),  # an ordinary laptop
        (("kfd",), (PROCESSOR, RENOIR, MI50), {"AMD"}),
        ((), (PROCESSOR, MI50), set()),  # a container without this GPU
    ],
)
def test_gpu_with_driver_is_found_in_kernel_files(
    files: tuple[str, ...], nodes: tuple[str, ...], vendors: set[str], tmp_path: Path
) -> None:
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    for number, properties in enumerate(nodes):
        node = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(number)
        node.mkdir(parents=True)
        (node / "properties").write_text(properties)
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/closed/properties").mkdir(parents=True)
    assert effect.gpu_drivers(tmp_path) == vendors
