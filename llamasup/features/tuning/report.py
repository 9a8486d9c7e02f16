"""The results of ``llamasup tune`` as JSON (docs/design.md) and as text (pure)."""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from llamasup.core.planning.measured.tuned import NO_CHANGES, Kept
from llamasup.core.settings.model import Profile
from llamasup.features.tuning.candidates import Purpose
from llamasup.features.tuning.search import Entry, Search, trials
from llamasup.features.tuning.workload import Measurement
from llamasup.features.tuning.workload import as_json as measurement_as_json


class SessionResult(Struct, frozen=True):
    """The end of one call. ``kept`` is None if the search is not finished. ``stopped``: why it is not, if the
    time is not over.

    ``drift``: the default's last times over its first ones, if they differ by more than 10 %.
    """

    search: Search
    finished: bool
    kept: Kept | None
    default: Measurement
    tuned: Measurement | None
    minutes: float
    drift: float | None
    stopped: str = ""


def report_as_json(
    found: SessionResult, *, model: str, purpose: Purpose, profile: Profile | None
) -> dict[str, Any]:
    kept = found.kept
    is_taken = kept is not None and kept.changes != NO_CHANGES
    return {
        "model": model,
        "purpose": purpose,
        "profile": profile,
        "taken": kept.changes.as_json if kept is not None and is_taken else None,
        "gain": round(kept.gain, 4) if kept is not None and is_taken else None,
        "lower": round(kept.lower, 4) if kept is not None and is_taken else None,
        "upper": round(kept.upper, 4) if kept is not None and is_taken else None,
        "trials": trials(found.search),
        "minutes": round(found.minutes, 2),
        "finished": found.finished,
        "drift": None if found.drift is None else round(found.drift, 3),
        "default": measurement_as_json(found.default),
        "tuned": measurement_as_json(found.tuned) if found.tuned is not None and is_taken else None,
        "candidates": [_entry_as_json(one) for one in found.search.screened],
    }


def kept_as_json(kept: Kept) -> dict[str, Any]:
    is_taken = kept.changes != NO_CHANGES
    return {
        "purpose": kept.purpose,
        "profile": kept.profile,
        "taken": kept.changes.as_json if is_taken else None,
        "gain": kept.gain if is_taken else None,
        "lower": kept.lower if is_taken else None,
        "upper": kept.upper if is_taken else None,
        "trials": kept.trials,
        "minutes": kept.minutes,
        "date": kept.date,
        "lossy": kept.lossy,
        "unchecked": kept.unchecked,
        "runtime": kept.conditions.runtime,
    }


def report_lines(found: SessionResult) -> list[str]:
    """Write what a person wants to know at the end."""
    lines = []
    count, minutes = trials(found.search), found.minutes
    if found.kept is not None and found.kept.changes != NO_CHANGES:
        lines.append(f"Taken: {kept_line(found.kept)}")
    elif found.finished:
        lines.append("Nothing was proven better than the default plan, so nothing is changed.")
    else:
        why = found.stopped or "The time is over"
        lines.append(f"{why} before a verdict, so nothing is changed. The next call goes on from here.")
    lines.append(f"Measured: {count} pairs in {minutes:.1f} min.")
    if found.drift is not None:
        lines.append(
            f"The machine changed meanwhile: at the end, the default took {found.drift:.2f} × the time of "
            "the beginning (a throttled CPU, or other programs). The order of each pair is random, so the "
            "verdict holds."
        )
    return lines


def kept_line(kept: Kept) -> str:
    """Write a line such as ``--ubatch-size 256: at least 1.11 ×, measured here on 2026-11-26: …``."""
    if kept.changes == NO_CHANGES:
        return f"nothing was better ({kept.trials} pairs, {kept.date})"
    return f"{kept.changes}: at least {kept.lower:.2f} ×, {kept.measured.why}"


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    return {
        "changes": entry.candidate.changes.as_json,
        "why": entry.candidate.why,
        "gain": round(math.exp(entry.gain), 4) if entry.ratios else None,
        "pairs": len(entry.ratios),
        "state": entry.state,
        "reason": entry.why,
    }
