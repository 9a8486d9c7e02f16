"""The interface to the operating system. Its implementations are ``linux``, ``macos`` and ``windows``."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

__all__ = ["Job", "Native"]


class Job(Protocol):
    """A child and its descendants, as one object of the system."""

    def kill(self) -> None:
        """End all its processes."""
        ...

    def close(self) -> None:
        """End all its processes and release the object. May be repeated."""
        ...


class Native(Protocol):
    """One operating system. Methods raise OSError unless they say otherwise."""

    has_unix_sockets: bool
    keeps_open_files: bool
    """Whether a file cannot be removed while a process has it open."""

    # --- files and folders

    def is_own(self, status: os.stat_result) -> bool:
        """Whether the file belongs to this user."""
        ...

    def make_private(self, path: Path, status: os.stat_result) -> str:
        """Close a folder to other users. Returns why it cannot be private; empty if it is."""
        ...

    def is_open_to_others(self, status: os.stat_result) -> bool:
        """Whether the mode of the file gives rights to other users."""
        ...

    def set_mode(self, fd: int, mode: int) -> None: ...

    def give_back(self, path: Path, before: os.stat_result) -> None:
        """Give a replaced file to the owner that it had ``before``."""
        ...

    def open_shared(self, path: Path, flags: int) -> int:
        """``os.open`` with mode 0600; other processes may rename and remove the file while it is open."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target``. If another process has one of them open, wait 2 s at most."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file. If another process has it open, wait 2 s at most."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Write the names of the folder's files to the disk."""
        ...

    def open_folder(self, path: Path) -> int | None:
        """A descriptor for ``lock``; None where folders have none."""
        ...

    def lock(self, fd: int) -> bool:
        """Lock a file or folder until it is closed. False: this file system has no locks.

        Raises BlockingIOError if another process holds the lock.
        """
        ...

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        """At most ``length`` bytes from ``offset`` on."""
        ...

    def temporary_folders(self) -> Sequence[Path]:
        """For files of this user, the preferred one first."""
        ...

    def login_folders(self) -> Sequence[Path]:
        """Run folders of this user's login session, for commands outside it (cron, su, docker exec)."""
        ...

    def user(self) -> str:
        """Distinguishes the users of this machine, in names of files."""
        ...

    def device_numbers(self, device: int) -> tuple[int, int]:
        """Major and minor number of ``st_dev``."""
        ...

    # --- pipes and sockets

    def set_nonblocking(self, fd: int) -> None:
        """Where pipes can be: a read returns at once."""
        ...

    def readable(self, fds: Sequence[int], timeout_s: float | None) -> list[int]:
        """The pipes among ``fds`` that have data or have ended, within ``timeout_s``.

        All of them where pipes cannot be asked: the next read waits.
        """
        ...

    def unread(self, sock: socket.socket) -> Callable[[int], object]:
        """A function that says whether ``sock`` has unread bytes; its argument is 0."""
        ...

    def unix_socket(self) -> socket.socket:
        """A new stream socket. Only where ``has_unix_sockets``."""
        ...

    def datagram_socket(self) -> socket.socket:
        """A new Unix socket for datagrams. Only where ``has_unix_sockets``."""
        ...

    def before_bind(self, sock: socket.socket, *, share: bool) -> None:
        """Let ``sock`` bind a port that was just closed; with ``share`` one that other sockets have, too."""
        ...

    # --- processes

    def start_of(self, pid: int) -> str | None:
        """The start time of ``pid`` as an opaque string; None if it has exited or is not visible."""
        ...

    def tagged(self, entry: bytes) -> list[int]:
        """The other processes of this user for which ``is_tagged`` is true."""
        ...

    def is_tagged(self, pid: int, entry: bytes) -> bool:
        """Whether ``pid`` runs, is this user's, and has an environment entry that starts with ``entry``.

        False where the environment of other processes is hidden.
        """
        ...

    def kill_if(self, pid: int, is_the_one: Callable[[], bool], *, group: bool) -> bool:
        """Kill ``pid`` (with ``group``: the process group that it leads) if ``is_the_one``. Never raises."""
        ...

    def pidfd(self, pid: int) -> int | None:
        """A descriptor that becomes readable at the exit of ``pid``; None where there is none."""
        ...

    def wait_for_exit(self, pid: int) -> Callable[[], None]:
        """A function that blocks until ``pid`` exits. Raises ProcessLookupError if it has exited."""
        ...

    def tied(self, path: str, argv: Sequence[str], helper: Callable[[], Sequence[str] | None]) -> list[str]:
        """The command that runs ``argv`` and dies with this process, if a command can do that here.

        ``helper``: the command line of exec_child.py; None if there is no Python.
        """
        ...

    def creation_flags(self) -> int:
        """Of ``subprocess.Popen``, for a child without a window."""
        ...

    def enlarge(self, pipe_fd: int, size: int) -> None:
        """Let the pipe hold ``size`` bytes, if the system allows it."""
        ...

    def job_of(self, popen: subprocess.Popen[bytes]) -> Job | None:
        """The job of a new child, which ends with this process; None where process groups are used."""
        ...

    def set_niceness(self, pid: int, nice: int) -> None:
        """Ignored where it is not permitted or unknown."""
        ...

    def terminate(self, popen: subprocess.Popen[bytes]) -> None:
        """Ask a child to end."""
        ...

    def kill_group(self, popen: subprocess.Popen[bytes]) -> None:
        """Kill the process group of a child that was not reaped."""
        ...

    def has_exited(self, popen: subprocess.Popen[bytes]) -> bool:
        """Whether the child has exited; reaps it only where ``sees_without_reaping`` is false."""
        ...

    sees_without_reaping: bool

    def wait_until_exited(self, popen: subprocess.Popen[bytes]) -> None:
        """Block until the child has exited."""
        ...

    def load_counts(self, pid: int) -> tuple[int, int, int, int, float] | None:
        """The fields of ``LoadUsage`` (hardware/usage.py); None if the process has exited."""
        ...

    def cpu_time_s(self, pid: int) -> float | None:
        """The CPU time of a process, to the microsecond; None if it has exited, or without such a clock."""
        ...

    guardian_script: str
    """The file of the guardian's program, in system/process."""

    def start_guardian(self, command: Sequence[str], stdin: int, env: Mapping[str, str]) -> None:
        """Start a process that outlives this one. Raises CalledProcessError."""
        ...

    def raise_files_limit(self) -> int:
        """Raise the limit on open files. Returns the new limit; 1,024 if it is unknown."""
        ...

    def restore_files_limit(self, pid: int) -> None:
        """Give a new child the limit from before."""
        ...

    def files_limit(self) -> int | None:
        """The limit on open files; None if there is none."""
        ...

    # --- users, for systemd

    def has_user(self, name: str) -> bool: ...

    def has_group(self, name: str) -> bool: ...

    # --- this process

    def cpus(self) -> frozenset[int]:
        """The CPUs that this process may use; empty if unknown."""
        ...

    def cpu_name(self) -> str:
        """The name of the processor; empty if unknown."""
        ...

    def is_background_job(self) -> bool:
        """Whether a shell started it with ``&`` on the terminal at standard input."""
        ...

    def prepare_streams(self) -> None:
        """Let the standard streams take UTF-8."""
        ...

    def on_console_close(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in another thread when the console closes or the user logs off (Windows)."""
        ...

    def stop_main_thread(self) -> None:
        """Run the handler of SIGTERM, even if the main thread waits in a system call."""
        ...

    def awake_and_asleep_s(self) -> float:
        """A clock that also counts while the machine sleeps, if the system has one."""
        ...
