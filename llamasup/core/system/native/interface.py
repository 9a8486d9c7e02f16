"""Defines what a system without a feature does. ``posix`` has what Linux and macOS share, and describes the
methods.

``linux``, ``macos`` and ``windows`` override what their systems have. mypy checks the calls for each of them.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # see __init__.py
    import subprocess
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from llamasup.core.system.native.kernel_objects import JobObject


class Native(ABC):
    """One operating system. Methods raise OSError unless their description says otherwise."""

    # --- files and folders

    def is_open_to_others(self, status: os.stat_result) -> bool:
        """Return whether the mode of the file gives rights to other users."""
        return False

    def set_mode(self, fd: int, mode: int) -> None:
        pass

    def give_back(self, path: Path, before: os.stat_result) -> None:
        """Give a replaced file to the owner that it had ``before``."""

    def replace(self, source: Path, target: Path, *, waits: bool = True) -> bool:
        """Rename ``source`` to ``target``.

        If another process has one of them open: wait 2 s at most, or return False at once if not ``waits``.
        """
        source.replace(target)
        return True

    def remove(self, path: Path, *, waits: bool = True) -> bool:
        """Remove a file.

        If another process has it open: wait 2 s at most, or return False at once if not ``waits``.
        """
        path.unlink()
        return True

    def sync_folder(self, path: Path) -> None:
        """Write the names of the folder's files to the disk."""

    def open_folder(self, path: Path) -> int | None:
        """Return a descriptor for ``lock``; None where folders have none."""
        return None

    def login_folders(self) -> Sequence[Path]:
        """Return the run folders of this user's login, for commands outside it (cron, su, docker exec)."""
        return ()

    def runtime_folders(self) -> Sequence[Path]:
        """Return folders for files of this login, where no variable names such a folder."""
        import platformdirs

        return (platformdirs.user_runtime_path("llamasup", appauthor=False),)

    def is_root(self) -> bool:
        """Return whether this user may change the units of systemd."""
        return False

    def longest_path(self) -> int | None:
        """Return the longest path of a file in characters, where the system and not its disk limits it."""
        return None

    def device_numbers(self, device: int) -> tuple[int, int]:
        """Return the major and minor number of ``st_dev``."""
        return 0, device

    # --- pipes and sockets

    def set_nonblocking(self, fd: int) -> None:
        """Let a read return at once, where the system can do that for a pipe."""

    # --- processes

    @abstractmethod
    def start_of(self, pid: int) -> str | None:
        """Return the start time of ``pid`` as an opaque string; None if it has exited or is not visible.

        Empty if it runs, and hides it: a process of another user on Windows. A PID is reused after 32,768
        processes, or after a restart of the machine. A PID with this time is unique: the time comes from the
        kernel's counter and not from the wall clock, which jumps.
        """

    def began_after(self, pid: int, other: int) -> bool:
        """Return whether ``pid`` started later than ``other``; False if unknown."""
        one, two = self.start_of(pid), self.start_of(other)
        return bool(one and two) and _moment(str(one)) > _moment(str(two))

    def tagged(self, entry: bytes) -> list[int]:
        """Return the other processes of this user for which ``is_tagged`` is true."""
        return []

    def is_tagged(self, pid: int, entry: bytes) -> bool:
        """Return whether ``pid`` is this user's, and its environment has an entry that starts with ``entry``.

        False if it has exited, and where the environment of other processes is hidden.
        """
        return False

    def pidfd(self, pid: int) -> int | None:
        """Return a descriptor that becomes readable at the exit of ``pid``; None where there is none."""
        return None

    @abstractmethod
    def wait_for_exit(self, pid: int) -> Callable[[], None]:
        """Return a function that blocks until ``pid`` exits. Raises ProcessLookupError if it has exited."""

    def tied(
        self,
        path: str,
        argv: Sequence[str],
        helper: Callable[[], Sequence[str] | None],
        *,
        ignores_sigpipe: bool,
    ) -> list[str]:
        """Return the command that runs ``argv`` and dies with this process, if a command can do that here.

        ``helper``: the command line of exec_child.py; None if this program has none. ``ignores_sigpipe`` is
        for the helper; without one, and where ``argv`` runs directly, the setting is inherited.
        """
        return list(argv)

    def start_in_job(
        self, start: Callable[[int], subprocess.Popen[bytes]]
    ) -> tuple[subprocess.Popen[bytes], JobObject | None]:
        """Return a new child without a window, and its job, which ends with this process.

        ``start`` gets the ``creationflags`` of subprocess.Popen. None where process groups are used. On
        Windows this process then takes Ctrl-C, even if its parent made it ignore that: its children inherit
        the setting, and could not be asked to stop.
        """
        return start(0), None

    def enlarge(self, pipe_fd: int, size: int) -> None:
        """Let the pipe hold ``size`` bytes, if the system allows it."""

    def set_niceness(self, pid: int, nice: int) -> None:
        """Set the nice value, where that is permitted and known."""

    def has_exited(self, popen: subprocess.Popen[bytes]) -> bool:
        """Return whether the child has exited; reap it only where ``sees_without_reaping`` is false."""
        return popen.poll() is not None

    def load_counts(self, pid: int) -> tuple[int, int, int, int, float] | None:
        """Return the fields of ``LoadUsage`` (hardware/probe.py); None if the process has exited.

        With psutil, which takes 24 ms to import, pages of mapped files count as other memory.
        """
        import psutil

        try:
            process: Any = psutil.Process(pid)
            rss_bytes = process.memory_info().rss
            times = process.cpu_times()
        except psutil.Error:
            return None
        try:
            read_bytes = process.io_counters().read_bytes
        except (psutil.Error, AttributeError, NotImplementedError):
            read_bytes = 0  # not on macOS
        return 0, rss_bytes, read_bytes, 0, times.user + times.system

    def cpu_time_s(self, pid: int) -> float | None:
        """Return the CPU time of a process alone, to the microsecond (the times in /proc have 10 ms).

        None if the process has exited, or if this system has no such clock (only Linux has). Takes 1 µs.
        """
        return None

    def raise_files_limit(self) -> int:
        """Raise the soft limit on open files to the hard one. Returns the new limit; 1,024 if it is unknown.

        The soft limit is 1,024 almost everywhere, for programs that use select(); the hard limit is what the
        system allows. The proxy needs two descriptors per served client, and uses epoll. Children get the
        limit from before back, as they may use select().
        """
        return 1024  # elsewhere the limit of a child could not be restored

    def restore_files_limit(self, pid: int) -> None:
        """Give a new child the limit from before."""

    def files_limit(self) -> int | None:
        """Return the limit on open files; None if there is none."""
        return None

    # --- users, for systemd

    def has_user(self, name: str) -> bool:
        return False

    def has_group(self, name: str) -> bool:
        return False

    # --- this process

    def cpus(self) -> frozenset[int]:
        """Return the CPUs that this process may use; empty if unknown."""
        return frozenset()

    def is_terminal(self, fd: int) -> bool:
        """Return whether ``fd`` is a terminal. On Windows, ``os.isatty`` is also true for the device NUL."""
        return os.isatty(fd)

    def is_background_job(self) -> bool:
        """Return whether a shell started it with ``&`` on the terminal at standard input."""
        return False

    def prepare_streams(self) -> None:
        """Let the standard streams take UTF-8 (Windows)."""

    def on_console_close(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in another thread when the console closes or the user logs off (Windows)."""

    def awake_and_asleep_s(self) -> float:
        """Return a clock that also counts while the machine sleeps, if the system has one."""
        return time.monotonic()


def _moment(start: str) -> float:
    return float(start.rpartition("/")[2])
