"""A terminal, and a program in it."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.e2e.driver import PATIENCE_S

PROMPT = "(?s)>>>.*?\x1b\\[\\?25h"
"""The prompt of ``llamasup chat``, after which the cursor is shown."""


class Terminal:
    """A terminal of 120 columns and 30 lines, and a program in it."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._master, self._slave = os.openpty()
        termios.tcsetwinsize(self._slave, (30, 120))
        self.modes: list[Any] = termios.tcgetattr(self._slave)
        self._seen = ""
        environ = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **(env or {})}
        self._process = subprocess.Popen(
            argv,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env=environ,
            start_new_session=True,
        )

    def shows(self, pattern: str) -> str:
        """Read what it writes until ``pattern`` appears. Returns the text since the pattern before."""
        deadline_s = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self._seen)) is None:
            left_s = max(0.0, deadline_s - time.monotonic())
            assert select.select([self._master], [], [], left_s)[0], f"no {pattern} in {self._seen[-5000:]!r}"
            self._seen += os.read(self._master, 65_536).decode("utf-8", "replace")
        text, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return text

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        self._process.terminate()

    def interrupt(self) -> None:
        """Send what a terminal sends for Ctrl-C in its usual mode: SIGINT to the group in the foreground."""
        os.killpg(self.pid, signal.SIGINT)

    def end(self) -> int:
        """Its exit code. Checks that the terminal is as before."""
        code = self._process.wait(PATIENCE_S)
        assert termios.tcgetattr(self._slave) == self.modes
        return code

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)
        os.close(self._slave)
