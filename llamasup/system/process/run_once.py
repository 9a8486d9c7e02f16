"""Ask a program something: run it briefly and take what it prints.

Bounded in time and in size, and nothing of it stays behind. What the answer means is for others to say.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

__all__ = ["Answer", "ask"]

# The longest real answer, --help of llama.cpp b11434, is 59 KB.
_MAX_BYTES = 4 * 1024 * 1024
# How long the pipes of a program that has ended may stay open in something that it started.
_GRACE_S = 0.5

if sys.platform == "win32":
    _CREATION_FLAGS = subprocess.CREATE_NO_WINDOW
else:
    _CREATION_FLAGS = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program printed, and how it ended: ``exit_code`` is -N for signal N.

    ``too_slow`` and ``too_long``: it was killed for it, and what it had printed by then is kept.
    """

    exit_code: int
    stdout: str
    stderr: str
    too_slow: bool = False
    too_long: bool = False


def ask(
    commands: Sequence[Sequence[str]], *, env: Mapping[str, str], cwd: str, timeout_s: float
) -> tuple[Answer, ...]:
    """Run all the commands at the same time, without input, and wait for their answers.

    ``timeout_s`` is for all of them together. Raises the OSError of a command that cannot be started.
    """
    deadline = time.monotonic() + timeout_s
    questions: list[_Question] = []
    try:
        for command in commands:
            questions.append(_Question(command, env, cwd))  # noqa: PERF401 - those begun must end if one fails
        return tuple(question.answer(deadline) for question in questions)
    finally:
        for question in questions:
            question.end()


class _Question:
    """One running program, the thread that waits for its end, and those that drain it up to the limit."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,  # its own process group, so that whatever it starts can be ended with it
            creationflags=_CREATION_FLAGS,
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

    def answer(self, deadline: float) -> Answer:
        self._end.join(max(0.0, deadline - time.monotonic()))
        too_slow = self._end.is_alive()
        if not too_slow:
            self._join_readers()
        self.end()
        stdout, stderr = (bytes(printed).decode("utf-8", "replace") for printed in self._printed)
        return Answer(self._process.returncode, stdout, stderr, too_slow, self._too_long)

    def end(self) -> None:
        """Leave nothing of it: neither a process of its group, nor a thread, nor a pipe. May be repeated."""
        if self._end.is_alive() or any(reader.is_alive() for reader in self._readers):
            self._kill()
            self._end.join()
            self._join_readers()

    def _join_readers(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def _kill(self) -> None:
        # A program that has ended may have left others of its group, holding its pipes.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
