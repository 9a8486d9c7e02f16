"""The one limit of every wait in the tests, and how to wait for what announces nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["PATIENCE_S", "eventually"]

PATIENCE_S = 120.0
"""Bounds a test that hangs. Nothing waits this long when things work, also on a busy machine."""


def eventually(
    holds: Callable[[], object], what: str = "what was expected", *, every_s: float = 0.002
) -> None:
    """Look again until it holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, f"{what} did not come within {PATIENCE_S} s"
        time.sleep(every_s)
