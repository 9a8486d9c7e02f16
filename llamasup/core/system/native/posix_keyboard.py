"""Reads single keys from a terminal of a POSIX system."""

from __future__ import annotations

import sys

assert sys.platform != "win32"

import os
import re
import select
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

# What terminals send for the keys.
_SEQUENCE = re.compile(rb"\x1b(?:[\[O][0-?]*[ -/]*[@-~])?|[^\x1b]", re.DOTALL)
_NAMES = {b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b": "escape"}


class PosixKeyboard:
    """See ``interface.Keyboard``."""

    def __init__(self) -> None:
        self._unread = b""

    def next(self, timeout_s: float) -> str | None:
        if not self._unread:
            if not select.select([sys.stdin], [], [], timeout_s)[0]:
                return None
            self._unread = os.read(sys.stdin.fileno(), 256)  # the bytes of one key arrive together
            if not self._unread:
                raise EOFError
        key = _SEQUENCE.match(self._unread)
        assert key is not None
        self._unread = self._unread[key.end() :]
        if len(key[0]) > 1 or key[0] == b"\x1b":
            return _NAMES.get(key[0])
        return key[0].decode("ascii", "replace")


@contextmanager
def keyboard() -> Iterator[PosixKeyboard]:
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield PosixKeyboard()
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
