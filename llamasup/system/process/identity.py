"""Identifies processes although PIDs are reused.

A PID is reused after 32,768 processes, or after a restart of the machine. A PID with the start time of its
process is unique. The start time comes from the kernel's counter and not from the wall clock, which jumps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["began_after", "is_tagged", "kill_if", "processes_tagged", "start_of"]

_ENDED = frozenset("ZXx")  # proc(5): zombie, dead


def start_of(pid: int, proc: Path = Path("/proc")) -> str | None:
    """The start time of ``pid`` as an opaque string; None if it has exited (zombies too) or is not visible.

    psutil adds the ticks since boot to a boot time that follows the wall clock: after a jump, the same
    process would have another start time. So on Linux the string is the boot id and the ticks.
    """
    if sys.platform != "linux":
        return _start_by_psutil(pid)
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].decode().split()  # the name of a process may contain `)`
    state, ticks = fields[0], fields[19]
    return None if state in _ENDED else f"{boot}/{ticks}"


def began_after(pid: int, other: int) -> bool:
    """Whether ``pid`` started later than ``other``; False if unknown."""
    one, two = start_of(pid), start_of(other)
    return one is not None and two is not None and _moment(one) > _moment(two)


def _moment(start: str) -> float:
    return float(start.rpartition("/")[2])


def _start_by_psutil(pid: int) -> str | None:
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"{process.create_time():.6f}"
    except psutil.Error:
        return None


def processes_tagged(entry: bytes) -> list[int]:
    """The other processes of this user for which ``is_tagged`` is true."""
    if sys.platform != "linux":
        return []
    numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - every process
    return [pid for pid in numbers if pid != os.getpid() and is_tagged(pid, entry)]


def is_tagged(pid: int, entry: bytes) -> bool:
    """Whether ``pid`` runs, is this user's, and has an environment entry that starts with ``entry``.

    Known only on Linux; elsewhere False.
    """
    folder = f"/proc/{pid}"
    try:
        if os.stat(folder).st_uid != os.geteuid():  # noqa: PTH116
            return False
        with open(f"{folder}/environ", "rb") as file:  # noqa: PTH123
            environ = file.read()
    except OSError:  # it has just exited, or its environment is hidden (PR_SET_DUMPABLE)
        return False
    return environ.startswith(entry) or b"\0" + entry in environ


def kill_if(pid: int, is_the_one: Callable[[], bool], *, group: bool = False) -> bool:
    """Kill ``pid`` (with ``group``: the process group that it leads) if ``is_the_one``.

    A pidfd keeps the PID from being reused between the check and the signal.
    """
    if pid <= 1:  # kill(2) reads 0 as our own group, and the group of 1 as every process
        return False
    handle = None
    with contextlib.suppress(OSError, AttributeError):
        handle = os.pidfd_open(pid)
    try:
        if not is_the_one():
            return False
        if group:
            os.killpg(pid, signal.SIGKILL)
        elif handle is None:
            os.kill(pid, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
        else:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True
