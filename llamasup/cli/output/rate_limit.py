"""Limits lines that requests cause: a flood of requests becomes a few lines and a count once a second."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Generic, TypeVar

from msgspec import Struct

from llamasup.cli.output.view import Level, View
from llamasup.core.observability.counters import GAVE_WAY, RequestRecord

Kind = TypeVar("Kind")

# Lines of each kind that are shown at once, so that a few refusals of different clients are all visible.
BURST = 5
PERIOD_S = 1.0


class RateWindow(Struct, frozen=True):
    """The number of messages of one kind in the period that ends at ``until_s``."""

    until_s: float
    shown: int = 0
    left_out: int = 0


def count_message(window: RateWindow | None, now_s: float) -> tuple[RateWindow, bool]:
    """Count a message; returns whether to show it. ``window`` is None for the first of its kind."""
    if window is None or (now_s >= window.until_s and not window.left_out):
        return RateWindow(now_s + PERIOD_S, shown=1), True
    if window.shown < BURST:
        return RateWindow(window.until_s, window.shown + 1), True
    return RateWindow(window.until_s, window.shown, window.left_out + 1), False


def end_period(window: RateWindow, now_s: float) -> tuple[RateWindow, int]:
    """Begin the next period; returns the number of messages that the last one left out.

    While the flood continues, only counts are shown.
    """
    return RateWindow(now_s + PERIOD_S, shown=BURST), window.left_out


class _RateLimit(Generic[Kind]):
    """Counts messages by their kind. At the end of a period, ``show_count`` receives the number left out.

    ``schedule`` starts a timer and returns the function that cancels it.
    """

    def __init__(
        self,
        schedule: Callable[[float, Callable[[], None]], Callable[[], None]],
        show_count: Callable[[Kind, int], None],
    ) -> None:
        self._schedule = schedule
        self._show_count = show_count
        self._windows: dict[Kind, RateWindow] = {}
        self._timers: dict[Kind, Callable[[], None]] = {}

    def shows(self, kind: Kind) -> bool:
        """Whether to show this message. Counts it otherwise."""
        now_s = monotonic()
        window, is_shown = count_message(self._windows.get(kind), now_s)
        self._windows[kind] = window
        if not is_shown and kind not in self._timers:
            delay_s = max(0.0, window.until_s - now_s)
            self._timers[kind] = self._schedule(delay_s, partial(self._end_period, kind))
        return is_shown

    def close(self) -> None:
        """Show the counts that are still pending."""
        for kind, cancel in list(self._timers.items()):
            cancel()
            self._end_period(kind)

    def _end_period(self, kind: Kind) -> None:
        if self._timers.pop(kind, None) is not None:  # otherwise close() was first
            self._windows[kind], left_out = end_period(self._windows[kind], monotonic())
            self._show_count(kind, left_out)


# --- requests ----------------------------------------------------------------------------------------


class RequestLineLimit:
    """Limits the lines of requests that need no valid key. Used by the thread of the event loop only.

    A kind is an outcome and a status, so clients cannot create kinds.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._limit = _RateLimit(_schedule_in_loop, self._show_count)
        self.close = self._limit.close

    def shows(self, record: RequestRecord) -> bool:
        """Whether to show this request. Counts it otherwise."""
        return not _is_limited(record) or self._limit.shows((record.outcome, record.status))

    def _show_count(self, kind: tuple[str, int], left_out: int) -> None:
        outcome, status = kind
        reason = "" if outcome == "ok" else f" ({outcome.replace('_', ' ')})"
        self._view.say(
            "warning" if status >= 500 else "info",
            "requests_left_out",
            f"… and {left_out:,} more with status {status}{reason} in the last second",
            status=status,
            outcome=outcome,
            left_out=left_out,
        )


def is_routine(record: RequestRecord) -> bool:
    """Tell whether such requests are frequent and harmless, such as the requests of a monitor or a waiting
    batch.
    """
    return record.outcome in ("local", GAVE_WAY) or (record.outcome == "ok" and not record.model)


def _is_limited(record: RequestRecord) -> bool:
    """Tell whether a client without a valid key can cause such a line, at a level that is shown by default.

    ``wrap`` forwards requests without a valid key, and llama-server itself refuses them or answers
    ``/health``.
    """
    if is_routine(record):
        return False  # shown only with ``--log-level debug``
    return record.outcome != "ok" or record.status >= 400 or record.method != "POST"


def _schedule_in_loop(delay_s: float, act: Callable[[], None]) -> Callable[[], None]:
    return asyncio.get_running_loop().call_later(delay_s, act).cancel


# --- log records -------------------------------------------------------------------------------------

# Loggers whose messages requests can cause, even requests of clients without a key.
_LIMITED_LOGGERS = frozenset({"llamasup.proxy", "asyncio"})
_CodeLine = tuple[str, int]


class ViewHandler(logging.Handler):
    """Shows records of ``logging`` like all other lines.

    Messages that requests can cause are limited, separately for each line of code that logs them.
    """

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view
        self._limit = _RateLimit(self._schedule, self._show_count)
        self._left_out: dict[_CodeLine, logging.LogRecord] = {}  # the first of each kind

    def emit(self, record: logging.LogRecord) -> None:
        code_line = record.pathname, record.lineno
        if record.name not in _LIMITED_LOGGERS or self._limit.shows(code_line):
            self._say(record)
        else:
            self._left_out.setdefault(code_line, record)

    def close(self) -> None:
        """Show the counts that are still pending."""
        self._locked(self._limit.close)
        super().close()

    def _schedule(self, delay_s: float, act: Callable[[], None]) -> Callable[[], None]:
        timer = threading.Timer(delay_s, self._locked, [act])  # any thread may log, even one without a loop
        timer.daemon = True
        timer.start()
        return timer.cancel

    def _locked(self, act: Callable[[], None]) -> None:
        self.acquire()
        try:
            act()
        finally:
            self.release()

    def _show_count(self, code_line: _CodeLine, left_out: int) -> None:
        self._say(self._left_out.pop(code_line), f" ({left_out:,} like it in the last second)")

    def _say(self, record: logging.LogRecord, count_text: str = "") -> None:
        level: Level = (
            "error"
            if record.levelno >= logging.ERROR
            else "warning"
            if record.levelno >= logging.WARNING
            else "debug"
        )
        self._view.say(level, "log", self.format(record) + count_text, logger=record.name)
