"""Stops llamasup when the program that started it exits.

With --sidecar, the closing of standard input shows that it exits; it can also close it on purpose. With
--parent-pid, the exit of that process does. A thread waits for each: an event loop cannot wait for standard
input on Windows, and the parent may exit before llamasup has an event loop.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress

from llamasup.cli.stop_signals import CONSOLE_CLOSED, STOP_SIGNALS
from llamasup.errors import UsageInvalid

PARENT_ENDED = "The parent ended"
STDIN_ENDED = "Standard input ended"
PARENT_STOP_REASONS = frozenset({PARENT_ENDED, STDIN_ENDED, CONSOLE_CLOSED})


def tie_to_parent(*, stdin: bool, parent_pid: int | None) -> None:
    """Stop from now on when standard input closes or that process exits.

    Raises UsageInvalid if that has already happened or can never happen.
    """
    if parent_pid is not None:
        _watch("parent", _exit_waiter(parent_pid), PARENT_ENDED)
    if stdin:
        unusable = _unusable_stdin()
        if not unusable:
            _watch("stdin", _read_to_the_end, STDIN_ENDED)
        elif parent_pid is None:
            raise UsageInvalid(
                f"--sidecar needs a pipe as standard input, to stop when it closes; this is {unusable}.",
                remedy="Start llamasup with a pipe as its standard input and keep it open "
                "(Node: stdio: ['pipe', 'pipe', 'pipe']), or give your process ID with --parent-pid.",
            )


def _exit_waiter(pid: int) -> Callable[[], None]:
    """A function that blocks until ``pid`` has exited."""
    from llamasup.core.system.native import native

    if pid <= 0 or pid == os.getpid():
        raise _no_parent(pid, "it cannot be the process that started llamasup")
    try:
        wait = native.wait_for_exit(pid)
    except (OSError, OverflowError):
        raise _no_parent(pid, "no such process") from None
    if native.began_after(pid, os.getpid()):
        raise _no_parent(
            pid, "that process started after llamasup: it reuses the ID of a process that has exited"
        )
    return wait


def _no_parent(pid: int, problem: str) -> UsageInvalid:
    return UsageInvalid(
        f"--parent-pid {pid}: {problem}.",
        remedy="If your program still runs, give its own process ID (os.getpid(), process.pid, $$). "
        "A container has its own process IDs.",
    )


def _unusable_stdin() -> str:
    """Describes a standard input that no other program can hold open; empty for a usable one."""
    from llamasup.core.system.native import native

    mode = os.fstat(0).st_mode
    if stat.S_ISREG(mode):
        return "a file"
    if stat.S_ISCHR(mode) and not native.is_terminal(0):
        return os.devnull
    if stat.S_ISCHR(mode) and native.is_background_job():
        # The first read would suspend llamasup (SIGTTIN), and its parent would wait for it forever.
        return "a terminal, which a background job cannot read"
    return ""


def _read_to_the_end() -> None:
    """Discards what the parent writes, so that it never blocks."""
    with suppress(OSError):  # EIO: the terminal is gone
        while os.read(0, 65536):
            pass


def _watch(name: str, wait: Callable[[], None], reason: str) -> None:
    def run() -> None:
        wait()
        with suppress(RuntimeError):  # the event loop has just closed: everything is stopped
            STOP_SIGNALS.stop(reason)

    threading.Thread(target=run, name=f"parent-watch-{name}", daemon=True).start()
