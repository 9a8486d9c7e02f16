"""What the operating system gives a process and takes for granted: three open streams, and signals.

Imported before everything else: a signal may come while the rest is still being imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["STOP_SIGNALS", "Interrupted", "StopSignals", "ensure_standard_streams"]


class Interrupted(BaseException):
    """A signal to stop came before there was anything to stop. Not an error: nobody may swallow it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP, from the first moment to the last.

    Plain handlers, not the event loop's: those are in force only while the loop runs, and Windows has none.
    """

    def __init__(self) -> None:
        self._deliver: Callable[[str], None] | None = None
        self._over = False

    def install(self) -> None:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            # Ignored by our parent (nohup): it stays ignored.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def deliver_to(self, listener: Callable[[str], None]) -> None:
        """From now on ``listener`` hears the signal's name. It is called between any two instructions."""
        self._deliver = listener

    def end(self) -> None:
        """Everything is stopped: a signal can change nothing any more."""
        self._over = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            return
        if self._deliver is None:
            raise Interrupted(number)
        self._deliver(signal.Signals(number).name)


STOP_SIGNALS = StopSignals()
"""Of this process: there is one, as of the signals themselves."""


def ensure_standard_streams() -> None:
    """Open what the parent has closed (``2>&-``): the next file opened would get its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
