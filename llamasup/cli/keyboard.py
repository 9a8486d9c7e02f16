"""Reads single keys from the terminal on standard input."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Keyboard", "keyboard"]

# What terminals send for the keys; Windows' console sends two characters.
_SEQUENCE = re.compile(rb"\x1b(?:[\[O][0-?]*[ -/]*[@-~])?|[^\x1b]", re.DOTALL)
_NAMES = {b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b": "escape"}
_WINDOWS = {"H": "up", "P": "down"}
_POLL_S = 0.05


if sys.platform == "win32":

    class Keyboard:
        """``next`` waits for a key."""

        def next(self, timeout_s: float) -> str | None:
            """A character, or ``up``, ``down``, ``escape``; None: no key in time, or one without a name."""
            import msvcrt

            deadline_s = time.monotonic() + timeout_s
            while not msvcrt.kbhit():
                if time.monotonic() >= deadline_s:
                    return None
                time.sleep(_POLL_S)  # there is no event to wait for
            pressed = msvcrt.getwch()
            if pressed in ("\x00", "\xe0"):
                return _WINDOWS.get(msvcrt.getwch())
            return "escape" if pressed == "\x1b" else pressed

    @contextmanager
    def keyboard() -> Iterator[Keyboard]:
        """The keys arrive at once, and are not shown. Ctrl-C stays a signal."""
        yield Keyboard()

else:

    class Keyboard:
        """``next`` waits for a key."""

        def __init__(self) -> None:
            self._unread = b""

        def next(self, timeout_s: float) -> str | None:
            """A character, or ``up``, ``down``, ``escape``; None: no key in time, or one without a name.

            Raises EOFError at the end of standard input.
            """
            import select

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
    def keyboard() -> Iterator[Keyboard]:
        """The keys arrive at once, and are not shown. Ctrl-C stays a signal."""
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin)
        try:
            tty.setcbreak(sys.stdin)
            yield Keyboard()
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
