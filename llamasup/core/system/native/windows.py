"""Implements the interface for Windows: job objects, and files that cannot be renamed while another process
has them open.
"""

from __future__ import annotations

import sys

assert sys.platform == "win32"

import _thread
import contextlib
import ctypes
import errno
import io
import msvcrt
import os
import signal
import threading
import time
from contextlib import contextmanager
from ctypes import wintypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamasup.core.system.native import windows_acl
from llamasup.core.system.native.interface import Native
from llamasup.core.system.native.kernel_objects import HandleEnd, JobObject, started_in
from llamasup.core.system.own_command import own_command

if TYPE_CHECKING:  # see __init__.py
    import socket
    import subprocess
    from collections.abc import Callable, Iterator, Mapping, Sequence

# winnt.h, winbase.h, accctrl.h, winerror.h
_GENERIC_READ, _GENERIC_WRITE = 0x80000000, 0x40000000
_SHARE_ALL = 0x1 | 0x2 | 0x4  # read, write, delete
_CREATE_NEW, _CREATE_ALWAYS, _OPEN_EXISTING, _OPEN_ALWAYS, _TRUNCATE_EXISTING = 1, 2, 3, 4, 5
_CREATIONS = {
    os.O_CREAT: _OPEN_ALWAYS,
    os.O_TRUNC: _TRUNCATE_EXISTING,
    os.O_CREAT | os.O_TRUNC: _CREATE_ALWAYS,
    os.O_CREAT | os.O_EXCL: _CREATE_NEW,
    os.O_CREAT | os.O_EXCL | os.O_TRUNC: _CREATE_NEW,
}
_NORMAL_FILE = 0x80
_LOCK_EXCLUSIVELY_AT_ONCE = 0x1 | 0x2
# Beyond the content: other processes cannot read the locked byte.
_LOCKED_BYTE = 1 << 62
_INVALID_HANDLE = ctypes.c_void_p(-1).value
_SYNCHRONIZE, _TERMINATE, _QUERY_LIMITED_INFORMATION = 0x00100000, 0x0001, 0x1000
_CREATE_SUSPENDED = 0x4
_START_UNKNOWN = ""  # see interface.py
_INFINITE = 0xFFFFFFFF
_ACCESS_DENIED, _SHARING_VIOLATION, _LOCK_VIOLATION, _IO_PENDING = 5, 32, 33, 997
# Of a file that another process has open. Virus scanners and indexers open new files for a moment.
_IN_USE = frozenset({_SHARING_VIOLATION, _LOCK_VIOLATION})
_DELETE = 0x00010000
_IN_USE_WAIT_S = 2.0
_IN_USE_POLL_S = 0.02
_reading_at = threading.Lock()  # Windows moves the file position even in a read at an offset

_UTF_8 = 65001
_CLOSES = frozenset({2, 5, 6})  # CTRL_CLOSE_EVENT, CTRL_LOGOFF_EVENT, CTRL_SHUTDOWN_EVENT
_HANDLER = ctypes.WINFUNCTYPE(wintypes.BOOL, wintypes.DWORD)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGBREAK)
_STOP_POLL_S = 0.05
_WRITABLE_POLL_S = 0.02


class _Overlapped(ctypes.Structure):
    """The structure OVERLAPPED: here only the place of a lock."""

    _fields_ = (
        ("Internal", ctypes.c_void_p),
        ("InternalHigh", ctypes.c_void_p),
        ("Offset", wintypes.DWORD),
        ("OffsetHigh", wintypes.DWORD),
        ("hEvent", ctypes.c_void_p),
    )


_kernel32: Any = ctypes.WinDLL("kernel32", use_last_error=True)
_ntdll: Any = ctypes.WinDLL("ntdll")

_kernel32.CreateFileW.restype = ctypes.c_void_p
_kernel32.CreateFileW.argtypes = (
    *(wintypes.LPCWSTR, wintypes.DWORD, wintypes.DWORD, ctypes.c_void_p),
    *(wintypes.DWORD, wintypes.DWORD, ctypes.c_void_p),
)
_kernel32.LockFileEx.argtypes = (
    *(ctypes.c_void_p, wintypes.DWORD, wintypes.DWORD, wintypes.DWORD, wintypes.DWORD),
    ctypes.POINTER(_Overlapped),
)
_kernel32.OpenProcess.restype = ctypes.c_void_p
_kernel32.OpenProcess.argtypes = (wintypes.DWORD, wintypes.BOOL, wintypes.DWORD)
_kernel32.WaitForSingleObject.argtypes = (ctypes.c_void_p, wintypes.DWORD)
_kernel32.CloseHandle.argtypes = (ctypes.c_void_p,)
_kernel32.GetConsoleMode.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_kernel32.TerminateProcess.argtypes = (ctypes.c_void_p, wintypes.UINT)
_kernel32.GetProcessTimes.argtypes = (ctypes.c_void_p, *(ctypes.POINTER(wintypes.FILETIME),) * 4)
_ntdll.NtResumeProcess.argtypes = (ctypes.c_void_p,)

# Exits within 50 ms; a console that hangs must not hold up the stop.
_STOP_HELPER_S = 5.0


class Windows(Native):
    """See ``interface.Native`` and ``posix.Posix``.

    The mode of a file says nothing here, and ACLs give rights (``windows_acl``). Processes have no tags, as
    their job object ends all descendants. NTFS writes names to its journal.
    """

    has_proc = False
    has_unix_sockets = False  # Windows has them, and its Python does not
    socket_path_bytes = 103
    keeps_open_files = True
    loop_reads_pipes = False  # only pipes that were opened for overlapped reads
    executable_suffix = ".exe"
    config_folder: str | None = None  # every user can make folders in C:\\ and in ProgramData
    cache_variable = "LOCALAPPDATA"
    cache_in_home = "AppData/Local"
    sees_without_reaping = False

    # --- files and folders

    def is_own(self, status: os.stat_result) -> bool:
        return True  # the ACL of its folder has the answer

    def is_own_folder(self, path: Path, status: os.stat_result) -> bool:
        return windows_acl.is_own(path)

    def make_private(self, path: Path, status: os.stat_result) -> str:
        return windows_acl.make_private(path)

    def open_shared(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """``os.open`` would keep others from renaming the file. The folder's ACL replaces ``mode``."""
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        access = _GENERIC_READ | (_GENERIC_WRITE if writes else 0)
        how = _CREATIONS.get(flags & (os.O_CREAT | os.O_EXCL | os.O_TRUNC), _OPEN_EXISTING)
        handle = _kernel32.CreateFileW(str(path), access, _SHARE_ALL, None, how, _NORMAL_FILE, None)
        if handle == _INVALID_HANDLE:
            raise _windows_error(path)
        try:
            return msvcrt.open_osfhandle(
                handle, flags & (os.O_APPEND | os.O_RDONLY) | os.O_BINARY | os.O_NOINHERIT
            )
        except OSError:
            _kernel32.CloseHandle(handle)
            raise

    def replace(self, source: Path, target: Path, *, waits: bool = True) -> bool:
        return _done(lambda: source.replace(target), source, target, waits=waits)

    def remove(self, path: Path, *, waits: bool = True) -> bool:
        return _done(path.unlink, path, waits=waits)

    def lock(self, fd: int) -> bool:
        place = _Overlapped(Offset=_LOCKED_BYTE & 0xFFFFFFFF, OffsetHigh=_LOCKED_BYTE >> 32)
        handle = msvcrt.get_osfhandle(fd)
        if _kernel32.LockFileEx(handle, _LOCK_EXCLUSIVELY_AT_ONCE, 0, 1, 0, ctypes.byref(place)):
            return True
        if ctypes.get_last_error() in (_LOCK_VIOLATION, _IO_PENDING):
            raise BlockingIOError(errno.EAGAIN, "another process has locked the file")
        return False

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        with _reading_at:
            at = os.lseek(fd, 0, os.SEEK_CUR)
            os.lseek(fd, offset, os.SEEK_SET)
            try:
                return os.read(fd, length)
            finally:
                os.lseek(fd, at, os.SEEK_SET)

    def temporary_folders(self) -> Sequence[Path]:
        import tempfile

        return (Path(tempfile.gettempdir()),)

    def is_library(self, name: str) -> bool:
        return name.endswith(".dll")

    def user(self) -> str:
        return os.environ.get("USERNAME", "user")

    def longest_path(self) -> int | None:
        enabled = getattr(_ntdll, "RtlAreLongPathsEnabled", None)  # of the system and of this program
        return None if enabled is not None and enabled() & 0xFF else 259

    # --- pipes and sockets

    def readable(self, fds: Sequence[int], timeout_s: float | None) -> list[int]:
        return [fds[0]]

    def wait_writable(self, fd: int) -> None:
        time.sleep(_WRITABLE_POLL_S)  # a pipe cannot be asked

    def unread(self, sock: socket.socket) -> Callable[[int], object]:
        return bool  # the loop reads ahead, so the kernel holds nothing

    def unix_socket(self) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Python has no Unix sockets on Windows")

    datagram_socket = unix_socket

    def before_bind(self, sock: socket.socket, *, share: bool) -> None:
        import socket

        # SO_REUSEADDR would let two processes share the port, and another user's process take it over.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)

    # --- processes

    def start_of(self, pid: int) -> str | None:
        """Return the start time in units of 100 ns. psutil's import would take 24 ms."""
        with _process(pid, _QUERY_LIMITED_INFORMATION | _SYNCHRONIZE) as handle:
            if not handle:
                # A process of another user is there; its PID is in use.
                return _START_UNKNOWN if ctypes.get_last_error() == _ACCESS_DENIED else None
            if _kernel32.WaitForSingleObject(handle, 0) == 0:  # it has exited
                return None
            start, end, kernel, user = (wintypes.FILETIME() for _ in range(4))
            if not _kernel32.GetProcessTimes(handle, *map(ctypes.byref, (start, end, kernel, user))):
                return _START_UNKNOWN
            return str((start.dwHighDateTime << 32) + start.dwLowDateTime)

    def kill_if(self, pid: int, is_the_one: Callable[[], bool], *, group: bool) -> bool:
        """The handle keeps the PID from being reused between the check and the end."""
        with _process(pid, _TERMINATE) as handle:
            return bool(handle and is_the_one() and _kernel32.TerminateProcess(handle, 1))

    def wait_for_exit(self, pid: int) -> Callable[[], None]:
        return HandleEnd(pid, _kernel32, ctypes.get_last_error).wait

    def start_in_job(
        self, start: Callable[[int], subprocess.Popen[bytes]]
    ) -> tuple[subprocess.Popen[bytes], JobObject | None]:
        """Start the child suspended until it is in its job. It has a console of its own: Ctrl-C in ours does
        not reach it, and ``terminate`` can send it one. A new process group would ignore it.
        """
        import subprocess

        # If our parent has made us ignore Ctrl-C (CREATE_NEW_PROCESS_GROUP), children would also ignore it.
        _kernel32.SetConsoleCtrlHandler(None, False)
        job = JobObject(_kernel32)
        flags = subprocess.CREATE_NO_WINDOW | _CREATE_SUSPENDED
        return started_in(job, lambda: start(flags), _resume), job

    def terminate(self, popen: subprocess.Popen[bytes]) -> None:
        """Send Ctrl-C in the child's own console through a helper: a process has one console at a time."""
        helper = own_command("console_stop")
        if helper is None:
            popen.terminate()
            return
        threading.Thread(target=_send_ctrl_c, args=(helper, popen), name="ctrl-c", daemon=True).start()

    def kill_group(self, popen: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError):
            popen.kill()

    def wait_until_exited(self, popen: subprocess.Popen[bytes]) -> None:
        _kernel32.WaitForSingleObject(int(getattr(popen, "_handle")), _INFINITE)  # noqa: B009 - as above

    def raise_files_limit(self) -> int:
        return 16_384  # sockets have no limit of their own; each costs memory

    def start_guardian(self, command: Sequence[str], stdin: int, env: Mapping[str, str]) -> None:
        import subprocess
        import tempfile

        # Kept: Python reports a Popen that is dropped while its process runs.
        self._guardian = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
            cwd=Path(tempfile.gettempdir()).anchor,
            creationflags=subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP,
        )

    # --- this process

    def cpu_name(self) -> str:
        """Return a name without the module platform, whose query of WMI takes up to seconds."""
        return os.environ.get("PROCESSOR_IDENTIFIER", "")

    def is_terminal(self, fd: int) -> bool:
        mode = wintypes.DWORD()
        return bool(_kernel32.GetConsoleMode(msvcrt.get_osfhandle(fd), ctypes.byref(mode)))

    def prepare_streams(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # None without a console
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        # Of the whole console: without it, UTF-8 would be shown wrongly. It stays, as other programs of the
        # console may write at the same moment.
        _kernel32.SetConsoleOutputCP(_UTF_8)

    def on_console_close(self, callback: Callable[[], None]) -> None:
        def handle(event: int) -> bool:
            if event not in _CLOSES:
                return False
            callback()
            return True

        self._console_handler = _HANDLER(handle)  # ctypes does not keep it
        _kernel32.SetConsoleCtrlHandler(self._console_handler, True)

    def stop_main_thread(self) -> None:
        _thread.interrupt_main(signal.SIGTERM)  # os.kill would end the process

    def wait_for_stop(self) -> None:
        """A handler runs only when the main thread returns from its wait."""
        stopped = False

        def stop(*_: object) -> None:
            nonlocal stopped
            stopped = True

        for number in _STOP_SIGNALS:
            signal.signal(number, stop)
        while not stopped:
            time.sleep(_STOP_POLL_S)
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)


def _windows_error(path: Path) -> OSError:
    error = ctypes.WinError(ctypes.get_last_error())
    error.filename = str(path)
    return error


def _done(act: Callable[[], object], *paths: Path, waits: bool) -> bool:
    """False if another process has one of the files open and ``waits`` is false."""
    until = time.monotonic() + _IN_USE_WAIT_S
    while True:
        try:
            act()
        except OSError as error:
            path = _in_use(error, paths)
            if path is None:
                raise
            if not waits:
                return False
            if time.monotonic() > until:
                raise PermissionError(
                    errno.EACCES,
                    f"another program has held the file {path.name!r} open for {_IN_USE_WAIT_S:g} s",
                    str(path),
                ) from error
            time.sleep(_IN_USE_POLL_S)
        else:
            return True


def _in_use(error: OSError, paths: Sequence[Path]) -> Path | None:
    """The file that another process has open, if that is the reason for ``error``.

    Windows also says "access denied" then, as for a file that this user may not change.
    """
    if error.winerror not in (*_IN_USE, _ACCESS_DENIED):
        return None
    for path in paths:
        handle = _kernel32.CreateFileW(
            str(path), _DELETE, _SHARE_ALL, None, _OPEN_EXISTING, _NORMAL_FILE, None
        )
        if handle != _INVALID_HANDLE:
            _kernel32.CloseHandle(handle)
        elif ctypes.get_last_error() in _IN_USE:
            return path
    return paths[-1] if error.winerror in _IN_USE else None


def _resume(handle: int) -> None:
    if (status := _ntdll.NtResumeProcess(handle)) < 0:
        raise OSError(f"NtResumeProcess failed (0x{status & 0xFFFFFFFF:08x})")


def _send_ctrl_c(helper: Sequence[str], popen: subprocess.Popen[bytes]) -> None:
    """``popen`` is held until the end, so that Windows does not reuse its process ID."""
    import subprocess

    with contextlib.suppress(OSError, subprocess.SubprocessError):  # it is killed later if it does not stop
        subprocess.run(
            [*helper, str(popen.pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            creationflags=subprocess.DETACHED_PROCESS,
            timeout=_STOP_HELPER_S,
            check=False,
        )


@contextmanager
def _process(pid: int, rights: int) -> Iterator[Any]:
    """A handle; None if there is no such process, or if it is not accessible."""
    ctypes.set_last_error(0)
    handle = _kernel32.OpenProcess(rights, False, pid) if 0 < pid < 1 << 32 else None
    try:
        yield handle
    finally:
        if handle:
            _kernel32.CloseHandle(handle)
