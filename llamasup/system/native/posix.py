"""What Linux, macOS and the BSDs have in common."""

from __future__ import annotations

import sys

assert sys.platform != "win32"

import contextlib
import fcntl
import os
import select
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class Posix:
    has_unix_sockets = True
    keeps_open_files = False

    # --- files and folders

    def is_own(self, status: os.stat_result) -> bool:
        return status.st_uid == os.geteuid()

    def make_private(self, path: Path, status: os.stat_result) -> str:
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

    def open_shared(self, path: Path, flags: int) -> int:
        return os.open(path, flags, 0o600)

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink()

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def open_folder(self, path: Path) -> int | None:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            return False
        return True

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        return os.pread(fd, length, offset)

    def temporary_folders(self) -> Sequence[Path]:
        given = os.environ.get("TMPDIR", "")
        return (*([Path(given)] if given.startswith("/") else []), Path("/tmp"))  # noqa: S108 - 0700 below it

    def login_folders(self) -> Sequence[Path]:
        return ()

    def user(self) -> str:
        return str(os.geteuid())

    def device_numbers(self, device: int) -> tuple[int, int]:
        return os.major(device), os.minor(device)

    # --- pipes and sockets

    def set_nonblocking(self, fd: int) -> None:
        os.set_blocking(fd, False)

    def readable(self, fds: Sequence[int], timeout_s: float | None) -> list[int]:
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        return [fd for fd, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000.0)]

    def unread(self, sock: socket.socket) -> Callable[[int], object]:
        poll = select.poll()  # a microsecond per call, a third of an empty recv()
        poll.register(sock, select.POLLIN)
        return poll.poll

    def unix_socket(self) -> socket.socket:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def datagram_socket(self) -> socket.socket:
        return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def before_bind(self, sock: socket.socket, *, share: bool) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    # --- processes

    def creation_flags(self) -> int:
        return 0

    def job_of(self, popen: subprocess.Popen[bytes]) -> None:
        return None

    def set_niceness(self, pid: int, nice: int) -> None:
        with contextlib.suppress(OSError):  # below ours, which is not permitted; or it has already ended
            os.setpriority(os.PRIO_PROCESS, pid, nice)

    def terminate(self, popen: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):  # SIGCHLD ignored: the kernel has reaped it
            os.kill(popen.pid, signal.SIGTERM)

    def kill_group(self, popen: subprocess.Popen[bytes]) -> None:
        # EPERM: only zombies are left (macOS), or a member has changed its user.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)

    guardian_script = "exec_guardian.py"

    def start_guardian(self, command: Sequence[str], stdin: int, env: Mapping[str, str]) -> None:
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
        """256 on macOS unless raised."""
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
        return os.uname().machine

    def is_background_job(self) -> bool:
        try:
            return os.tcgetpgrp(0) != os.getpgrp()
        except OSError:  # not our controlling terminal: reading is allowed
            return False

    def prepare_streams(self) -> None:
        pass

    def on_console_close(self, callback: Callable[[], None]) -> None:
        pass

    def stop_main_thread(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def awake_and_asleep_s(self) -> float:
        boot_clock = getattr(time, "CLOCK_BOOTTIME", None)
        return time.monotonic() if boot_clock is None else time.clock_gettime(boot_clock)
