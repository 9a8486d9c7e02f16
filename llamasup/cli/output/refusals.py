"""Limits the lines of requests that need no valid key: the first of each kind, then a count once a second.

``wrap`` forwards requests without a valid key, and llama-server itself refuses them or answers ``/health``.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from llamasup.cli.output.repeats import Repeats, count_one, end_period
from llamasup.cli.output.view import View
from llamasup.observability.metrics import RequestRecord

__all__ = ["Refusals"]


def _is_limited(record: RequestRecord) -> bool:
    """Whether a client without a valid key can cause such a record, at a level that is shown by default."""
    if record.outcome == "local" or (record.outcome == "ok" and not record.model):
        return False  # shown only with ``--log-level debug``
    return record.outcome != "ok" or record.status >= 400 or record.method != "POST"


class Refusals:
    """Used by the thread of the event loop only. A kind is an outcome and a status, so clients cannot create
    kinds.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._kinds: dict[tuple[str, int], Repeats] = {}
        self._timers: dict[tuple[str, int], asyncio.TimerHandle] = {}

    def shows(self, record: RequestRecord) -> bool:
        """Whether to show this request. Counts it otherwise."""
        if not _is_limited(record):
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
        """Show the counts that are still pending."""
        for kind, timer in list(self._timers.items()):
            timer.cancel()
            self._say(kind)

    def _say(self, kind: tuple[str, int]) -> None:
        del self._timers[kind]
        self._kinds[kind], left_out = end_period(self._kinds[kind], monotonic())
        outcome, status = kind
        why = "" if outcome == "ok" else f" ({outcome.replace('_', ' ')})"
        self._view.say(
            "warning" if status >= 500 else "info",
            "requests_left_out",
            f"… and {left_out:,} more with status {status}{why} in the last second",
            status=status,
            outcome=outcome,
            left_out=left_out,
        )
