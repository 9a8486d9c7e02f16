"""Runs ``llamasup`` commands in forks of one process that has imported the package already.

Python and the imports take 0.35 s of CPU for each new process, a fork takes 0.03 s, and the tests run a
thousand commands. A fork is a process of its own: signals, exit code and output are those of the command.
What only a new interpreter shows, tests start with ``driver.command``: late imports and a signal during them,
closed standard streams, and the end of the interpreter, which a fork skips. ``test_forked.py`` compares both.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

from tests.kit.patience import PATIENCE_S

__all__ = ["ForkedCommand", "forked_to_end"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.e2e.forked", "tests.e2e.preloaded"])


class ForkedCommand:
    """``llamasup ARGUMENTS…`` as a running process. A part of the interface of ``subprocess.Popen[str]``."""

    def __init__(
        self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | str | None = None
    ) -> None:
        self.args = ["llamasup", *arguments]
        (stdout, its_stdout), (stderr, its_stderr) = (_CONTEXT.Pipe(duplex=False) for _ in range(2))
        environment = dict(os.environ if env is None else env)
        with stdout, stderr, its_stdout, its_stderr:
            self._process = _CONTEXT.Process(
                target=_run, args=(self.args, environment, str(cwd or Path.cwd()), its_stdout, its_stderr)
            )
            self._process.start()
            self.stdin = None
            self.stdout, self.stderr = (_file(pipe) for pipe in (stdout, stderr))
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def forked_to_end(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | str | None = None
) -> subprocess.CompletedProcess[str]:
    process = ForkedCommand(*arguments, env=env, cwd=cwd)
    with process.stdout, process.stderr, ThreadPoolExecutor(2) as threads:
        output = [threads.submit(pipe.read) for pipe in (process.stdout, process.stderr)]
        try:
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, code, *(read.result() for read in output))


def _file(pipe: Connection) -> TextIO:
    return os.fdopen(os.dup(pipe.fileno()))


def _run(
    arguments: Sequence[str], env: Mapping[str, str], cwd: str, stdout: Connection, stderr: Connection
) -> None:
    """In the fork."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    with Path(os.devnull).open("rb") as nothing:  # with pytest -s it would be the terminal
        os.dup2(nothing.fileno(), 0)
    for number, pipe in ((1, stdout), (2, stderr)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.argv[:] = arguments
    from llamasup.cli import main

    try:
        main()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # an interpreter waits for its threads first
        atexit._run_exitfuncs()
