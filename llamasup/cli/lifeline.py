"""Ties llamasup to the program that started it: when that ends, however it ends, llamasup stops.

Two ways, each enough: standard input comes to its end (``--sidecar``), which the parent can also bring about
on purpose by closing it; or a process ends (``--parent-pid``). Each is waited for by a thread, from before
the model is looked at until the very end: the parent may die at any moment, and the event loop has no way to
wait for standard input that works on Windows too.
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
"""As the reason for a stop."""
HURRY_S = 1.0
"""How long requests in flight may still take: who asked is probably gone, and in 2 s we must be too (S14)."""


def tie_to_parent(*, stdin: bool, parent_pid: int | None) -> None:
    """From now on stop when standard input or that process ends.

    Raises UsageInvalid where that has happened already or can never happen.
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
                f"--sidecar stops when standard input ends, and that is {nobody}.",
                remedy="Start llamasup with a pipe as its standard input and keep it open "
                "(Node: stdio: ['pipe', 'pipe', 'pipe']), or add --parent-pid with your process's number.",
            )


def _process(pid: int) -> Callable[[], None]:
    """What blocks until ``pid`` has ended."""
    from llamasup.system.process.exit_watch import end_of
    from llamasup.system.process.identity import began_after

    if pid <= 0 or pid == os.getpid():
        raise UsageInvalid(f"--parent-pid {pid} cannot be the process that started llamasup.")
    try:
        end = end_of(pid)
    except (OSError, OverflowError):
        raise _no_parent(pid, "there is no such process") from None
    if began_after(pid, os.getpid()):
        raise _no_parent(pid, "that process began after this one: it has got the number of one that ended")
    return end.wait


def _no_parent(pid: int, why: str) -> UsageInvalid:
    return UsageInvalid(
        f"--parent-pid {pid}: {why}.",
        remedy="If your program still runs, give its own process number (os.getpid(), process.pid, $$); "
        "inside a container numbers are others than outside.",
    )


def _nobody_at_stdin() -> str:
    """What is at standard input where no other program can be, and why that will not do; else empty."""
    mode = os.fstat(0).st_mode
    if stat.S_ISREG(mode):
        return "a file: it has ended already"
    if stat.S_ISCHR(mode) and not os.isatty(0):
        return f"{os.devnull}: it has ended already"
    if stat.S_ISCHR(mode) and _is_background_job():
        # The first read would stop us, and with us whoever waits for the ready line (SIGTTIN).
        return "a terminal that a background job may not read"
    return ""


def _is_background_job() -> bool:
    """Of the terminal at standard input: a shell's ``&``."""
    if sys.platform == "win32":
        return False
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # a terminal, but not ours: nothing keeps us from reading it
        return False


def _read_to_the_end() -> None:
    """What the parent writes means nothing, yet must be taken from it lest it wait for ever."""
    with suppress(OSError):  # EIO: the terminal is gone
        while os.read(0, 65536):
            pass


def _watch(name: str, wait: Callable[[], None], ending: str) -> None:
    def run() -> None:
        wait()
        with suppress(RuntimeError):  # the event loop has just closed: everything is stopped
            STOP_SIGNALS.stop(ending)

    threading.Thread(target=run, name=f"lifeline-{name}", daemon=True).start()
