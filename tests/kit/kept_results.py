"""A result of ``llamasup tune`` that applies here and now."""

from __future__ import annotations

from pathlib import Path

from llamasup.core.planning.facts import Launch
from llamasup.core.planning.measured.tuned import NO_CHANGES, Changes, Kept
from llamasup.core.planning.planner import Planner

__all__ = ["kept_for"]


def kept_for(launch: Launch, changes: Changes) -> Kept:
    conditions = Planner(launch, Path("/"), trial=NO_CHANGES).conditions()
    profile = launch.settings.profile
    return Kept(conditions, "latency", profile, changes, 1.18, 1.11, 1.24, "2026-11-26", 50, 3.0)
