"""Reads single keys from a terminal, or from a console of Windows: they arrive at once and are not shown.

Ctrl-C stays a signal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

if sys.platform == "win32":
    import msvcrt
    import time

    _NAMES = {"H": "up", "P": "down"}  # the second of two characters
    _POLL_S = 0.05

    class Keyboard:
        """A reader of the keys that are pressed."""

        def next(self, timeout_s: float) -> str | None:
            """Return a character, or ``up``, ``down``, ``escape``.

            Returns None without a key in time, and for a key without a name.
            """
            deadline_s = time.monotonic() + timeout_s
            while not msvcrt.kbhit():
                if time.monotonic() >= deadline_s:
                    return None
                time.sleep(_POLL_S)  # there is no event to wait for
            pressed = msvcrt.getwch()
            if pressed in ("\x00", "\xe0"):
                return _NAMES.get(msvcrt.getwch())
            return "escape" if pressed == "\x1b" else pressed

    @contextmanager
    def keyboard() -> Iterator[Keyboard]:
        yield Keyboard()

else:
    import os
    import re
    import select
    import termios
    import tty

    # What terminals send for the keys.
    _SEQUENCE = re.compile(rb"\x1b(?:[\[O][0-?]*[ -/]*[@-~])?|[^\x1b]", re.DOTALL)
    _NAMES = {b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b": "escape"}

    class Keyboard:
        """A reader of the keys that are pressed."""

        def __init__(self) -> None:
            self._unread = b""

        def next(self, timeout_s: float) -> str | None:
            """Return a character, or ``up``, ``down``, ``escape``.

            Returns None without a key in time, and for a key without a name. Raises EOFError at the end of
            standard input.
            """
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
        before = termios.tcgetattr(sys.stdin)
        try:
            tty.setcbreak(sys.stdin)
            yield Keyboard()
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
