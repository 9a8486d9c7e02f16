"""Keeps the last lines of llamasup's own log in memory, for the control API.

A service prints them on standard error, which readers of the API or of the console do not see.
"""

from __future__ import annotations

import threading
from collections import deque
from datetime import datetime
from itertools import islice
from typing import Final

from llamasup.core.system.text import printable

MAX_LINES: Final = 1000
_MAX_LENGTH: Final = 2000  # letters of a line


class OwnLog:
    """The last lines of the log. It may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._added = 0  # lines, since the start

    def add(self, level: str, text: str) -> None:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        lines = [f"{now} {level}: {printable(line)[:_MAX_LENGTH]}\n" for line in text.splitlines()]
        with self._lock:
            self._lines += lines
            self._added += len(lines)

    def tail(self, lines: int) -> OwnLogTail:
        """Follow the last ``lines`` lines, and the lines to come."""
        with self._lock:
            return OwnLogTail(self, self._added - min(lines, len(self._lines)))

    def after(self, number: int) -> tuple[str, int]:
        """Return the kept lines after the first ``number`` since the start, and the count since the start."""
        with self._lock:
            kept_from = self._added - len(self._lines)
            return "".join(islice(self._lines, max(0, number - kept_from), None)), self._added


class OwnLogTail:
    def __init__(self, log: OwnLog, begin: int) -> None:
        self._log = log
        self._number = begin

    def read(self) -> bytes:
        """Return the next lines; empty if there are none yet."""
        text, self._number = self._log.after(self._number)
        return text.encode()

    def close(self) -> None:
        """Do nothing: the tail holds nothing."""
