"""Stops llamasup when the program that started it ends, however it ends.

Either standard input closes (``--sidecar``), which the parent can also do on purpose, or a process exits
(``--parent-pid``). A thread waits for each from the start to the very end: the parent may die at any moment,
and an event loop cannot wait for standard input on Windows.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from llamasup.cli.process import STOP_SIGNALS
from llamasup.errors import UsageInvalid

__all__ = ["ENDINGS", "HURRY_S", "tie_to_parent"]

PARENT_ENDED = "The parent ended"
STDIN_ENDED = "Standard input ended"
ENDINGS = frozenset({PARENT_ENDED, STDIN_ENDED})
"""Reasons for a stop."""
HURRY_S = 1.0
"""Time for requests in flight: their client has probably gone, and llamasup must exit within 2 s (S14)."""


def tie_to_parent(*, stdin: bool, parent_pid: int | None) -> None:
    """Stop from now on when standard input closes or that process exits.

    Raises UsageInvalid if that has already happened or can never happen.
    """
    if parent_pid is not None:
        wait = _process(parent_pid)
        _watch("parent", wait, PARENT_ENDED)
    if stdin:
        nobody = _nobody_at_stdin()
        if not nobody:
            _watch("stdin", _read_to_the_end, STDIN_ENDED)
        elif parent_pid is None:
            raise UsageInvalid(
                f"--sidecar needs a pipe as standard input, to stop when it closes; this is {nobody}.",
                remedy="Start llamasup with a pipe as its standard input and keep it open "
                "(Node: stdio: ['pipe', 'pipe', 'pipe']), or give your process ID with --parent-pid.",
            )


def _process(pid: int) -> Callable[[], None]:
    """A function that blocks until ``pid`` has exited."""
    from llamasup.system.process.exit_watch import end_of
    from llamasup.system.process.identity import began_after

    if pid <= 0 or pid == os.getpid():
        raise UsageInvalid(f"Invalid --parent-pid {pid}: it cannot be the process that started llamasup.")
    try:
        end = end_of(pid)
    except (OSError, OverflowError):
        raise _no_parent(pid, "no such process") from None
    if began_after(pid, os.getpid()):
        raise _no_parent(
            pid, "that process is younger than this one: it reuses the ID of a process that has exited"
        )
    return end.wait


def _no_parent(pid: int, why: str) -> UsageInvalid:
    return UsageInvalid(
        f"--parent-pid {pid}: {why}.",
        remedy="If your program still runs, give its own process ID (os.getpid(), process.pid, $$). "
        "A container has its own process IDs.",
    )


def _nobody_at_stdin() -> str:
    """What standard input is, if no other program can hold it open; otherwise empty."""
    mode = os.fstat(0).st_mode
    if stat.S_ISREG(mode):
        return "a file"
    if stat.S_ISCHR(mode) and not os.isatty(0):
        return os.devnull
    if stat.S_ISCHR(mode) and _is_background_job():
        # The first read would suspend llamasup (SIGTTIN), and a program that waits for its ready line.
        return "a terminal, which a background job cannot read"
    return ""


def _is_background_job() -> bool:
    """Whether a shell started it with ``&`` on the terminal at standard input."""
    if sys.platform == "win32":
        return False
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # not our controlling terminal: reading is allowed
        return False


def _read_to_the_end() -> None:
    """Discards what the parent writes, so that it never blocks."""
    with suppress(OSError):  # EIO: the terminal is gone
        while os.read(0, 65536):
            pass


def _watch(name: str, wait: Callable[[], None], ending: str) -> None:
    def run() -> None:
        wait()
        with suppress(RuntimeError):  # the event loop has just closed: everything is stopped
            STOP_SIGNALS.stop(ending)

    threading.Thread(target=run, name=f"lifeline-{name}", daemon=True).start()
