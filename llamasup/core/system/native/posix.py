"""Implements what Linux, macOS and the BSDs have in common."""

from __future__ import annotations

import sys

assert sys.platform != "win32"

import contextlib
import os
import signal
import stat
import time
from typing import TYPE_CHECKING, Any

from llamasup.core.system.native.interface import Native

if TYPE_CHECKING:  # see __init__.py
    import socket
    import subprocess
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_waitid: Any = getattr(os, "waitid", None)
_send_signal: Any = getattr(signal, "pidfd_send_signal", None)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Posix(Native):
    """Methods raise OSError unless their description says otherwise."""

    has_unix_sockets = True
    keeps_open_files = False  # whether a file cannot be removed while a process has it open
    loop_reads_pipes = True  # whether event loops can wait for a pipe of os.pipe
    # Not on macOS before Python 3.13: there the group is killed just after the reaping.
    sees_without_reaping = hasattr(os, "waitid")
    executable_suffix = ""
    config_folder: str | None = "/etc"  # for all users; only the administrator can change it

    # --- files and folders

    def is_own(self, status: os.stat_result) -> bool:
        """Return whether the file belongs to this user."""
        return status.st_uid == os.geteuid()

    def is_own_folder(self, path: Path, status: os.stat_result) -> bool:
        """Return whether the folder belongs to this user.

        On Windows it may also belong to the administrators or the system.
        """
        return self.is_own(status)

    def make_private(self, path: Path, status: os.stat_result) -> str:
        """Close a folder to other users. Returns why it cannot be private; empty if it is."""
        if status.st_uid != os.geteuid():
            return f"it belongs to user {status.st_uid}"
        if stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(0o700)
        return ""

    def is_open_to_others(self, status: os.stat_result) -> bool:
        return bool(stat.S_IMODE(status.st_mode) & 0o077)

    def set_mode(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def give_back(self, path: Path, before: os.stat_result) -> None:
        after = path.stat()
        if (after.st_uid, after.st_gid) != (before.st_uid, before.st_gid):
            with contextlib.suppress(PermissionError):  # only root can give a file away
                os.chown(path, before.st_uid, before.st_gid)

    def open_shared(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Call ``os.open``, never through a symlink.

        Others may rename and remove the file while it is open.
        """
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def open_folder(self, path: Path) -> int | None:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def lock(self, fd: int) -> bool:
        """Lock a file or folder until it is closed. False: this file system has no locks.

        Raises BlockingIOError if another process holds the lock.
        """
        import fcntl

        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            return False
        return True

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        """Read at most ``length`` bytes from ``offset`` on."""
        return os.pread(fd, length, offset)

    def temporary_folders(self) -> Sequence[Path]:
        """Return folders for files of this user, the preferred one first."""
        from pathlib import Path

        given = os.environ.get("TMPDIR", "")
        return (*([Path(given)] if given.startswith("/") else []), Path("/tmp"))  # noqa: S108 - 0700 below it

    def user(self) -> str:
        """Return a text that distinguishes the users of this machine in names of files."""
        return str(os.geteuid())

    def is_root(self) -> bool:
        return os.geteuid() == 0

    def is_library(self, name: str) -> bool:
        """Return whether a file of this name is a shared library."""
        return name.startswith("lib")

    def device_numbers(self, device: int) -> tuple[int, int]:
        return os.major(device), os.minor(device)

    # --- pipes and sockets

    def set_nonblocking(self, fd: int) -> None:
        os.set_blocking(fd, False)

    def readable(self, fds: Sequence[int], timeout_s: float | None) -> list[int]:
        """Return the pipes among ``fds`` that have data or have ended, within ``timeout_s``.

        All of them where pipes cannot be asked: the next read waits.
        """
        import select

        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        return [fd for fd, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000.0)]

    def wait_writable(self, fd: int) -> None:
        """Wait after a BlockingIOError until a write may succeed."""
        import select

        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        poll.poll()

    def unread(self, sock: socket.socket) -> Callable[[int], object]:
        """Return a function that reports whether ``sock`` has unread bytes; its argument is 0."""
        import select

        poll = select.poll()  # a microsecond per call, a third of an empty recv()
        poll.register(sock, select.POLLIN)
        return poll.poll

    def unix_socket(self) -> socket.socket:
        """Return a new stream socket. Only where ``has_unix_sockets``."""
        import socket

        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def datagram_socket(self) -> socket.socket:
        """Return a new Unix socket for datagrams. Only where ``has_unix_sockets``."""
        import socket

        return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def before_bind(self, sock: socket.socket, *, share: bool) -> None:
        """Let ``sock`` bind a port that was just closed; with ``share`` also a port of other sockets."""
        import socket

        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    # --- processes

    def kill_if(self, pid: int, is_the_one: Callable[[], bool], *, group: bool) -> bool:
        """A pidfd (Linux) keeps the PID from being reused between the check and the signal."""
        handle = self.pidfd(pid)
        try:
            if not is_the_one():
                return False
            if group:
                os.killpg(pid, signal.SIGKILL)
            elif handle is None:
                os.kill(pid, signal.SIGKILL)
            else:
                _send_signal(handle, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            if handle is not None:
                os.close(handle)
        return True

    def set_niceness(self, pid: int, nice: int) -> None:
        with contextlib.suppress(OSError):  # below ours, which is not permitted; or it has already ended
            # The group of the child: on Linux, its pid alone would leave out the threads that it has already.
            os.setpriority(os.PRIO_PGRP, pid, nice)

    def terminate(self, popen: subprocess.Popen[bytes]) -> None:
        """Ask a child to exit."""
        with contextlib.suppress(ProcessLookupError):  # SIGCHLD ignored: the kernel has reaped it
            os.kill(popen.pid, signal.SIGTERM)

    def kill_group(self, popen: subprocess.Popen[bytes]) -> None:
        """Kill the process group of a child that was not reaped."""
        # EPERM: only zombies are left (macOS), or a member has changed its user.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)

    def has_exited(self, popen: subprocess.Popen[bytes]) -> bool:
        if not self.sees_without_reaping:
            return popen.poll() is not None
        try:
            return _waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        except ChildProcessError:
            return True

    def wait_until_exited(self, popen: subprocess.Popen[bytes]) -> None:
        """Block until the child has exited."""
        if not self.sees_without_reaping:
            with contextlib.suppress(OSError):  # it has exited
                self.wait_for_exit(popen.pid)()
            return
        with contextlib.suppress(ChildProcessError):
            _waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)

    def start_guardian(self, command: Sequence[str], stdin: int, env: Mapping[str, str]) -> None:
        """Start a process that outlives this one. Also raises CalledProcessError."""
        import subprocess

        subprocess.run(
            command,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
            cwd="/",
            check=True,  # it forks, and exits
        )

    def files_limit(self) -> int | None:
        """Return the soft limit, which is 256 on macOS unless raised."""
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return None if soft in (resource.RLIM_INFINITY, 2**63 - 1) else soft  # the latter on macOS

    # --- users

    def has_user(self, name: str) -> bool:
        import pwd

        try:
            pwd.getpwnam(name)
        except KeyError:
            return False
        return True

    def has_group(self, name: str) -> bool:
        import grp

        try:
            grp.getgrnam(name)
        except KeyError:
            return False
        return True

    # --- this process

    def cpu_name(self) -> str:
        """Return the name of the processor; empty if unknown."""
        return os.uname().machine

    def is_background_job(self) -> bool:
        try:
            return os.tcgetpgrp(0) != os.getpgrp()
        except OSError:  # not our controlling terminal: reading is allowed
            return False

    def stop_main_thread(self) -> None:
        """Run the handler of SIGTERM in the main thread. On Windows only when its system call returns."""
        os.kill(os.getpid(), signal.SIGTERM)

    def wait_for_stop(self) -> None:
        """Block the main thread until SIGTERM or SIGINT (Windows: Ctrl-C, Ctrl-Break).

        Sets the handlers of these signals, and restores them.
        """
        # Any thread of a C++ library may get the signal; the wake-up pipe always reaches this one.
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        os.read(woken, 1)
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)

    def awake_and_asleep_s(self) -> float:
        boot_clock = getattr(time, "CLOCK_BOOTTIME", None)
        return time.monotonic() if boot_clock is None else time.clock_gettime(boot_clock)
