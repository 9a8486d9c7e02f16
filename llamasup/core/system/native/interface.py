"""The interface to the operating system. Its implementations are ``linux``, ``macos`` and ``windows``.

Only for mypy: a protocol of this size takes 1.5 ms to make.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from llamasup.core.system.own_command import Part


class Job(Protocol):
    """A child and its descendants, as one object of the system."""

    def kill(self) -> None:
        """Kill all its processes."""
        ...

    def close(self) -> None:
        """Kill all its processes and release the object. May be repeated."""
        ...


class Keyboard(Protocol):
    """A reader of the keys that are pressed."""

    def next(self, timeout_s: float) -> str | None:
        """Return a character, or ``up``, ``down``, ``escape``; None: no key in time, or one without a name.

        Raises EOFError at the end of standard input.
        """
        ...


class Native(Protocol):
    """One operating system. Methods raise OSError unless they say otherwise."""

    has_proc: bool
    """Whether it has /proc, /sys and cgroups as Linux has."""
    has_unix_sockets: bool
    socket_path_bytes: int
    """The longest path of a Unix socket."""
    keeps_open_files: bool
    """Whether a file cannot be removed while a process has it open."""
    loop_reads_pipes: bool
    """Whether event loops can wait for a pipe of ``os.pipe``."""
    executable_suffix: str
    """Of the names of programs: ``.exe``."""
    config_folder: str | None
    """The folder for the configuration of all users, which only the administrator can change."""
    cache_variable: str
    """The environment variable with the user's folder for caches; empty if llama.cpp reads none."""
    cache_in_home: str
    """That folder without the variable, relative to the home folder."""

    # --- files and folders

    def is_own(self, status: os.stat_result) -> bool:
        """Return whether the file belongs to this user."""
        ...

    def is_own_folder(self, path: Path, status: os.stat_result) -> bool:
        """Return whether the folder belongs to this user.

        On Windows it may also belong to the administrators or the system.
        """
        ...

    def make_private(self, path: Path, status: os.stat_result) -> str:
        """Close a folder to other users. Returns why it cannot be private; empty if it is."""
        ...

    def is_open_to_others(self, status: os.stat_result) -> bool:
        """Return whether the mode of the file gives rights to other users."""
        ...

    def set_mode(self, fd: int, mode: int) -> None: ...

    def give_back(self, path: Path, before: os.stat_result) -> None:
        """Give a replaced file to the owner that it had ``before``."""
        ...

    def open_shared(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Call ``os.open``, never through a symlink.

        Others may rename and remove the file while it is open.
        """
        ...

    def try_replace(self, source: Path, target: Path) -> bool:
        """Rename ``source`` to ``target``. False if another process has one of them open."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target``. If another process has one of them open, wait 2 s at most."""
        ...

    def try_remove(self, path: Path) -> bool:
        """Remove a file. False if another process has it open."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file. If another process has it open, wait 2 s at most."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Write the names of the folder's files to the disk."""
        ...

    def open_folder(self, path: Path) -> int | None:
        """Return a descriptor for ``lock``; None where folders have none."""
        ...

    def lock(self, fd: int) -> bool:
        """Lock a file or folder until it is closed. False: this file system has no locks.

        Raises BlockingIOError if another process holds the lock.
        """
        ...

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        """Read at most ``length`` bytes from ``offset`` on."""
        ...

    def temporary_folders(self) -> Sequence[Path]:
        """Return folders for files of this user, the preferred one first."""
        ...

    def login_folders(self) -> Sequence[Path]:
        """Return the run folders of this user's login, for commands outside it (cron, su, docker exec)."""
        ...

    def runtime_folders(self) -> Sequence[Path]:
        """Return folders for files of this login, where no variable names such a folder."""
        ...

    def user(self) -> str:
        """Return a text that distinguishes the users of this machine in names of files."""
        ...

    def is_root(self) -> bool:
        """Return whether this user may change the units of systemd."""
        ...

    def is_library(self, name: str) -> bool:
        """Return whether a file of this name is a shared library."""
        ...

    def longest_path(self) -> int | None:
        """Return the longest path of a file in characters, where the system and not its disk limits it."""
        ...

    def device_numbers(self, device: int) -> tuple[int, int]:
        """Return the major and minor number of ``st_dev``."""
        ...

    # --- pipes and sockets

    def set_nonblocking(self, fd: int) -> None:
        """Let a read return at once, where the system can do that for a pipe."""
        ...

    def readable(self, fds: Sequence[int], timeout_s: float | None) -> list[int]:
        """Return the pipes among ``fds`` that have data or have ended, within ``timeout_s``.

        All of them where pipes cannot be asked: the next read waits.
        """
        ...

    def wait_writable(self, fd: int) -> None:
        """Wait after a BlockingIOError until a write may succeed."""
        ...

    def unread(self, sock: socket.socket) -> Callable[[int], object]:
        """Return a function that reports whether ``sock`` has unread bytes; its argument is 0."""
        ...

    def unix_socket(self) -> socket.socket:
        """Return a new stream socket. Only where ``has_unix_sockets``."""
        ...

    def datagram_socket(self) -> socket.socket:
        """Return a new Unix socket for datagrams. Only where ``has_unix_sockets``."""
        ...

    def before_bind(self, sock: socket.socket, *, share: bool) -> None:
        """Let ``sock`` bind a port that was just closed; with ``share`` one that other sockets have, too."""
        ...

    # --- processes

    def start_of(self, pid: int) -> str | None:
        """Return the start time of ``pid`` as an opaque string; None if it has exited or is not visible.

        Empty if it runs, and hides it: a process of another user on Windows.
        """
        ...

    def tagged(self, entry: bytes) -> list[int]:
        """Return the other processes of this user for which ``is_tagged`` is true."""
        ...

    def is_tagged(self, pid: int, entry: bytes) -> bool:
        """Return whether ``pid`` runs, is this user's, and has an environment entry that starts with
        ``entry``.

        False where the environment of other processes is hidden.
        """
        ...

    def kill_if(self, pid: int, is_the_one: Callable[[], bool], *, group: bool) -> bool:
        """Kill ``pid`` (with ``group``: the process group that it leads) if ``is_the_one``. Never raises."""
        ...

    def pidfd(self, pid: int) -> int | None:
        """Return a descriptor that becomes readable at the exit of ``pid``; None where there is none."""
        ...

    def wait_for_exit(self, pid: int) -> Callable[[], None]:
        """Return a function that blocks until ``pid`` exits. Raises ProcessLookupError if it has exited."""
        ...

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
        ...

    def start_in_job(
        self, start: Callable[[int], subprocess.Popen[bytes]]
    ) -> tuple[subprocess.Popen[bytes], Job | None]:
        """Return a new child without a window, and its job, which ends with this process.

        ``start`` gets the ``creationflags`` of subprocess.Popen. None where process groups are used. On
        Windows this process then takes Ctrl-C, even if its parent made it ignore that: its children inherit
        the setting, and could not be asked to stop.
        """
        ...

    def enlarge(self, pipe_fd: int, size: int) -> None:
        """Let the pipe hold ``size`` bytes, if the system allows it."""
        ...

    def set_niceness(self, pid: int, nice: int) -> None:
        """Set the nice value, where that is permitted and known."""
        ...

    def terminate(self, popen: subprocess.Popen[bytes]) -> None:
        """Ask a child to exit."""
        ...

    def kill_group(self, popen: subprocess.Popen[bytes]) -> None:
        """Kill the process group of a child that was not reaped."""
        ...

    def has_exited(self, popen: subprocess.Popen[bytes]) -> bool:
        """Return whether the child has exited; reap it only where ``sees_without_reaping`` is false."""
        ...

    sees_without_reaping: bool

    def wait_until_exited(self, popen: subprocess.Popen[bytes]) -> None:
        """Block until the child has exited."""
        ...

    def load_counts(self, pid: int) -> tuple[int, int, int, int, float] | None:
        """Return the fields of ``LoadUsage`` (hardware/usage.py); None if the process has exited."""
        ...

    def cpu_time_s(self, pid: int) -> float | None:
        """Return the CPU time of a process, to the microsecond.

        Returns None if it has exited, or without such a clock.
        """
        ...

    guardian: Part
    """The guardian's program."""

    def start_guardian(self, command: Sequence[str], stdin: int, env: Mapping[str, str]) -> None:
        """Start a process that outlives this one. Raises CalledProcessError too."""
        ...

    def raise_files_limit(self) -> int:
        """Raise the limit on open files. Returns the new limit; 1,024 if it is unknown."""
        ...

    def restore_files_limit(self, pid: int) -> None:
        """Give a new child the limit from before."""
        ...

    def files_limit(self) -> int | None:
        """Return the limit on open files; None if there is none."""
        ...

    # --- users, for systemd

    def has_user(self, name: str) -> bool: ...

    def has_group(self, name: str) -> bool: ...

    # --- this process

    def cpus(self) -> frozenset[int]:
        """Return the CPUs that this process may use; empty if unknown."""
        ...

    def cpu_name(self) -> str:
        """Return the name of the processor; empty if unknown."""
        ...

    def is_terminal(self, fd: int) -> bool:
        """Return whether ``fd`` is a terminal. On Windows, ``os.isatty`` is true for the device NUL, too."""
        ...

    def is_background_job(self) -> bool:
        """Return whether a shell started it with ``&`` on the terminal at standard input."""
        ...

    def prepare_streams(self) -> None:
        """Let the standard streams take UTF-8 (Windows)."""
        ...

    def on_console_close(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in another thread when the console closes or the user logs off (Windows)."""
        ...

    def stop_main_thread(self) -> None:
        """Run the handler of SIGTERM in the main thread. On Windows only when its system call returns."""
        ...

    def wait_for_stop(self) -> None:
        """Block the main thread until SIGTERM or SIGINT (Windows: Ctrl-C, Ctrl-Break), whose handlers it sets
        and restores.
        """
        ...

    def keyboard(self) -> AbstractContextManager[Keyboard]:
        """Read single keys: they arrive at once and are not shown. Ctrl-C stays a signal."""
        ...

    def awake_and_asleep_s(self) -> float:
        """Return a clock that also counts while the machine sleeps, if the system has one."""
        ...
