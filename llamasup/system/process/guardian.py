"""The supervisor's side of its guardian: a small process that cleans up if the supervisor is killed (S14).

PR_SET_PDEATHSIG ends the very process that was spawned, and only on Linux. A llama-server that a wrapper
script started, whatever has left its group, and the run folder with its sockets would stay until the next
start. The guardian (``exec_guardian.py``) sees the supervisor's end as the end of a pipe and then runs the
same sweep as the next start would (``leftovers.py``).

Not there on Windows, where a job object ends all descendants; not in a frozen application, where no Python
can be run; and not for process 1 of a container, with which the kernel ends everything.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llamasup.system.process.platform import python_executable
from llamasup.system.process.run_folder import run_folder

__all__ = ["Guardian", "guarded_run_folder"]

_log = logging.getLogger(__name__)

_EXEC_GUARDIAN = Path(__file__).with_name("exec_guardian.py")
_PACKAGE_ROOT = Path(__file__).parents[3]


class Guardian:
    """Guards ``folder`` until ``close``. Starting it takes 10 ms of another core and blocks nobody."""

    def __init__(self, folder: Path) -> None:
        self._lifeline: int | None = None
        self._thread: threading.Thread | None = None
        if not _can_guard():
            return
        read_fd, self._lifeline = os.pipe()  # neither is inherited by any other child
        self._thread = threading.Thread(target=_start, args=(folder, read_fd), name="guardian", daemon=True)
        self._thread.start()

    def established(self) -> None:
        """Wait until it is there, or will never be."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Let it go. Whoever has removed the folder by then is not cleaned up after."""
        self.established()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


@contextmanager
def guarded_run_folder() -> Iterator[tuple[Path, Guardian]]:
    """The folder of this run, which goes with us in any case."""
    folder = run_folder()
    guardian = Guardian(folder.path)
    try:
        yield folder.path, guardian
    finally:
        folder.close()  # first: a folder that is gone needs no guardian
        guardian.close()


def _can_guard() -> bool:
    return sys.platform != "win32" and os.getpid() != 1 and python_executable() is not None


def _start(folder: Path, read_fd: int) -> None:
    python = python_executable()
    assert python is not None
    # The sweep needs what we could import; the guardian itself (-I) does not look at this.
    paths = [str(_PACKAGE_ROOT), *(path for path in sys.path if path)]
    try:
        subprocess.run(
            [
                *(python, "-I", "-S", str(_EXEC_GUARDIAN), str(folder)),
                *(python, "-m", "llamasup.system.process.sweep", str(folder)),
            ],
            stdin=read_fd,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            cwd="/",
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        # No process to be had (RLIMIT_NPROC, pids.max): the next start will sweep.
        _log.debug("no guardian: %s", error)
    finally:
        os.close(read_fd)
