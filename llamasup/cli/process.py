"""The standard streams of the process, and its signals.

Imported first: a signal may come while the other modules are being imported.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["STOP_SIGNALS", "Interrupted", "StopSignals", "ensure_standard_streams"]


class Interrupted(BaseException):
    """A signal to stop came before there was anything to stop. No Exception: no handler swallows it."""

    def __init__(self, signal_number: int, why: str = "") -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
        self.why = why


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP, from the start of the process to its end.

    Plain handlers: those of an event loop work only while it runs, and not on Windows.
    """

    def __init__(self) -> None:
        self._deliver: Callable[[str], None] | None = None
        self._over = False
        self._why = ""

    def install(self) -> None:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            # A signal that the parent ignores (nohup) stays ignored.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def deliver_to(self, listener: Callable[[str], None]) -> None:
        """Pass the name of each signal to ``listener``, which is called between any two instructions."""
        self._deliver = listener
        if self._why:  # its signal is ignored, or its exception was swallowed
            listener(self._why)

    def raise_again(self) -> None:
        """Remove the listener: a signal raises Interrupted again."""
        self._deliver = None

    def stop(self, why: str) -> None:
        """Stop for a reason other than a signal. Callable from any thread but the main one, at any time."""
        if self._deliver is not None:
            if not self._over:
                self._deliver(why)
            return
        # There is no listener yet. A signal also interrupts what the main thread waits for.
        self._why = why
        if sys.platform == "win32":
            _thread.interrupt_main(signal.SIGTERM)  # there os.kill would end the process
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def end(self) -> None:
        """Everything is stopped: ignore further signals."""
        self._over = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            return
        why, self._why = self._why, ""
        name = why or signal.Signals(number).name
        if self._deliver is None:
            # Kept too: a module that is being imported may swallow the exception, as C modules do.
            self._why = name
            raise Interrupted(number, why)
        self._deliver(name)


STOP_SIGNALS = StopSignals()
"""The one instance of this process."""


def ensure_standard_streams() -> None:
    """Open the streams that the parent has closed (``2>&-``): another file would get their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
