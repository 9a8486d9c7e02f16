"""Decides what follows from the end of a request of a batch (pure): its line is finished, runs again, or is
set aside.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec
from msgspec import Struct

from llamasup.core.http.context_end import SHARED_FULL

__all__ = [
    "MAX_ALONE",
    "MAX_DROPS",
    "MAX_LIMITED_S",
    "MAX_TRIES",
    "Again",
    "Aside",
    "Ended",
    "Over",
    "Refusal",
    "Stop",
    "Waiting",
    "decide",
    "refusal_of",
]

MAX_TRIES: Final = 3
"""How often a line is sent that gets a 5xx or a time-out."""
MAX_ALONE: Final = 2
"""How often a line that is alone may end its server. One end may have another cause, such as a kill."""
PREEMPTED: Final = "batch_preempted"
"""The cause of the proxy for a request that it ended for another client."""
POISON: Final = "poison_request"
"""The cause of the proxy for a request that has ended its server twice."""
_OF_LANE: Final = "batch_"  # so begin the causes of the proxy for requests that give way
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


class Over(Struct, frozen=True):
    """The line gets its answer, or the error as its line."""

    poison: bool = False


class Waiting(Enum):
    """The lines that wait with a line that is sent again, because they would be refused too."""

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
    """The line may have ended its server, or is too long beside others: send it at the end, and alone."""


class Stop(Struct, frozen=True):
    """The run ends and the line waits, because no line would be served."""


Decision = Over | Again | Aside | Stop


class _ErrorObject(Struct):
    message: str = ""
    cause: str | None = None
    type: str | None = None
    code: int | str | None = None


class _ErrorBody(Struct):
    error: _ErrorObject | str = ""


_decode_error = msgspec.json.Decoder(_ErrorBody).decode


def refusal_of(status: int, body: bytes, retry_after: str | None = None) -> Refusal:
    """The refusal in an answer with an error status, or in an error event."""
    try:
        error = _decode_error(body).error
    except (msgspec.MsgspecError, ValueError, RecursionError):
        error = ""
    given = error if isinstance(error, _ErrorObject) else _ErrorObject(error)
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
        return Over()
    delay_s = min(refusal.retry_after_s or _FIRST_DELAY_S * 2.0**ended.tries, _MAX_DELAY_S)
    if refusal.cause.startswith(_OF_LANE) or refusal.cause == UNREACHABLE:
        return Again(delay_s, waiting=Waiting.ALL)
    if refusal.status in _DENIED:
        return Stop()
    if not refusal.status:
        return Over() if ended.drops + 1 >= MAX_DROPS else Again(delay_s, waiting=Waiting.ALL)
    if refusal.cause == POISON:
        return Over(poison=True)
    if refusal.status == 502:  # its server ended, or broke the connection
        if not ended.alone:
            return Aside()
        if ended.alone_crashes + 1 < MAX_ALONE:
            return Again(delay_s, crashed=True)
        return Over(poison=True)
    if refusal.status == 503 or refusal.cause == "upstream_unreachable":  # its model loads, or restarts
        return Again(delay_s, waiting=Waiting.MODEL)
    if refusal.status in _LIMITED:
        if ended.limited_s >= MAX_LIMITED_S:
            return Over()
        # Without Retry-After, each wait is as long as all before it.
        limited_s = refusal.retry_after_s or max(_FIRST_DELAY_S, ended.limited_s)
        return Again(min(limited_s, _MAX_DELAY_S), waiting=Waiting.ALL, limited=True)
    if refusal.message == SHARED_FULL and not ended.alone:
        return Aside()
    if refusal.status < 500 or ended.tries + 1 >= MAX_TRIES:
        return Over()
    return Again(delay_s, counts=True)
