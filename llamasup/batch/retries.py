"""What follows from the end of a request of a batch (pure): its line is over, runs again, or is set aside."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

__all__ = [
    "MAX_ALONE",
    "MAX_DROPS",
    "MAX_TRIES",
    "Again",
    "Aside",
    "Ended",
    "Over",
    "Refusal",
    "Stop",
    "decide",
    "refusal_of",
]

MAX_TRIES: Final = 3
"""How often a line is sent that gets a 5xx or a time-out."""
MAX_ALONE: Final = 2
"""How often a line that is alone may end its server. One end may have another cause, such as a kill."""
PREEMPTED: Final = "batch_preempted"
"""The cause of the proxy for a request that it ended for another client."""
UNREACHABLE: Final = "unreachable"
"""The cause, of status 0, if no connection to llamasup could be made."""
_FIRST_DELAY_S: Final = 1.0
_MAX_DELAY_S: Final = 30.0
MAX_DROPS: Final = 10
"""How often the connection to llamasup may break while it has the line. A killed llamasup says nothing of the
line; a line whose answer always breaks must end."""
_DENIED: Final = frozenset({401, 403})
# The request did no work: it waited for a turn, a load or a restart.
_WAITED: Final = frozenset({408, 409, 425, 429, 503})


class Refusal(Struct, frozen=True):
    """The error object of an answer of llamasup or llama-server. ``retry_after_s``: of the header."""

    status: int
    cause: str = ""
    message: str = ""
    retry_after_s: float | None = None


class Ended(Struct, frozen=True):
    """The end of one request. ``refusal`` None: it has its answer; its status 0: the connection broke.

    ``tries``: earlier ends that count; ``drops``: how often the connection broke before; ``alone_crashes``:
    how often the line ended its server while no other line was in flight; ``alone``: whether it was alone.
    """

    refusal: Refusal | None
    tries: int = 0
    drops: int = 0
    alone_crashes: int = 0
    alone: bool = False


class Over(Struct, frozen=True):
    """The line gets its answer, or the error as its line."""

    poison: bool = False


class Again(Struct, frozen=True):
    """Send it again. ``counts``: this was a try. ``all_wait``: no other line would be served before.
    ``crashed``: it has ended its server, alone.
    """

    delay_s: float
    counts: bool
    all_wait: bool = False
    crashed: bool = False


class Aside(Struct, frozen=True):
    """It may have ended its server: send it at the end, and alone."""


class Stop(Struct, frozen=True):
    """No line would be served: the run ends, and the line waits."""


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
    """What happens to the line."""
    refusal = ended.refusal
    if refusal is None:
        return Over()
    delay_s = min(refusal.retry_after_s or _delay_s(ended.tries), _MAX_DELAY_S)
    if refusal.cause == PREEMPTED:
        return Again(delay_s, counts=False, all_wait=True)
    if refusal.cause == UNREACHABLE:
        return Again(delay_s, counts=False, all_wait=True)
    if refusal.status in _DENIED:
        return Stop()
    if not refusal.status:
        return Over() if ended.drops + 1 >= MAX_DROPS else Again(delay_s, counts=False, all_wait=True)
    if refusal.status == 502:  # its server ended, or broke the connection
        if not ended.alone:
            return Aside()
        if ended.alone_crashes + 1 < MAX_ALONE:
            return Again(delay_s, counts=False, crashed=True)
        return Over(poison=True)
    if refusal.status in _WAITED or refusal.cause == "upstream_unreachable":
        return Again(delay_s, counts=False, all_wait=True)
    if refusal.status < 500 or ended.tries + 1 >= MAX_TRIES:
        return Over()
    return Again(delay_s, counts=True)


def _delay_s(tries: int) -> float:
    return float(min(_FIRST_DELAY_S * 2**tries, _MAX_DELAY_S))
