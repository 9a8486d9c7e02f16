"""What a process spends: CPU time and bytes read from disks. psutil, imported late (24 ms)."""

from __future__ import annotations

from contextlib import suppress

from llamasup.core.liveness import Effort

__all__ = ["effort"]


def effort(pid: int) -> Effort | None:
    """Of the process and everything it has started: llama-server may be wrapped in a script.

    Takes some milliseconds (psutil looks through all processes): only for a server that is in doubt. None
    if it is gone or may not be looked at.
    """
    import psutil

    try:
        root = psutil.Process(pid)
        stopped = root.status() == psutil.STATUS_STOPPED
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return None
    cpu_s, read_bytes = 0.0, 0
    for process in family:
        with suppress(psutil.Error):
            times = process.cpu_times()
            cpu_s += times.user + times.system
        # Unlike read_chars, read_bytes counts the pages that a memory map brings in. Not on macOS.
        with suppress(psutil.Error, AttributeError, NotImplementedError):
            read_bytes += process.io_counters().read_bytes
    return Effort(cpu_s, read_bytes, stopped)
