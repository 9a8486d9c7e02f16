"""Writes to a stream whose reader may be slow or stuck.

A full pipe blocks the writer, and a blocked event loop would stop every request. So a thread writes, and text
that does not fit into its queue is dropped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import IO

from llamasup.core.system.batch_writer import BatchWriter
from llamasup.core.system.native import native

# A line of a request is about 100 bytes: this is 0.4 MB, twice as many as one core serves while they linger.
MAX_LINES = 4_000
# Lines that must not be lost (events, errors). A crash loop makes some twenty; the bound is for a reader that
# never reads again.
MAX_KEPT = 10_000
# With the log of llama-server, which comes in pieces of up to 64 KiB.
MAX_BYTES = 1 << 20
CLOSE_TIMEOUT_S = 1.0
LINGER_S = 0.1  # collects the lines of requests
_COLUMNS = 80

Text = str | Callable[[], str]


class OutputWriter:
    """One stream's writer. ``write`` never blocks; ``close`` waits a moment for the rest."""

    def __init__(self, stream: IO[str]) -> None:
        self.is_terminal = stream.isatty()
        # Not the stream: a thread that holds the stream's lock would crash the interpreter at its exit.
        self._fd = stream.fileno()
        self._lock = threading.Lock()  # for the next two
        self.held = 0  # characters
        self.left_out = 0
        self._writer: BatchWriter[Text] = BatchWriter(self._write, name="output-writer", linger_s=LINGER_S)

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
        return self.held > MAX_BYTES or len(self._writer) >= MAX_LINES

    def write(self, text: str, *, keep: bool = False) -> None:
        """Write soon. If the reader lags, text without ``keep`` is dropped and counted."""
        with self._lock:
            if len(self._writer) >= MAX_KEPT or (self.is_behind and not keep):
                self.left_out += 1
                return
            self.held += len(text)
        self._writer.put(text, hurry=True)

    def write_later(self, text: Callable[[], str]) -> None:
        """Write within ``LINGER_S``. The writer's thread calls ``text``, unless the reader lags."""
        if self.is_behind:
            with self._lock:
                self.left_out += 1
            return
        self._writer.put(text)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the rest, if the stream is read."""
        self._writer.close(timeout_s)

    # --- in the thread

    def _write(self, texts: list[Text]) -> bool:
        given = sum(len(text) for text in texts if isinstance(text, str))
        with self._lock:  # first: a text that cannot be made must not count for ever
            self.held -= given
        joined = "".join(text if isinstance(text, str) else text() for text in texts)
        content = joined.encode("utf-8", "replace")
        while content:
            try:
                written = os.write(self._fd, content)
            except BlockingIOError:  # the parent made the shared descriptor non-blocking
                native.wait_writable(self._fd)
                continue
            except OSError:
                return False  # the reader is gone, and llamasup continues
            content = content[written:]
        return True
