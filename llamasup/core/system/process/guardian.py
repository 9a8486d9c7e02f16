"""Starts the guardian: a small process that cleans up if the supervisor is killed (S14).

PR_SET_PDEATHSIG (``exec_child.py``) ends only the spawned process, and only on Linux. A llama-server that a
wrapper script started, processes outside its group, and the run folder with its sockets would stay until the
next start. The guardian (``exec_guardian.py``) notices the supervisor's end as the end of a pipe, and then
runs the same sweep as the next start would (``sweep.py``).

On Windows a job object ends all descendants, and the guardian removes the files. There is none in a frozen
application that cannot start parts of llamasup (``own_command.py``); and none for process 1 of a container,
with which the kernel ends everything.
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

from llamasup.core.system.native import native
from llamasup.core.system.own_command import own_command
from llamasup.core.system.process.run_folder import run_folder

_log = logging.getLogger(__name__)

_PACKAGE_ROOT = Path(__file__).parents[4]


class Guardian:
    """Guards ``folder`` until ``close``. It starts in a thread, which takes 10 ms of another core."""

    def __init__(self, folder: Path) -> None:
        self._lifeline: int | None = None
        self._thread: threading.Thread | None = None
        if os.getpid() == 1 or own_command("exec_guardian") is None:
            return
        read_fd, self._lifeline = os.pipe()  # other children inherit neither end
        self._thread = threading.Thread(target=_start, args=(folder, read_fd), name="guardian", daemon=True)
        self._thread.start()

    @property
    def is_started(self) -> bool:
        """Whether it runs, or failed to start."""
        return self._thread is None or not self._thread.is_alive()

    def wait_until_started(self) -> None:
        """Wait until it runs, or failed to start."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Let it exit. It cleans up only if the folder still exists."""
        self.wait_until_started()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


@contextmanager
def guarded_run_folder() -> Iterator[tuple[Path, Guardian]]:
    """Yield the run folder of this process, which is removed at the end of the block, or by the guardian."""
    folder = run_folder()
    guardian = Guardian(folder.path)
    try:
        yield folder.path, guardian
    finally:
        folder.close()  # first: once the folder is gone, the guardian does nothing
        guardian.close()


def _start(folder: Path, read_fd: int) -> None:
    guardian, sweep = own_command("exec_guardian"), own_command("sweep")
    assert guardian is not None
    assert sweep is not None
    # For the sweep. The guardian itself (-I) ignores PYTHONPATH.
    paths = [str(_PACKAGE_ROOT), *(path for path in sys.path if path)]
    try:
        native.start_guardian(
            [*guardian, str(folder), *sweep, str(folder)],
            read_fd,
            os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
    except (OSError, subprocess.CalledProcessError) as error:
        # No more processes allowed (RLIMIT_NPROC, pids.max): the next start will sweep.
        _log.debug("the guardian could not be started: %s", error)
    finally:
        os.close(read_fd)
