"""Objects of Windows' kernel: job objects, and handles of processes. Tests on other systems use fakes of
kernel32.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

# winnt.h, winbase.h, winerror.h
_SYNCHRONIZE = 0x00100000
_WAIT_TIMEOUT = 258
_WAIT_MS = 250
_ERROR_ACCESS_DENIED = 5
_KILL_ON_JOB_CLOSE = 0x2000
_EXTENDED_LIMIT_INFORMATION = 9


class _BasicLimits(ctypes.Structure):
    _fields_ = (
        ("PerProcessUserTimeLimit", ctypes.c_int64),
        ("PerJobUserTimeLimit", ctypes.c_int64),
        ("LimitFlags", ctypes.c_uint32),
        ("MinimumWorkingSetSize", ctypes.c_size_t),
        ("MaximumWorkingSetSize", ctypes.c_size_t),
        ("ActiveProcessLimit", ctypes.c_uint32),
        ("Affinity", ctypes.c_size_t),
        ("PriorityClass", ctypes.c_uint32),
        ("SchedulingClass", ctypes.c_uint32),
    )


class ExtendedLimits(ctypes.Structure):
    """The structure JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

    _fields_ = (
        ("BasicLimitInformation", _BasicLimits),
        ("IoInfo", ctypes.c_uint64 * 6),
        ("ProcessMemoryLimit", ctypes.c_size_t),
        ("JobMemoryLimit", ctypes.c_size_t),
        ("PeakProcessMemoryUsed", ctypes.c_size_t),
        ("PeakJobMemoryUsed", ctypes.c_size_t),
    )


class JobObject:
    """One child and its descendants. Windows ends them when the last handle closes. No other process gets
    the handle, so the end of the supervisor closes it.
    """

    def __init__(self, kernel32: Any = None) -> None:
        api = self._api = kernel32 if kernel32 is not None else _kernel32()
        api.CreateJobObjectW.restype = ctypes.c_void_p
        self._handle = api.CreateJobObjectW(None, None)
        if not self._handle:
            raise OSError("CreateJobObjectW failed")
        limits = ExtendedLimits()
        limits.BasicLimitInformation.LimitFlags = _KILL_ON_JOB_CLOSE
        pointer, size = ctypes.byref(limits), ctypes.sizeof(limits)
        try:
            self._call("SetInformationJobObject", _EXTENDED_LIMIT_INFORMATION, pointer, size)
        except OSError:
            self.close()
            raise

    def adopt(self, process_handle: int) -> None:
        """Add a process; the processes that it starts from now on are also added."""
        self._call("AssignProcessToJobObject", ctypes.c_void_p(process_handle))

    def kill(self) -> None:
        """Kill all its processes. If Windows refuses, ``close`` ends them."""
        with contextlib.suppress(OSError):  # what comes after it must happen: the exit is reported
            self._call("TerminateJobObject", 1)

    def close(self) -> None:
        """Kill all its processes and close the handle. May be repeated."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._api.CloseHandle(ctypes.c_void_p(handle))

    def _call(self, name: str, *arguments: Any) -> None:
        if self._handle is not None and not getattr(self._api, name)(
            ctypes.c_void_p(self._handle), *arguments
        ):
            raise OSError(f"{name} failed")


def started_in(
    job: JobObject, start: Callable[[], subprocess.Popen[bytes]], resume: Callable[[int], None]
) -> subprocess.Popen[bytes]:
    """Return a child that ``start`` leaves suspended, in ``job``; then ``resume`` gets its handle.

    After an error of any step no process is left, and the job is closed.
    """
    try:
        popen = start()
        try:
            handle = int(getattr(popen, "_handle"))  # noqa: B009 - not in the types
            job.adopt(handle)
            resume(handle)
        except BaseException:
            popen.kill()
            popen.wait()
            raise
    except BaseException:
        job.close()
        raise
    return popen


def _kernel32() -> Any:
    return getattr(ctypes, "WinDLL")("kernel32", use_last_error=True)  # noqa: B009 - not there elsewhere


class HandleEnd:
    """A handle with the right to wait. Windows does not reuse the PID while it is open."""

    def __init__(self, pid: int, kernel32: Any, last_error: Any) -> None:
        self._kernel32 = kernel32
        # Without these ctypes truncates handles to 32 bits.
        kernel32.OpenProcess.restype = ctypes.c_void_p
        kernel32.WaitForSingleObject.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
        kernel32.CloseHandle.argtypes = (ctypes.c_void_p,)
        self._handle = kernel32.OpenProcess(_SYNCHRONIZE, False, pid)
        if not self._handle:
            if last_error() == _ERROR_ACCESS_DENIED:
                raise PermissionError(pid)
            raise ProcessLookupError(pid)
        if kernel32.WaitForSingleObject(self._handle, 0) == 0:  # it has exited, but another handle is open
            kernel32.CloseHandle(self._handle)
            raise ProcessLookupError(pid)

    def wait(self) -> None:
        # Python runs the handler of Ctrl-C between two waits.
        while self._kernel32.WaitForSingleObject(self._handle, _WAIT_MS) == _WAIT_TIMEOUT:
            pass
        self._kernel32.CloseHandle(self._handle)
