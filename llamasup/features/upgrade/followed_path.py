"""Decides when the path of a llama-server that is followed leads to an upgrade (pure)."""

from __future__ import annotations

import math
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

__all__ = ["Followed", "Outcome", "Step", "after_upgrade", "look"]

FIRST_RETRY_S: Final = 600.0
LAST_RETRY_S: Final = 86_400.0
"""Each retry comes after twice the time of the one before."""
CONFLICT_RETRY_S: Final = 10.0
MISSING_S: Final = 10.0

Seen = tuple[str, str]
"""The file that the path points to, and a digest of it and its libraries."""
Step = Literal["wait", "upgrade", "replaced", "missing"]
Outcome = Literal["serves", "refused", "unproven", "conflict"]


class Followed(Struct, frozen=True):
    """A watched path. ``handled`` is what was looked at last. ``new``: what it may be next, once it no longer
    changes. ``serving``: the build that serves, when it was last seen. Times are monotonic.
    """

    handled: Seen | None
    serving: Seen | None
    new: Seen | None = None
    retry_at_s: float = math.inf
    retry_s: float = FIRST_RETRY_S
    missing_since_s: float = math.inf


def look(followed: Followed, seen: Seen | None, running: str, now_s: float) -> tuple[Followed, Step]:
    """Look at the path. ``seen``: what it points to now; None: nothing. ``running``: the path of the build
    that serves.

    ``upgrade``: to ``seen``. ``replaced``: the file of the running build is another one. ``missing``: the
    path has pointed to nothing for a while. The last two come once.
    """
    if seen is None:
        return _missing(followed, now_s)
    followed = replace(followed, missing_since_s=math.inf)
    if seen == followed.handled and now_s < followed.retry_at_s:
        return replace(followed, new=None), "wait"
    if seen != followed.new:  # it may still be written
        return replace(followed, new=seen), "wait"
    if seen != followed.handled:
        followed = replace(followed, retry_s=FIRST_RETRY_S)
    followed = replace(followed, handled=seen, new=None, retry_at_s=math.inf)
    if seen[0] != running:
        return followed, "upgrade"
    before = followed.serving
    is_replaced = before is not None and before[0] == seen[0] and before != seen
    return replace(followed, serving=seen), "replaced" if is_replaced else "wait"


def _missing(followed: Followed, now_s: float) -> tuple[Followed, Step]:
    since_s = min(followed.missing_since_s, now_s)
    is_reported = followed.missing_since_s == -math.inf
    if is_reported or now_s < since_s + MISSING_S:
        return replace(followed, new=None, missing_since_s=since_s), "wait"
    return replace(followed, new=None, missing_since_s=-math.inf), "missing"


def after_upgrade(followed: Followed, outcome: Outcome, now_s: float) -> Followed:
    """Note the outcome of an upgrade. After ``unproven`` and ``conflict``, another try may have another
    outcome.
    """
    if outcome == "serves":
        return replace(followed, serving=followed.handled)
    if outcome == "refused":
        return followed
    if outcome == "conflict":
        return replace(followed, retry_at_s=now_s + CONFLICT_RETRY_S)
    later_s = min(2 * followed.retry_s, LAST_RETRY_S)
    return replace(followed, retry_at_s=now_s + followed.retry_s, retry_s=later_s)
