"""Waits for the exit of any process, such as a parent.

``ProcessEnd`` is a pidfd on Linux, kqueue's NOTE_EXIT on macOS and the BSDs, and a process handle on Windows.
Once opened, each refers to the same process even if its PID is reused. Linux is run and tested; the others
are written to their documentation and tested with fakes of the system calls.
"""

from __future__ import annotations

import os
import select
import sys
import time
from typing import Any, Protocol

from llamasup.system.process.identity import start_of

__all__ = ["ProcessEnd", "end_of"]

_POLL_S = 0.25
# winnt.h, winbase.h
_SYNCHRONIZE = 0x00100000
_INFINITE = 0xFFFFFFFF
_ERROR_ACCESS_DENIED = 5


class ProcessEnd(Protocol):
    """The exit of one process, watched since the object was made."""

    def wait(self) -> None:
        """Block until the process has exited."""
        ...


def end_of(pid: int) -> ProcessEnd:
    """Watch ``pid``. Raises ProcessLookupError if it has exited or is not visible here."""
    if sys.platform == "win32":
        import ctypes

        return HandleEnd(pid, ctypes.WinDLL("kernel32", use_last_error=True), ctypes.get_last_error)
    if hasattr(select, "kqueue"):
        return KqueueEnd(pid, select)
    try:
        return PidfdEnd(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):  # before Linux 5.3, or a seccomp filter
        return PolledEnd(pid)


class PidfdEnd:
    """pidfd_open(2): readable once the process is a zombie."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        if start_of(pid) is None:  # a zombie has a pidfd too
            os.close(self._fd)
            raise ProcessLookupError(pid)

    def wait(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while not poll.poll():
            pass
        os.close(self._fd)


class PolledEnd:
    """Checks four times a second whether the process with this start time still runs."""

    def __init__(self, pid: int) -> None:
        start = start_of(pid)
        if start is None:
            raise ProcessLookupError(pid)
        self._pid, self._start = pid, start

    def wait(self) -> None:
        while start_of(self._pid) == self._start:
            time.sleep(_POLL_S)


class KqueueEnd:
    """kqueue(2), EVFILT_PROC with NOTE_EXIT. Registering a process that does not exist is an error."""

    def __init__(self, pid: int, api: Any) -> None:
        self._queue = api.kqueue()
        watch = api.kevent(
            pid,
            filter=api.KQ_FILTER_PROC,
            flags=api.KQ_EV_ADD | api.KQ_EV_ONESHOT,
            fflags=api.KQ_NOTE_EXIT,
        )
        try:
            self._queue.control([watch], 0, 0)
        except OSError:
            self._queue.close()
            raise

    def wait(self) -> None:
        while not self._queue.control(None, 1, None):
            pass
        self._queue.close()


class HandleEnd:
    """A handle with the right to wait. The system does not reuse the PID while it is open."""

    def __init__(self, pid: int, kernel32: Any, last_error: Any) -> None:
        self._kernel32 = kernel32
        # Without these ctypes truncates handles to 32 bits.
        kernel32.OpenProcess.restype = _void_pointer()
        kernel32.WaitForSingleObject.argtypes = (_void_pointer(), _dword())
        kernel32.CloseHandle.argtypes = (_void_pointer(),)
        self._handle = kernel32.OpenProcess(_SYNCHRONIZE, False, pid)
        if not self._handle:
            if last_error() == _ERROR_ACCESS_DENIED:
                raise PermissionError(pid)
            raise ProcessLookupError(pid)
        if kernel32.WaitForSingleObject(self._handle, 0) == 0:  # it has exited, but another handle is open
            kernel32.CloseHandle(self._handle)
            raise ProcessLookupError(pid)

    def wait(self) -> None:
        self._kernel32.WaitForSingleObject(self._handle, _INFINITE)
        self._kernel32.CloseHandle(self._handle)


def _void_pointer() -> Any:
    import ctypes

    return ctypes.c_void_p


def _dword() -> Any:
    import ctypes

    return ctypes.c_uint32
