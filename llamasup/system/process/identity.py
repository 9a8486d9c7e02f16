"""Tells a process from every other one that has had, or will get, its number.

A number comes back: after 32,768 processes, or after a restart of the machine. What never comes back is the
number together with the moment of its birth, read from the kernel's own count and not from the wall clock,
which jumps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["began_after", "carries", "kill_if", "processes_tagged", "start_of"]

_ENDED = frozenset("ZXx")  # proc(5): zombie, dead


def start_of(pid: int, proc: Path = Path("/proc")) -> str | None:
    """When ``pid`` began, as an opaque word; None if it has ended (a zombie has) or is not visible here.

    psutil adds the ticks since boot to a boot time that follows the wall clock: after a jump the same process
    would seem to be another one. So on Linux it is the ticks themselves, and the boot that they count from.
    """
    if sys.platform != "linux":
        return _start_by_psutil(pid)
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].decode().split()  # a process may have a `)` in its name
    state, ticks = fields[0], fields[19]
    return None if state in _ENDED else f"{boot}/{ticks}"


def began_after(pid: int, other: int) -> bool:
    """Whether ``pid`` began later than ``other``; not where it cannot be told."""
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
    """The processes of this user, ourselves excepted, that ``carries`` is true of."""
    if sys.platform != "linux":
        return []
    numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - every process
    return [pid for pid in numbers if pid != os.getpid() and carries(pid, entry)]


def carries(pid: int, entry: bytes) -> bool:
    """Whether ``pid`` lives, is this user's, and began with an environment entry that starts with ``entry``.

    Only Linux tells; elsewhere the answer is no.
    """
    folder = f"/proc/{pid}"
    try:
        if os.stat(folder).st_uid != os.geteuid():  # noqa: PTH116
            return False
        with open(f"{folder}/environ", "rb") as file:  # noqa: PTH123
            environ = file.read()
    except OSError:  # it has just ended, or hides (PR_SET_DUMPABLE)
        return False
    return environ.startswith(entry) or b"\0" + entry in environ


def kill_if(pid: int, is_the_one: Callable[[], bool], *, group: bool = False) -> bool:
    """Kill ``pid`` (with ``group``: all of the process group that it leads) if it is the one that is meant.

    With a pidfd the number cannot pass to another process between the look and the signal.
    """
    if pid <= 1:  # to kill(2), 0 is our own group, and the group of 1 is every process there is
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
