"""Runs short commands and returns their output.

Time and output are bounded, and no process, thread or pipe is left behind.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from msgspec import Struct

from llamasup.core.system.native import native

# The longest real output, --help of llama.cpp b11434, is 59 KB.
_MAX_BYTES = 4 * 1024 * 1024
# How long descendants of an exited program may keep its pipes open.
_GRACE_S = 0.5


class CommandResult(Struct, frozen=True):
    """The output and the exit code of a program; -N for signal N.

    ``too_slow`` and ``too_long``: it was killed for this reason, and the output is what it had printed.
    """

    exit_code: int
    stdout: str
    stderr: str
    too_slow: bool = False
    too_long: bool = False


def run_commands(
    commands: Sequence[Sequence[str]], *, env: Mapping[str, str], cwd: str, timeout_s: float
) -> tuple[CommandResult, ...]:
    """Run all commands at the same time, without input, and wait for their results.

    ``timeout_s`` is for all of them together. Raises the OSError of a command that cannot be started.
    """
    deadline = time.monotonic() + timeout_s
    running: list[_RunningCommand] = []
    try:
        for command in commands:
            running.append(_RunningCommand(command, env, cwd))  # noqa: PERF401 - ended below if a later one fails
        return tuple(command.result(deadline) for command in running)
    finally:
        for started in running:
            started.end()


class _RunningCommand:
    """A running program, a thread that waits for its exit, and threads that read its output."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        self._process, self._job = native.start_in_job(
            lambda flags: subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,  # its own process group, which is killed with its descendants
                creationflags=flags,
            )
        )
        self._printed = (bytearray(), bytearray())
        self._too_long = False
        streams = (self._process.stdout, self._process.stderr)
        self._readers = [
            threading.Thread(target=self._drain, args=pair, daemon=True)
            for pair in zip(streams, self._printed, strict=True)
        ]
        self._end = threading.Thread(target=self._process.wait, daemon=True)
        for thread in (self._end, *self._readers):
            thread.start()

    def _drain(self, stream: IO[bytes], printed: bytearray) -> None:
        with stream:
            while chunk := stream.read(65_536):
                printed += chunk
                if len(printed) > _MAX_BYTES:
                    self._too_long = True
                    self._kill()
                    return

    def result(self, deadline: float) -> CommandResult:
        self._end.join(max(0.0, deadline - time.monotonic()))
        too_slow = self._end.is_alive()
        if not too_slow:
            self._join_readers()
        self.end()
        stdout, stderr = (bytes(printed).decode("utf-8", "replace") for printed in self._printed)
        return CommandResult(self._process.returncode, stdout, stderr, too_slow, self._too_long)

    def end(self) -> None:
        """Kill its process group, and end its threads and pipes. May be repeated."""
        if self._end.is_alive() or any(reader.is_alive() for reader in self._readers):
            self._kill()
            self._end.join()
            self._join_readers()
        if self._job is not None:
            self._job.close()

    def _join_readers(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def _kill(self) -> None:
        # After the program exited, others of its group may still hold its pipes.
        if self._job is not None:
            self._job.kill()
        else:
            native.kill_group(self._process)
