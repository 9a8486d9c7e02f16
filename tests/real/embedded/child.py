"""A child that behaves like llama-server, and its log as it is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from tests.kit.children import catches
from tests.kit.patience import PATIENCE_S

__all__ = ["COMMAND", "PATIENCE_S", "Child"]

COMMAND = [sys.executable, "-m", "llamasup.embedded"]


class Child:
    """Started at once. ``lines`` is its stderr so far; ``ready`` waits for the ready line, not for a time."""

    def __init__(self, arguments: Sequence[str], environ: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environ or {})},
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str) -> str:
        """The first line with ``text``; fails when the log ends without it."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._find(text) is not None, PATIENCE_S)
            found = self._find(text)
        assert found is not None, f"no {text!r} in the log:\n" + "".join(self.lines)
        return found

    def ready(self) -> str:
        """Where it listens, from the ready line, once the model is loaded."""
        return self.wait_for("listening on ").partition("listening on ")[2].strip()

    def armed(self) -> str:
        """``ready``, and its signal handlers are in place: they come a moment later (docs/embedded.md)."""
        where = self.ready()
        deadline = time.monotonic() + PATIENCE_S
        while not catches(self.process.pid, signal.SIGTERM) and time.monotonic() < deadline:
            time.sleep(0.001)  # the kernel's table of handlers has no event to wait for
        return where

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.exit_code()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def _find(self, text: str) -> str | None:
        return next((line for line in self.lines if text in line), None)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
