"""The hours in which a batch may run, such as ``22:00-07:00`` (pure). Local time."""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta

from msgspec import Struct

_FORM = re.compile(r"([01]\d|2[0-3]):([0-5]\d)\s*-\s*([01]\d|2[0-3]):([0-5]\d)").fullmatch


class Window(Struct, frozen=True):
    """The time of day from ``begin`` to ``end``, which may be on the next day. If both are equal, it is the
    whole day.
    """

    begin: time
    end: time

    def opens_in(self, now: datetime) -> timedelta:
        """Return how long until a batch may run; zero if it may run now."""
        at = now.time().replace(tzinfo=None)
        if self.begin <= self.end:
            is_open = self.begin <= at < self.end or self.begin == self.end
        else:
            is_open = at >= self.begin or at < self.end
        if is_open:
            return timedelta()
        opens = datetime.combine(now.date(), self.begin, now.tzinfo)
        return opens - now if opens > now else opens + timedelta(days=1) - now


def read_window(text: str) -> Window:
    """Raises ValueError with what is wrong."""
    match = _FORM(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time range")
    hour, minute, end_hour, end_minute = map(int, match.groups())
    return Window(time(hour, minute), time(end_hour, end_minute))
