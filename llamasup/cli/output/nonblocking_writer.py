"""Writes to a stream whose reader may be slow or stuck.

A full pipe blocks the writer, and a blocked event loop would stop every request. So a thread writes, and text
that does not fit into its queue is dropped.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from typing import IO

__all__ = ["OutputWriter"]

# A request's line is about 100 bytes: this is 0.1 MB, and minutes of a reader that lags.
MAX_LINES = 1000
# Lines that must not be lost (events, errors). A crash loop makes some twenty; the bound is for a reader that
# never reads again.
MAX_KEPT = 10_000
# With the log of llama-server, which comes in pieces of up to 64 KiB.
MAX_BYTES = 1 << 20
CLOSE_TIMEOUT_S = 1.0
_COLUMNS = 80


class OutputWriter:
    """One stream's writer. ``write`` never blocks; ``close`` waits a moment for the rest."""

    def __init__(self, stream: IO[str]) -> None:
        self.is_terminal = stream.isatty()
        # Not the stream: a thread that holds the stream's lock would crash the interpreter at its exit.
        self._fd = stream.fileno()
        self._texts: deque[str] = deque()
        self.held = 0  # characters
        self.left_out = 0
        self._closing = False
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def columns(self) -> int:
        """The width of the terminal; 80 if it is unknown."""
        try:
            return os.get_terminal_size(self._fd).columns or _COLUMNS
        except OSError:
            return _COLUMNS

    @property
    def is_behind(self) -> bool:
        """Whether text without ``keep`` would be dropped."""
        return self.held > MAX_BYTES or len(self._texts) >= MAX_LINES

    def write(self, text: str, *, keep: bool = False) -> None:
        """Write soon. If the reader lags, text without ``keep`` is dropped and counted."""
        with self._condition:
            if len(self._texts) >= MAX_KEPT or (self.is_behind and not keep):
                self.left_out += 1
                return
            self._texts.append(text)
            self.held += len(text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="output-writer", daemon=True)
                self._thread.start()
            self._condition.notify()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the rest, if the stream is read."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._texts and not self._closing:
                    self._condition.wait()
                if not self._texts:
                    return
                text = "".join(self._texts)
                self._texts.clear()
                self.held = 0
            if not self._write(text.encode("utf-8", "replace")):
                return

    def _write(self, content: bytes) -> bool:
        while content:
            try:
                written = os.write(self._fd, content)
            except BlockingIOError:  # the parent made the shared descriptor non-blocking
                select.select([], [self._fd], [])
                continue
            except OSError:
                return False  # the reader is gone, and llamasup goes on
            content = content[written:]
        return True
