"""Shows requests that llamasup refuses: the first ones at once, then how many there were each second."""

from __future__ import annotations

import asyncio
from time import monotonic

from llamasup.cli.view import View
from llamasup.core.repeats import Repeats, count_one, end_period
from llamasup.runtime.metrics import RequestRecord

__all__ = ["Refusals"]

_OUTCOMES = frozenset({"refused", "unavailable"})


class Refusals:
    """For the event loop's thread. A kind is an outcome and a status, which no client makes up."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._kinds: dict[tuple[str, int], Repeats] = {}
        self._timers: dict[tuple[str, int], asyncio.TimerHandle] = {}

    def shows(self, record: RequestRecord) -> bool:
        """Whether a request is shown; one that is not shown is counted."""
        if record.outcome not in _OUTCOMES:
            return True
        kind = record.outcome, record.status
        now_s = monotonic()
        repeats, is_shown = count_one(self._kinds.get(kind), now_s)
        self._kinds[kind] = repeats
        if not is_shown and kind not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[kind] = loop.call_later(repeats.until_s - now_s, self._say, kind)
        return is_shown

    def close(self) -> None:
        """Say what is still to be said."""
        for kind, timer in list(self._timers.items()):
            timer.cancel()
            self._say(kind)

    def _say(self, kind: tuple[str, int]) -> None:
        del self._timers[kind]
        self._kinds[kind], left_out = end_period(self._kinds[kind], monotonic())
        outcome, status = kind
        self._view.say(
            "warning" if status >= 500 else "info",
            "requests_left_out",
            f"… and {left_out:,} more with status {status} ({outcome}) in the last second",
            status=status,
            outcome=outcome,
            left_out=left_out,
        )
