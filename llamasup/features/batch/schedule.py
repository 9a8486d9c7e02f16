"""Decides when lines of a batch run (pure): its hours, how many are in flight, and what follows from the end
of a request: its line is finished, runs again, or is set aside.
"""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta
from enum import Enum
from typing import Final

import msgspec
from msgspec import Struct

from llamasup.core.llama_server.answers import ErrorObject
from llamasup.core.llama_server.token_counts import SHARED_FULL
from llamasup.core.system.text import INVALID_JSON

MAX_TRIES: Final = 3
"""How often a line is sent that gets a 5xx or a time-out."""
MAX_ALONE: Final = 2
"""A line that is alone may crash its server this often. One crash may have another cause, such as a kill."""
PREEMPTED: Final = "batch_preempted"
"""The cause of the proxy for a request that it ended for another client."""
POISON: Final = "poison_request"
"""The cause of the proxy for a request that has ended its server twice."""
_OF_LANE: Final = "batch_"  # the causes of the proxy for requests that yield begin so
UNREACHABLE: Final = "unreachable"
"""The cause, of status 0, if no connection to llamasup could be made."""
_FIRST_DELAY_S: Final = 1.0
_MAX_DELAY_S: Final = 30.0
MAX_DROPS: Final = 10
"""How often the connection to llamasup may break while it has the line. A killed llamasup says nothing of the
line; a line whose answer always breaks must end."""
MAX_LIMITED_S: Final = 7_200.0
"""How long a line waits, in one run, because a limit refuses it. A limit of requests or tokens per minute
lets it through within minutes; a line that a limit never lets through must end."""
_DENIED: Final = frozenset({401, 403})
_LIMITED: Final = frozenset({408, 409, 425, 429})  # the request did no work: a limit has refused it


class Refusal(Struct, frozen=True):
    """The error object of an answer of llamasup or llama-server. ``retry_after_s``: of the header."""

    status: int
    cause: str = ""
    message: str = ""
    retry_after_s: float | None = None


class Ended(Struct, frozen=True):
    """The end of one request. ``refusal`` None: it has its answer; its status 0: the connection broke.

    ``tries``: earlier ends that count; ``drops``: how often the connection broke before; ``limited_s``: how
    long the line has waited for limits; ``alone_crashes``: how often it ended its server while no other line
    was in flight; ``alone``: whether it was alone.
    """

    refusal: Refusal | None
    tries: int = 0
    drops: int = 0
    limited_s: float = 0.0
    alone_crashes: int = 0
    alone: bool = False


class Finished(Struct, frozen=True):
    """The line gets its answer, or the error as its line."""

    poison: bool = False


class Waiting(Enum):
    """The lines that wait with a line that is sent again: they would be refused as well."""

    NOTHING = "nothing"
    MODEL = "the lines of its model"
    ALL = "all lines"


class Again(Struct, frozen=True):
    """Send it again. ``counts``: this was a try. ``limited``: a limit has refused it; other lines go first.
    ``crashed``: it has ended its server, alone.
    """

    delay_s: float
    counts: bool = False
    waiting: Waiting = Waiting.NOTHING
    limited: bool = False
    crashed: bool = False


class Aside(Struct, frozen=True):
    """The line may have crashed its server, or is too long to run with others: send it last, and alone."""


class Stop(Struct, frozen=True):
    """The run ends and the line waits, because no line would be served."""


Decision = Finished | Again | Aside | Stop


class _ErrorBody(Struct):
    error: ErrorObject | str = ""


_decode_error = msgspec.json.Decoder(_ErrorBody).decode


def refusal_of(status: int, body: bytes, retry_after: str | None = None) -> Refusal:
    """Return the refusal in an answer with an error status, or in an error event."""
    try:
        error = _decode_error(body).error
    except INVALID_JSON:
        error = ""
    given = error if isinstance(error, ErrorObject) else ErrorObject(message=error)
    if not status:
        status = given.code if isinstance(given.code, int) else 500
    try:
        retry_after_s = None if retry_after is None else max(0.0, float(retry_after))
    except ValueError:
        retry_after_s = None
    return Refusal(status, given.cause or "", given.message, retry_after_s)


def decide(ended: Ended) -> Decision:
    """Decide what happens to the line."""
    refusal = ended.refusal
    if refusal is None:
        return Finished()
    delay_s = min(refusal.retry_after_s or _FIRST_DELAY_S * 2.0**ended.tries, _MAX_DELAY_S)
    if refusal.cause.startswith(_OF_LANE) or refusal.cause == UNREACHABLE:
        return Again(delay_s, waiting=Waiting.ALL)
    if refusal.status in _DENIED:
        return Stop()
    if not refusal.status:
        return Finished() if ended.drops + 1 >= MAX_DROPS else Again(delay_s, waiting=Waiting.ALL)
    if refusal.cause == POISON:
        return Finished(poison=True)
    if refusal.status == 502:  # its server ended, or broke the connection
        if not ended.alone:
            return Aside()
        if ended.alone_crashes + 1 < MAX_ALONE:
            return Again(delay_s, crashed=True)
        return Finished(poison=True)
    if refusal.status == 503 or refusal.cause == "upstream_unreachable":  # its model loads, or restarts
        return Again(delay_s, waiting=Waiting.MODEL)
    if refusal.status in _LIMITED:
        if ended.limited_s >= MAX_LIMITED_S:
            return Finished()
        # Without Retry-After, each wait is as long as all before it.
        limited_s = refusal.retry_after_s or max(_FIRST_DELAY_S, ended.limited_s)
        return Again(min(limited_s, _MAX_DELAY_S), waiting=Waiting.ALL, limited=True)
    if refusal.message == SHARED_FULL and not ended.alone:
        return Aside()
    if refusal.status < 500 or ended.tries + 1 >= MAX_TRIES:
        return Finished()
    return Again(delay_s, counts=True)


# --- how many lines are in flight: so many that each slot has its next line ready

FIRST_LIMIT: Final = 4
MAX_LIMIT: Final = 64
"""Lines in flight: so many slots has a large server. Each holds a connection and a body."""
_MAX_WAITING: Final = 4
"""Lines in the queue of the model. They make sure that no slot is idle between two lines."""
_STEP: Final = 0.25
"""Growth is slower than shrinking: when several lines end at once, the first of the next ones find a free
slot."""


def next_limit(limit: float, position: int | None, most: int = MAX_LIMIT) -> float:
    """Return the limit after an answer. ``position``: where its request had to wait in the queue; None:
    nowhere.
    """
    if position is not None and position > _MAX_WAITING:
        return max(1.0, limit - 1.0)
    if position is None or position < _MAX_WAITING // 2:
        return min(limit + _STEP, float(most))
    return limit


def limit_after_refusal(limit: float) -> float:
    """Return the limit after a request that a limit of its key has refused: soon only one line at a
    time is sent.
    """
    return max(1.0, limit / 2.0)


# --- the hours in which a batch may run, such as ``22:00-07:00``. Local time.

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
    """Read hours. Raises ValueError with what is wrong."""
    match = _FORM(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time range")
    hour, minute, end_hour, end_minute = map(int, match.groups())
    return Window(time(hour, minute), time(end_hour, end_minute))
