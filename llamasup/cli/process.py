"""What the operating system gives a process and takes for granted: three open streams, and signals.

Imported before everything else: a signal may come while the rest is still being imported.
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
    """A signal to stop came before there was anything to stop. Not an error: nobody may swallow it."""

    def __init__(self, signal_number: int, why: str = "") -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
        self.why = why


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP, from the first moment to the last.

    Plain handlers, not the event loop's: those are in force only while the loop runs, and Windows has none.
    """

    def __init__(self) -> None:
        self._deliver: Callable[[str], None] | None = None
        self._over = False
        self._why = ""

    def install(self) -> None:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            # Ignored by our parent (nohup): it stays ignored.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def deliver_to(self, listener: Callable[[str], None]) -> None:
        """From now on ``listener`` hears the signal's name. It is called between any two instructions."""
        self._deliver = listener
        if self._why:  # the signal that said so is ignored, or its exception was swallowed
            listener(self._why)

    def raise_again(self) -> None:
        """Nobody listens any more: a signal raises Interrupted, as it did before."""
        self._deliver = None

    def stop(self, why: str) -> None:
        """Stop for another reason than a signal. From any thread but the main one, at any time."""
        if self._deliver is not None:
            if not self._over:
                self._deliver(why)
            return
        # Nothing runs yet that could be told. A signal also ends what the main thread is waiting for.
        self._why = why
        if sys.platform == "win32":
            _thread.interrupt_main(signal.SIGTERM)  # there os.kill would end the process
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def end(self) -> None:
        """Everything is stopped: a signal can change nothing any more."""
        self._over = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            return
        why, self._why = self._why, ""
        name = why or signal.Signals(number).name
        if self._deliver is None:
            # Kept too: what is being imported may swallow the exception, as C modules do.
            self._why = name
            raise Interrupted(number, why)
        self._deliver(name)


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
