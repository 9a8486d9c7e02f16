"""Divides measured energy among the requests that had a slot between two readings.

The counters measure the whole machine. The requests that had a slot between two readings, finished or not,
get the mean power of that interval, for the time in which at least one of them had a slot, each in proportion
to its slot seconds. So the time without a request counts for no model. A request counts in each interval for
its part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from llamasup.features.usage.ledger import Group, Work

MAX_INTERVAL_S: Final = 300.0
"""An older reading is not compared: a counter of 262 kJ may have wrapped around twice after a quarter of an
hour at 600 W.
"""


class Counter(Struct, frozen=True):
    """An energy counter. ``range_uj``: it starts again at 0 behind this value; 0: it never does."""

    value_uj: int
    range_uj: int = 0


class Reading(Struct, frozen=True):
    """All counters at one time (monotonic), by name."""

    at_s: float
    counters: Mapping[str, Counter]


def energy_between(before: Reading, after: Reading) -> int | None:
    """Return microjoules, or None if the readings cannot be compared. A counter that only one of them has, or
    that was reset, does not count.
    """
    if not 0.0 < after.at_s - before.at_s <= MAX_INTERVAL_S:
        return None
    used_uj = [
        _difference(before.counters[name], counter)
        for name, counter in after.counters.items()
        if name in before.counters
    ]
    known = [uj for uj in used_uj if uj is not None]
    return sum(known) if known else None


def _difference(before: Counter, after: Counter) -> int | None:
    used_uj = after.value_uj - before.value_uj
    if used_uj >= 0:
        return used_uj
    return used_uj + after.range_uj if after.range_uj else None


def divided(energy_uj: int, begin_s: float, end_s: float, work: Sequence[Work]) -> Mapping[Group, int]:
    """Return the share of each group, in microjoules."""
    parts: list[tuple[float, float, Group, float]] = []
    for one in work:
        began_s, ended_s = max(one.began_s, begin_s), min(one.ended_s, end_s)
        if ended_s > began_s:
            parts.append((began_s, ended_s, one.group, one.slots * (ended_s - began_s)))
    slots_s = sum(slot_s for *_, slot_s in parts)
    if not slots_s:
        return {}
    busy_uj = energy_uj * min(1.0, _covered_s(parts) / (end_s - begin_s))
    shares: dict[Group, float] = {}
    for _, _, group, slot_s in parts:
        shares[group] = shares.get(group, 0.0) + busy_uj * slot_s / slots_s
    return {group: round(share) for group, share in shares.items()}


def _covered_s(parts: Sequence[tuple[float, float, Group, float]]) -> float:
    """The time in which at least one part lies."""
    covered_s, until_s = 0.0, float("-inf")
    for began_s, ended_s in sorted((began_s, ended_s) for began_s, ended_s, *_ in parts):
        if ended_s > until_s:
            covered_s += ended_s - max(began_s, until_s)
            until_s = ended_s
    return covered_s
