"""Decides which requests may have ended their llama-server, and what happens to them (pure).

When a server ends, each request in flight is a suspect. Suspects are sent again one at a time, and nothing
else runs at the same time as a suspect. So a request that ends a second server, alone, is the cause, and is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from hashlib import blake2b
from typing import Final

from msgspec import Struct

from llamasup.core.http.heads import HttpError

MAX_ENDS: Final = 3
"""A request sees at most so many ends: at the second one, another request may have been in flight."""
MIN_ALONE_S: Final = 10.0
"""A suspect is alone for at least so long."""
KEPT_S: Final = 300.0
"""A body is known for so long. A client that repeats a failed request does so within minutes."""
MAX_KEPT: Final = 256
"""The number of bodies that are kept is that of waiting requests. Each body takes 200 bytes."""

POISON: Final = b'"poison_request"'
"""The part of a refusal by which its body is recognized."""
_POISON: Final = HttpError(
    503,
    "This request has twice made its llama-server crash or hang, the second time while no other request ran",
    cause="poison_request",
    remedy="change the request, and report what it does to llama.cpp (the reason is in llamasup's log)",
)


class Next(Enum):
    """The fate of a request after the end of a server that was working on it."""

    ALONE = "it is sent again, alone"
    REFUSED = "it is refused, because it ends servers"
    FAILED = "its client gets the reason for the end"


def next_step(ends: int, *, alone: bool) -> Next:
    """Decide what happens to a request after an end.

    ``ends``: the number of ends in which it was in flight, including this one. ``alone``: it was sent as a
    suspect, and ran alone.
    """
    if alone and ends > 1:
        return Next.REFUSED
    return Next.ALONE if ends < MAX_ENDS else Next.FAILED


def alone_s(ends: int, ran_s: float) -> float:
    """Return how long a suspect stays alone, so that a long answer does not keep all others waiting.

    After one end it is twice as long as the suspect ran before (``ran_s``): it would have ended this server
    by then.
    """
    return float("inf") if ends > 1 else max(MIN_ALONE_S, 2 * ran_s)


def place_for(taken: Sequence[int | None]) -> int | None:
    """Choose the server (its index) for the next suspect: an idle one, else the one to keep free for it.

    ``taken``: the permits of each server that are taken; None: a suspect runs there. Returns None if the next
    suspect waits for that one.
    """
    if None in taken and 0 not in taken:
        return None
    return min(range(len(taken)), key=lambda index: (taken[index] is None, taken[index] or 0), default=None)


class Suspicion(Struct, frozen=True):
    """A body that was in flight when a server ended.

    ``refusal`` is set if its requests end servers. ``ends`` are the earlier ends, as functions that report
    such an end as explained.
    """

    until_s: float
    refusal: HttpError | None = None
    ends: tuple[Callable[[], None], ...] = ()


class Suspects:
    """The bodies that ended a server, or may have ended one, for ``KEPT_S``. Times are monotonic.

    ``known`` has a keyed hash of each body, and not the body. ``key`` is the secret of this process.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.known: dict[bytes, Suspicion] = {}  # the oldest first

    def __repr__(self) -> str:
        return f"<Suspects: {len(self.known)} bodies>"

    def fingerprint(self, path: bytes, body: bytes) -> bytes:
        hashed = blake2b(path + b"\n", key=self._key, digest_size=16)
        hashed.update(body)
        return hashed.digest()

    def find(self, fingerprint: bytes, now_s: float) -> Suspicion | None:
        """Forget everything that is too old, then find the suspicion against a body."""
        while self.known:
            oldest = next(iter(self.known))
            if self.known[oldest].until_s > now_s:
                break
            del self.known[oldest]
        return self.known.get(fingerprint)

    def suspect(self, fingerprint: bytes, now_s: float, end: Callable[[], None]) -> None:
        """Suspect a body that was in flight at an ``end``, and that llamasup does not send again itself."""
        known = self.known.get(fingerprint)
        if known is None or known.refusal is None:
            ends = (end,) if known is None else (*known.ends, end)[-MAX_ENDS:]
            self._keep(fingerprint, Suspicion(now_s + KEPT_S, ends=ends))

    def refuse(self, fingerprint: bytes, now_s: float, why: HttpError) -> HttpError:
        """Refuse requests with this body from now on; returns their refusal. ``why`` is the last end."""
        message = f"{_POISON.message}: {why.message}"
        refusal = HttpError(_POISON.status, message, cause=_POISON.cause, remedy=_POISON.remedy)
        self._keep(fingerprint, Suspicion(now_s + KEPT_S, refusal))
        return refusal

    def clear(self, fingerprint: bytes) -> None:
        """Forget a body whose request was answered."""
        self.known.pop(fingerprint, None)

    def _keep(self, fingerprint: bytes, suspicion: Suspicion) -> None:
        self.known.pop(fingerprint, None)
        self.known[fingerprint] = suspicion
        if len(self.known) > MAX_KEPT:
            del self.known[next(iter(self.known))]
