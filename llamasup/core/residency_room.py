"""What a model takes up: memory, a place in the count, its group's place on a device (pure).

All three are counted alike, so that one question, does it fit, answers for budgets, ``max_loaded`` and
groups, and for several of them at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Literal

__all__ = ["COUNT", "RAM", "Demand", "Resource", "add", "demand", "devices", "lacking", "take"]

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
