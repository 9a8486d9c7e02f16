"""How much the tests try."""

from __future__ import annotations

import os

__all__ = ["CASES", "examples"]

CASES = os.environ.get("LLAMASUP_TEST_CASES", "gate")
"""Which cases run. ``gate``: those of scripts/test, each with one of the two runtimes and event loops, and
with fewer random examples. ``rest``: what scripts/test --all runs after them. ``all``: every case.
"""


def examples(count: int) -> int:
    """How many random examples a test tries of the ``count`` that it tries outside the gate."""
    return max(count // 4, 1) if CASES == "gate" else count
