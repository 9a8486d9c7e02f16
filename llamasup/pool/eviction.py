"""Which models to evict for enough room: the cheapest set that frees it (pure).

A small covering problem over several resources at once: memory, the number of loaded models, and the
group's place on a device, all counted alike. Searched exactly while that is quick. The cost of a model
grows with its use: a request counts half after an hour (scripts/simulate_residency.py; results in
docs/residency.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp2
from typing import Final, Literal

__all__ = [
    "COUNT",
    "HALF_LIFE_S",
    "MAX_STEPS",
    "RAM",
    "UNUSED",
    "Candidate",
    "Cost",
    "Demand",
    "Resource",
    "Use",
    "add",
    "cheapest_set",
    "demand",
    "devices",
    "lacking",
    "take",
]


Kind = Literal["memory", "count", "group"]

Resource = tuple[Kind, str]
"""Memory by place; the count; a group on a device (``group@device``)."""

Demand = Mapping[Resource, int]
"""How much of each: bytes of memory, ones of the others. What is not in it is not needed."""

RAM: Final = "ram"
COUNT: Final[Resource] = ("count", "")


def devices(needs: Mapping[str, int]) -> tuple[str, ...]:
    """Where a model with these needs computes: RAM is a device only for what uses no other."""
    used = tuple(place for place, size in needs.items() if size > 0 and place != RAM)
    return used or (RAM,)


def demand(needs: Mapping[str, int], groups: Collection[str]) -> dict[Resource, int]:
    """What a model takes that needs these bytes by place and is in these groups."""
    taken: dict[Resource, int] = {("memory", place): size for place, size in needs.items() if size > 0}
    taken[COUNT] = 1
    if groups:
        for device in devices(needs):
            for group in groups:
                taken["group", f"{group}@{device}"] = 1
    return taken


def lacking(wanted: Demand, free: Demand) -> dict[Resource, int]:
    """What is missing of what is wanted; empty: it fits. ``free`` may be below zero."""
    return {
        resource: amount - free.get(resource, 0)
        for resource, amount in wanted.items()
        if amount > free.get(resource, 0)
    }


def take(free: dict[Resource, int], wanted: Demand) -> None:
    for resource, amount in wanted.items():
        free[resource] = free.get(resource, 0) - amount


def add(free: dict[Resource, int], given: Demand) -> None:
    for resource, amount in given.items():
        free[resource] = free.get(resource, 0) + amount


MAX_STEPS: Final = 500
"""Of the search: exact for ten candidates or so (1,024 sets, most of them cut off), and at most a millisecond
or two for hundreds, for which the best set found by then is taken."""

Cost = tuple[int, int, float]
"""Compared from the left: that a worse kind of loss is avoided weighs more than any number of lesser ones."""

_NOTHING: Final[Cost] = (0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Candidate:
    id: str
    frees: Demand
    cost: Cost


def cheapest_set(candidates: Sequence[Candidate], lack: Demand) -> tuple[Candidate, ...] | None:
    """The set of least cost that frees all that is lacking, nobody in it for nothing; None: there is none."""
    helping = sorted(
        (each for each in candidates if any(resource in each.frees for resource in lack)),
        key=lambda each: (each.cost, each.id),
    )
    found = _search(helping, lack)
    return None if found is None else _needed(found, lack)


def _search(candidates: Sequence[Candidate], lack: Demand) -> tuple[Candidate, ...] | None:
    """Depth first, with before without, cheap before dear: the first set found is the cheapest that are
    enough together; every later one costs less."""
    rest = [dict.fromkeys(lack, 0)]  # what all from the n-th on would free together, from behind
    for each in reversed(candidates):
        rest.append({key: amount + each.frees.get(key, 0) for key, amount in rest[-1].items()})
    best: tuple[Candidate, ...] | None = None
    best_cost = _NOTHING
    open_: list[tuple[int, tuple[Candidate, ...], Cost, Demand]] = [(0, (), _NOTHING, lack)]
    steps = 0
    while open_ and (best is None or steps < MAX_STEPS):
        steps += 1
        at, chosen, cost, missing = open_.pop()
        if best is not None and cost >= best_cost:
            continue
        if not missing:
            best, best_cost = chosen, cost
            continue
        if any(amount > rest[-1 - at][key] for key, amount in missing.items()):
            continue
        each = candidates[at]
        left = {key: more for key, was in missing.items() if (more := was - each.frees.get(key, 0)) > 0}
        open_.append((at + 1, chosen, cost, missing))
        open_.append((at + 1, (*chosen, each), _sum(cost, each.cost), left))
    return best


def _sum(one: Cost, other: Cost) -> Cost:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _needed(chosen: tuple[Candidate, ...], lack: Demand) -> tuple[Candidate, ...]:
    """Without those that can be kept after all, the dearest first: a search that was cut short, or one with
    costs of zero, may hold some."""
    spare = {key: sum(each.frees.get(key, 0) for each in chosen) - amount for key, amount in lack.items()}
    kept = list(chosen)
    for each in sorted(chosen, key=lambda each: each.cost, reverse=True):
        if all(each.frees.get(key, 0) <= amount for key, amount in spare.items()):
            kept.remove(each)
            for key in spare:
                spare[key] -= each.frees.get(key, 0)
    return tuple(kept)


HALF_LIFE_S: Final = 3600.0
"""In the simulation ten minutes forget too soon (8 % more load time); four hours, or a day, are as good
within 3 %."""


@dataclass(frozen=True, slots=True)
class Use:
    """``count`` is as of ``at_s`` (monotonic seconds)."""

    count: float = 0.0
    at_s: float = 0.0

    def at(self, now_s: float) -> float:
        """The count as of now."""
        return self.count * exp2((self.at_s - now_s) / HALF_LIFE_S)

    def after(self, now_s: float, requests: int = 1) -> Use:
        """With these, that have just ended."""
        return Use(self.at(now_s) + requests, now_s)


UNUSED: Final = Use()
