"""Decides which of its models a virtual model takes for a request (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from llamasup.core.queueing.served_load import ServedLoad

RULE: Final = (
    "A request takes the first of them that is loaded and has a free slot; else the loaded one with the "
    "shortest queue for each slot; else the one that is loaded soonest; else the first that can be loaded."
)


class Choice(Struct, frozen=True):
    """A chosen model. ``index`` is its index. ``reason`` completes "a request takes … because"."""

    index: int
    reason: str


def choose(loads: Sequence[ServedLoad]) -> Choice:
    """Choose a model. ``loads`` are in the order of the config; there is at least one."""
    if len(loads) == 1:
        return Choice(0, "it is the only one that can")
    numbered = list(enumerate(loads))
    for index, load in numbered:
        if load.slots and load.free and load.can_serve:
            return Choice(index, "it is the first that is loaded and has a free slot")
    serving = [(index, load) for index, load in numbered if load.slots and load.can_serve]
    if serving:
        index, _ = min(serving, key=lambda item: (item[1].waiting + 1) / item[1].slots)
        return Choice(index, "all loaded ones are busy, and its queue is the shortest for each slot")
    loading = [(index, load) for index, load in numbered if load.loads and load.can_serve]
    if loading:
        index, load = min(loading, key=lambda item: float("inf") if item[1].eta_s is None else item[1].eta_s)
        return Choice(index, "none is loaded, and it will be the soonest")
    for index, load in numbered:
        if load.can_serve:
            return Choice(index, "none is loaded, and it is the first that can be")
    return Choice(0, "none can take it now, and it is the first")
