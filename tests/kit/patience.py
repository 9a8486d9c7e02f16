"""The one limit of every wait in the tests, and how to wait for what announces nothing itself."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable

__all__ = ["PATIENCE_S", "eventually", "wait_longer_for_answers"]

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


WITHOUT = os.environ.get("LLAMASUP_TEST_WITHOUT")
"""The feature that ``scripts/delete_features.py`` deleted in this copy of the tree."""

_LIMITS_S = (
    ("llamasup.core.control.client", "_TIMEOUT_S", 60.0),
    ("llamasup.core.control.discovery", "_TIMEOUT_S", 60.0),
    ("llamasup.features.usage.recorder", "ANSWER_TIMEOUT_S", 60.0),
    ("llamasup.features.usage.recorder", "CLOSE_TIMEOUT_S", 60.0),
    ("llamasup.core.llama_server.client", "METRICS_TIMEOUT_S", 10.0),
)


def wait_longer_for_answers() -> None:
    """In this process: on a busy machine, an answer takes longer than a user would wait for it."""
    for module, name, limit_s in _LIMITS_S:
        if module.startswith(f"llamasup.features.{WITHOUT}."):
            continue
        found = vars(importlib.import_module(module))
        assert name in found
        found[name] = limit_s
