"""Implements the interface for Linux, with /proc, pidfds and PR_SET_PDEATHSIG."""

from __future__ import annotations

import sys

assert sys.platform == "linux"

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

from llamasup.core.system.native.posix import Posix

if TYPE_CHECKING:  # see __init__.py
    from collections.abc import Callable, Sequence
    from pathlib import Path

_ENDED = frozenset("ZXx")  # proc(5): zombie, dead
_POLL_S = 0.25
# The first processor's lines of /proc/cpuinfo: a machine has hundreds of processors, which take long to list.
_CPUINFO_BYTES = 4096
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_S = os.sysconf("SC_CLK_TCK")
_CPU_CLOCK = 2  # CPUCLOCK_SCHED of the kernel, as in clock_getcpuclockid(3): user and system time
_USER_TIME = 11  # in /proc/PID/stat, after the name of the program; then the system time
_COUNTERS = r"^(\w+): (\d+)$"
_NO_LIMIT = 1 << 20  # the kernel's default maximum (fs.nr_open)


class Linux(Posix):
    has_proc = True  # /proc, /sys and cgroups
    socket_path_bytes = 107  # sockaddr_un has 108, with the terminating NUL
    # The variable with the folder for caches that llama.cpp reads, and that folder below the home folder.
    cache_variable = "XDG_CACHE_HOME"
    cache_in_home = ".cache"

    def __init__(self) -> None:
        self._limit_before: tuple[int, int] | None = None

    def login_folders(self) -> Sequence[Path]:
        from pathlib import Path

        if "XDG_RUNTIME_DIR" in os.environ:
            return ()
        return (Path(f"/run/user/{os.geteuid()}/llamasup"),)

    def runtime_folders(self) -> Sequence[Path]:
        return ()  # XDG_RUNTIME_DIR, or none

    def start_of(self, pid: int, proc: str | Path = "/proc") -> str | None:
        """Return the boot id and the ticks since boot.

        psutil adds the ticks since boot to a boot time that follows the wall clock: after a jump, the same
        process would have another start time.
        """
        try:
            with open(f"{proc}/{pid}/stat", "rb") as file:  # noqa: PTH123 - called often
                stat = file.read()
            with open(f"{proc}/sys/kernel/random/boot_id") as file:  # noqa: PTH123
                boot = file.read().strip()
        except OSError:
            return None
        fields = stat[stat.rindex(b")") + 2 :].decode().split()  # the name of a process may contain `)`
        state, ticks = fields[0], fields[19]
        return None if state in _ENDED else f"{boot}/{ticks}"

    def tagged(self, entry: bytes) -> list[int]:
        numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - every process
        return [pid for pid in numbers if pid != os.getpid() and self.is_tagged(pid, entry)]

    def is_tagged(self, pid: int, entry: bytes) -> bool:
        folder = f"/proc/{pid}"
        try:
            if os.stat(folder).st_uid != os.geteuid():  # noqa: PTH116
                return False
            with open(f"{folder}/environ", "rb") as file:  # noqa: PTH123
                environ = file.read()
        except OSError:  # it has just exited, or its environment is hidden (PR_SET_DUMPABLE)
            return False
        return environ.startswith(entry) or b"\0" + entry in environ

    def pidfd(self, pid: int) -> int | None:
        try:
            return os.pidfd_open(pid)
        except (OSError, AttributeError):
            # ENOSYS (before 5.3), or a seccomp filter (old container runtimes answer EPERM); no such function
            # in a Python for an old kernel.
            return None

    def wait_for_exit(self, pid: int) -> Callable[[], None]:
        start = self.start_of(pid)
        if start is None:  # a zombie also has a pidfd
            raise ProcessLookupError(pid)
        fd = self.pidfd(pid)
        if fd is None:
            return lambda: self._poll_until_exit(pid, start)
        if self.start_of(pid) != start:
            os.close(fd)
            raise ProcessLookupError(pid)

        def wait() -> None:
            import select

            poll = select.poll()
            poll.register(fd, select.POLLIN)  # once the process is a zombie
            while not poll.poll():
                pass
            os.close(fd)

        return wait

    def _poll_until_exit(self, pid: int, start: str) -> None:
        while self.start_of(pid) == start:
            time.sleep(_POLL_S)

    def tied(
        self,
        path: str,
        argv: Sequence[str],
        helper: Callable[[], Sequence[str] | None],
        *,
        ignores_sigpipe: bool,
    ) -> list[str]:
        if (command := helper()) is not None:
            ignored = int(signal.SIGPIPE) if ignores_sigpipe else 0
            return [*command, str(os.getpid()), str(ignored), path, *argv]
        import shutil

        # util-linux has a tool for it, with a race.
        setpriv = shutil.which("setpriv", path=os.defpath)
        return list(argv) if setpriv is None else [setpriv, "--pdeathsig", "KILL", "--", path, *argv[1:]]

    def enlarge(self, pipe_fd: int, size: int) -> None:
        import fcntl

        with contextlib.suppress(OSError):  # above the user's quota for pipes: keep the default of 64 KiB
            fcntl.fcntl(pipe_fd, fcntl.F_SETPIPE_SZ, size)

    def set_niceness(self, pid: int, nice: int) -> None:
        super().set_niceness(pid, nice)
        # With autogroup, as on desktops, Linux compares nice values only within a session. The child has its
        # own session, which also gets this nice value.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/autogroup", "w") as file:  # noqa: PTH123
            file.write(str(nice))

    def load_counts(self, pid: int) -> tuple[int, int, int, int, float] | None:
        import re
        from pathlib import Path

        process = Path("/proc") / str(pid)
        try:
            pages = process.joinpath("statm").read_text("ascii").split()
            stat = process.joinpath("stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:
            return None
        counts: list[tuple[str, str]] = []
        with contextlib.suppress(OSError):
            counts = re.findall(_COUNTERS, process.joinpath("io").read_text("ascii"), re.MULTILINE)
        resident, of_files = int(pages[1]) * _PAGE_BYTES, int(pages[2]) * _PAGE_BYTES
        read = {name: int(count) for name, count in counts}
        cpu_s = (int(stat[_USER_TIME]) + int(stat[_USER_TIME + 1])) / _TICKS_S
        return of_files, resident - of_files, read.get("rchar", 0), read.get("read_bytes", 0), cpu_s

    def cpu_time_s(self, pid: int) -> float | None:
        try:
            return time.clock_gettime((~pid << 3) | _CPU_CLOCK)
        except OSError:
            return None

    def raise_files_limit(self) -> int:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _NO_LIMIT if hard == resource.RLIM_INFINITY else hard
        if soft != resource.RLIM_INFINITY and soft < wanted:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                self._limit_before = self._limit_before or (soft, hard)
                return wanted
        return wanted if soft == resource.RLIM_INFINITY else soft

    def restore_files_limit(self, pid: int) -> None:
        if self._limit_before is not None:
            import resource

            with contextlib.suppress(OSError):  # it has exited
                resource.prlimit(pid, resource.RLIMIT_NOFILE, self._limit_before)

    def cpu_name(self) -> str:
        with contextlib.suppress(OSError), open("/proc/cpuinfo", "rb", buffering=0) as file:  # noqa: PTH123
            for line in file.read(_CPUINFO_BYTES).decode("utf-8", "replace").splitlines():
                if line.startswith(("model name", "Model", "cpu model")):
                    return line.partition(":")[2].strip()
        return super().cpu_name()

    def cpus(self) -> frozenset[int]:
        return frozenset(os.sched_getaffinity(0))
