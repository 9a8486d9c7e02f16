"""Identifies processes although PIDs are reused.

A PID is reused after 32,768 processes, or after a restart of the machine. A PID with the start time of its
process is unique. The start time comes from the kernel's counter and not from the wall clock, which jumps.
"""

from __future__ import annotations

from collections.abc import Callable

from llamasup.core.system.native import native


def began_after(pid: int, other: int) -> bool:
    """Return whether ``pid`` started later than ``other``; False if unknown."""
    one, two = native.start_of(pid), native.start_of(other)
    return bool(one and two) and _moment(str(one)) > _moment(str(two))


def _moment(start: str) -> float:
    return float(start.rpartition("/")[2])


def kill_if(pid: int, is_the_one: Callable[[], bool], *, group: bool = False) -> bool:
    """Kill ``pid`` (with ``group``: the process group that it leads) if ``is_the_one``."""
    # kill(2) reads 0 as our own group, and the group of 1 as every process.
    return pid > 1 and native.kill_if(pid, is_the_one, group=group)
