"""Finds the cheapest set of models to evict for the resources that a load lacks (pure).

``eviction_policy.py`` decides when a model may be evicted, at which cost and why.

A small covering problem over memory, the number of loaded models and one model of a group on each device.
The search is exact while that is quick. The cost of a model grows with its use: a request counts half after
an hour (scripts/simulate/residency.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import exp2
from typing import Final, Literal

from msgspec import Struct

Kind = Literal["memory", "count", "group"]

Resource = tuple[Kind, str]
"""Memory of a device; the number of loaded models; a group on a device (``group@device``)."""

Demand = Mapping[Resource, int]
"""Amounts: bytes of memory, 1 of the others."""

RAM: Final = "ram"
COUNT: Final[Resource] = ("count", "")


def devices(needs: Mapping[str, int]) -> tuple[str, ...]:
    """The devices that a model with these needs uses: RAM only if it uses no other."""
    used = tuple(device for device, size in needs.items() if size > 0 and device != RAM)
    return used or (RAM,)


def demand(needs: Mapping[str, int], groups: Collection[str]) -> dict[Resource, int]:
    """The resources of a model with these needs (bytes by device) and groups."""
    taken: dict[Resource, int] = {("memory", device): size for device, size in needs.items() if size > 0}
    taken[COUNT] = 1
    if groups:
        for device in devices(needs):
            for group in groups:
                taken["group", f"{group}@{device}"] = 1
    return taken


def lacking(wanted: Demand, free: Demand) -> dict[Resource, int]:
    """The missing amounts; empty if all fits. ``free`` may be below zero."""
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
"""The search is exact for about ten candidates (1,024 sets, most of them cut off). For hundreds it stops
after a millisecond or two with the best set so far."""

Cost = tuple[int, int, float]
"""Compared from the left: one loss of a worse kind outweighs any number of lesser ones."""

_NOTHING: Final[Cost] = (0, 0, 0.0)


class Candidate(Struct, frozen=True):
    id: str
    frees: Demand
    cost: Cost


def cheapest_set(candidates: Sequence[Candidate], lack: Demand) -> tuple[Candidate, ...] | None:
    """The cheapest set that frees ``lack``, without unneeded candidates; None if there is none."""
    helping = sorted(
        (candidate for candidate in candidates if any(resource in candidate.frees for resource in lack)),
        key=lambda candidate: (candidate.cost, candidate.id),
    )
    found = _search(helping, lack)
    return None if found is None else _needed(found, lack)


def _search(candidates: Sequence[Candidate], lack: Demand) -> tuple[Candidate, ...] | None:
    """Depth first, cheap candidates first, with a candidate before without it. Each set found costs less than
    the one before.
    """
    rest = [dict.fromkeys(lack, 0)]  # the sums that the last n candidates free together
    for candidate in reversed(candidates):
        rest.append({key: amount + candidate.frees.get(key, 0) for key, amount in rest[-1].items()})
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
        candidate = candidates[at]
        left = {key: more for key, was in missing.items() if (more := was - candidate.frees.get(key, 0)) > 0}
        open_.append((at + 1, chosen, cost, missing))
        open_.append((at + 1, (*chosen, candidate), _sum(cost, candidate.cost), left))
    return best


def _sum(one: Cost, other: Cost) -> Cost:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _needed(chosen: tuple[Candidate, ...], lack: Demand) -> tuple[Candidate, ...]:
    """Leave out candidates that can stay loaded, the dearest first. A search that stopped early, or costs of
    zero, can leave some in the set.
    """
    spare = {
        key: sum(candidate.frees.get(key, 0) for candidate in chosen) - amount for key, amount in lack.items()
    }
    needed = list(chosen)
    for candidate in sorted(chosen, key=lambda candidate: candidate.cost, reverse=True):
        if all(candidate.frees.get(key, 0) <= amount for key, amount in spare.items()):
            needed.remove(candidate)
            for key in spare:
                spare[key] -= candidate.frees.get(key, 0)
    return tuple(needed)


HALF_LIFE_S: Final = 3600.0
"""In the simulation ten minutes are too short (8 % more load time); four hours and a day are equal within
3 %."""


class Use(Struct, frozen=True):
    """A decaying count of requests, valid at ``at_s`` (monotonic seconds)."""

    count: float = 0.0
    at_s: float = 0.0

    def at(self, now_s: float) -> float:
        """The count at ``now_s``."""
        return self.count * exp2((self.at_s - now_s) / HALF_LIFE_S)

    def after(self, now_s: float, requests: int = 1) -> Use:
        """Count requests that have just ended."""
        return Use(self.at(now_s) + requests, now_s)


UNUSED: Final = Use()
