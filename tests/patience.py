"""The one limit of every wait in the tests, and how to wait for what announces nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["PATIENCE_S", "eventually"]

PATIENCE_S = 120.0
"""Bounds a test that hangs. Nothing waits this long when things work, also on a busy machine."""


_SOON_S = 0.002
_LATER_S = 0.025


def eventually(
    holds: Callable[[], object], what: str = "what was expected", *, every_s: float | None = None
) -> None:
    """Look again until it holds: each ``every_s``, or less and less often, because each look takes time from
    what it waits for.
    """
    began_s = time.monotonic()
    while not holds():
        waited_s = time.monotonic() - began_s
        assert waited_s < PATIENCE_S, f"{what} did not come within {PATIENCE_S} s"
        time.sleep(min(_SOON_S + waited_s / 20, _LATER_S) if every_s is None else every_s)
