"""Decides what an answer of a trace collector means, and when to try again (pure).

The statuses are those of the OTLP specification 1.9: only some may be tried again.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

LONGEST_DELAY_S: Final = 30.0
_RETRYABLE: Final = frozenset({429, 502, 503, 504})


class Delivered(Struct, frozen=True):
    """The collector has the spans, except those that it ``rejected``."""

    rejected: int = 0


class Failed(Struct, frozen=True):
    """A delivery that failed. ``retries``: the same spans may be sent again, after ``after_s`` if the
    collector said so.
    """

    reason: str
    retries: bool = True
    after_s: float | None = None


Delivery = Delivered | Failed


def delivery_of(status: int, retry_after: str | None) -> Delivery:
    if 200 <= status < 300:
        return Delivered()
    after_s = None
    if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
        after_s = min(float(retry_after[:9]), LONGEST_DELAY_S)
    return Failed(f"it answers {status}", status in _RETRYABLE, after_s)


def delay_s(attempt: int, asked_s: float | None, dice: float) -> float:
    """Return the time before the next attempt; ``attempt`` 1 has failed. ``dice``: from 0 to 1, so that many
    llamasups do not come at the same moment.
    """
    if asked_s is not None:
        return asked_s
    longest = LONGEST_DELAY_S if attempt > 5 else min(LONGEST_DELAY_S, 2.0 ** (attempt - 1))
    return longest * (0.5 + 0.5 * dice)
