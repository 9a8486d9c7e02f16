"""Reads single keys from a console of Windows."""

from __future__ import annotations

import sys

assert sys.platform == "win32"

import msvcrt
import time
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = {"H": "up", "P": "down"}  # the second of two characters
_POLL_S = 0.05


class WindowsKeyboard:
    """See ``interface.Keyboard``."""

    def next(self, timeout_s: float) -> str | None:
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
def keyboard() -> Iterator[WindowsKeyboard]:
    yield WindowsKeyboard()
