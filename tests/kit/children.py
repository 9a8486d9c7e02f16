"""The processes that a test has started: those that others left behind, or share, are not counted."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path

import psutil

__all__ = ["NewChildren", "catches", "end_all"]


class NewChildren:
    """Call it for the children of this process that were not there when it was made; a zombie is one."""

    def __init__(self) -> None:
        self._before = set(psutil.Process().children())

    def __call__(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child not in self._before]


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for this signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill it with all that it has started, reap it, and close our ends of its pipes."""
    if process.returncode is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                pipe.close()
