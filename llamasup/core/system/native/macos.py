"""Implements the interface for macOS and the BSDs, with kqueue and psutil.

Tested with fakes only: see docs/sidecar.md.
"""

from __future__ import annotations

import sys

assert sys.platform != "win32"

import os
from typing import TYPE_CHECKING, Any

from llamasup.core.system.native.posix import Posix

if TYPE_CHECKING:  # see __init__.py
    from collections.abc import Callable


class KqueueEnd:
    """Waits for the exit of a process: kqueue(2), EVFILT_PROC with NOTE_EXIT.

    Registering a process that does not exist is an error.
    """

    def __init__(self, pid: int, api: Any = None) -> None:
        if api is None:
            import select as api
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


class MacOS(Posix):
    has_proc = False
    socket_path_bytes = 103  # sockaddr_un has 104, with the terminating NUL
    cache_variable = "" if sys.platform == "darwin" else "XDG_CACHE_HOME"
    cache_in_home = "Library/Caches" if sys.platform == "darwin" else ".cache"

    def start_of(self, pid: int) -> str | None:
        import psutil

        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            return f"{process.create_time():.6f}"
        except psutil.Error:
            return None

    def tagged(self, entry: bytes) -> list[int]:
        """psutil reads the environment of this user's processes (KERN_PROCARGS2)."""
        import psutil

        return [pid for pid in psutil.pids() if pid != os.getpid() and self.is_tagged(pid, entry)]

    def is_tagged(self, pid: int, entry: bytes) -> bool:
        import psutil

        name, _, value = os.fsdecode(entry).partition("=")
        try:
            process = psutil.Process(pid)
            if process.uids().effective != os.geteuid() or process.status() == psutil.STATUS_ZOMBIE:
                return False
            found = process.environ().get(name)
        except (psutil.Error, OSError):  # it has just exited, or is protected (SIP)
            return False
        return found is not None and f"{found}\0".startswith(value)

    def wait_for_exit(self, pid: int) -> Callable[[], None]:
        return KqueueEnd(pid).wait
