"""The results of ``llamasup tune`` as JSON (docs/design.md), as text and as a picture (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import Any

from msgspec import Struct

from llamasup.core.planning.measured.tuned import NO_CHANGES, Kept
from llamasup.core.settings.model import Profile
from llamasup.features.tuning.candidates import Purpose
from llamasup.features.tuning.search import COMBINATION, Entry, Proof, Search, proven, result, trials
from llamasup.features.tuning.workload import Measurement
from llamasup.features.tuning.workload import as_json as measurement_as_json

_GAINS = ("gain", "lower", "upper")


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
    kept = None if found.kept is None or found.kept.changes == NO_CHANGES else found.kept
    return {
        "model": model,
        "purpose": purpose,
        "profile": profile,
        "taken": None if kept is None else kept.changes.as_json,
        **{name: None if kept is None else round(getattr(kept, name), 4) for name in _GAINS},
        "trials": trials(found.search),
        "minutes": round(found.minutes, 2),
        "finished": found.finished,
        "drift": None if found.drift is None else round(found.drift, 3),
        "default": measurement_as_json(found.default),
        "tuned": measurement_as_json(found.tuned) if found.tuned is not None and kept is not None else None,
        "candidates": [_entry_as_json(one) for one in found.search.screened],
    }


def kept_as_json(kept: Kept) -> dict[str, Any]:
    is_taken = kept.changes != NO_CHANGES
    return {
        "purpose": kept.purpose,
        "profile": kept.profile,
        "taken": kept.changes.as_json if is_taken else None,
        **{name: getattr(kept, name) if is_taken else None for name in _GAINS},
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
        why = found.stopped or "The time is up"
        lines.append(f"{why} before a verdict, so nothing is changed. The next call continues from here.")
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


# --- the picture of a search as SVG: each candidate with its gain, and what was taken

_ROW, _TOP, _LEFT, _WIDTH, _RIGHT = 24, 56, 300, 420, 260
_COLORS = {"open": "#4477aa", "out": "#999999", "failed": "#cc3311", "lossy": "#ee7733"}
_TAKEN, _PROOF = "#117733", "#332288"


class _Line(Struct, frozen=True):
    """One row: log-ratios of its mark and of the ends of its bar (None: no measurement)."""

    label: str
    mark: float | None
    low: float
    high: float
    color: str
    note: str


def picture(search: Search, title: str) -> str:
    """Draw one row for each candidate: the median gain of its pairs as a dot, all of them as a thin bar.

    The proofs are below, with their bounds.
    """
    lines = list(_lines(search))
    reach = max((abs(end) for line in lines for end in (line.low, line.high)), default=0.0)
    reach = min(max(reach, math.log(1.1)), math.log(8))
    height = _TOP + _ROW * len(lines) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="24" font-size="15">{escape(title)}</text>',
        *_axis(reach, height),
        *(part for row, line in enumerate(lines) for part in _row(line, _TOP + _ROW * row, reach)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lines(search: Search) -> Iterator[_Line]:
    yield from map(_of_entry, search.screened)
    taken = result(search)
    for proof in search.proofs:
        if proof.ratios:
            yield _of_proof(proof, is_taken=proof is taken)


def _of_entry(entry: Entry) -> _Line:
    label = entry.name if entry.candidate.group != COMBINATION else f"together: {entry.name}"
    if not entry.ratios:
        return _Line(label, None, 0.0, 0.0, _COLORS[entry.state], entry.why or "not measured")
    note = f"{math.exp(entry.gain):.2f} × in {len(entry.ratios)} pairs"
    note += f": {entry.why}" if entry.why else ""
    return _Line(label, entry.gain, min(entry.ratios), max(entry.ratios), _COLORS[entry.state], note)


def _of_proof(proof: Proof, *, is_taken: bool) -> _Line:
    seen = proven(proof)
    low = math.log(seen.lower) if seen.lower > 0 else min(proof.ratios)
    high = math.log(seen.upper) if math.isfinite(seen.upper) else max(proof.ratios)
    verdict = "taken" if is_taken else (proof.why or str(proof.verdict))
    note = f"{seen.gain:.2f} × in {seen.pairs} rounds: {verdict}"
    color = _TAKEN if is_taken else _PROOF
    return _Line(f"proof: {proof.candidate.name}", math.log(seen.gain), low, high, color, note)


def _axis(reach: float, height: int) -> Iterator[str]:
    for ratio in (1 / 4, 1 / 2, 1 / 1.5, 1 / 1.2, 1.0, 1.2, 1.5, 2.0, 4.0):
        if abs(math.log(ratio)) <= reach * 1.001:
            x = _x(math.log(ratio), reach)
            stroke = "#000000" if ratio == 1.0 else "#dddddd"
            yield f'<line x1="{x:.1f}" y1="{_TOP - 12}" x2="{x:.1f}" y2="{height - 30}" stroke="{stroke}"/>'
            yield f'<text x="{x:.1f}" y="{height - 14}" text-anchor="middle">{ratio:.2g} ×</text>'


def _row(line: _Line, y: int, reach: float) -> Iterator[str]:
    yield f'<text x="{_LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(_cut(line.label))}</text>'
    if line.mark is not None:
        low, high = _x(line.low, reach), _x(line.high, reach)
        yield (
            f'<line x1="{low:.1f}" y1="{y}" x2="{high:.1f}" y2="{y}" stroke="{line.color}" stroke-width="3"/>'
        )
        yield f'<circle cx="{_x(line.mark, reach):.1f}" cy="{y}" r="5" fill="{line.color}"/>'
    yield f'<text x="{_LEFT + _WIDTH + 10}" y="{y + 4}" fill="{line.color}">{escape(_cut(line.note))}</text>'


def _x(log_ratio: float, reach: float) -> float:
    clipped = max(-reach, min(reach, log_ratio))
    return _LEFT + _WIDTH / 2 + clipped / reach * _WIDTH / 2


def _cut(text: str, most: int = 44) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
