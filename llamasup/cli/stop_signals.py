"""Handles signals that stop the process, and opens its standard streams.

Imported first: a signal may come while the other modules are being imported.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

CONSOLE_CLOSED = "The console closed"
# Windows ends the process after 5 s. The main thread ends it as soon as everything is stopped.
_CONSOLE_CLOSES_S = 4.5


class Interrupted(BaseException):
    """A signal to stop came before anything could be stopped. No Exception: no handler swallows it."""

    def __init__(self, signal_number: int, reason: str = "") -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
        self.reason = reason


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGHUP as long as the process runs. On Windows, these are Ctrl-C,
    Ctrl-Break and the close of the console.

    The handlers are plain ones: an event loop's handlers work only while it runs, and not on Windows.
    """

    def __init__(self) -> None:
        self.listener: Callable[[str], None] | None = None
        self._over = False
        self._pending = ""  # the reason for a stop that no listener has received

    def install(self) -> None:
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
            number = getattr(signal, name, None)
            # A signal that the parent ignores (nohup) stays ignored.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        sys.unraisablehook = partial(_report_unraisable, sys.unraisablehook)
        from llamasup.core.system.native import native  # only now: a signal may come during this import

        native.on_console_close(self._console_closed)

    def deliver_to(self, listener: Callable[[str], None]) -> None:
        """Pass the name of each signal to ``listener``, which is called between any two instructions."""
        self.listener = listener
        if self._pending:  # its signal is ignored, or its exception was swallowed
            listener(self._pending)

    def raise_again(self) -> None:
        """Remove the listener: a signal raises Interrupted again."""
        self.listener = None

    def stop(self, reason: str) -> None:
        """Stop for a reason other than a signal. Callable from any thread but the main one, at any time."""
        if self.listener is not None:
            if not self._over:
                self.listener(reason)
            return
        # There is no listener yet. A signal also interrupts a blocking call of the main thread.
        self._pending = reason
        from llamasup.core.system.native import native

        native.stop_main_thread()

    def end(self) -> None:
        """Everything is stopped: ignore further signals."""
        self._over = True

    def _console_closed(self) -> None:
        """Runs in a thread of the system, which ends the process when this returns."""
        self.stop(CONSOLE_CLOSED)
        time.sleep(_CONSOLE_CLOSES_S)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            return
        reason, self._pending = self._pending, ""
        name = reason or signal.Signals(number).name
        if self.listener is None:
            # Pending as well: a module that is being imported may swallow the exception, as C modules do.
            self._pending = name
            raise Interrupted(number, reason)
        self.listener(name)


def _report_unraisable(report: Callable[[Any], object], unraisable: Any) -> None:
    """Do not print an Interrupted that met a callback, such as those of imports: its signal is pending."""
    if not isinstance(unraisable.exc_value, Interrupted):
        report(unraisable)


STOP_SIGNALS = StopSignals()
"""The one instance of this process."""


def ensure_standard_streams() -> None:
    """Open the streams that the parent has closed (``2>&-``): other files would get their descriptors."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
