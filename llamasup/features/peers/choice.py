"""Decides whether this node or other nodes get a request for a model that both have (pure)."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from llamasup.core.queueing.served_load import ServedLoad


class Where(StrEnum):
    HERE = "here"
    ELSEWHERE = "elsewhere"


class Choice(Struct, frozen=True):
    where: Where
    reason: str


def choose_side(here: ServedLoad, elsewhere: ServedLoad) -> Choice:
    """A free permit here, else one elsewhere; else the only side where a request may wait; else the shorter
    queue of the serving sides; else where the model loads; else here.
    """
    if here.free:
        return Choice(Where.HERE, "this node has a free slot")
    if elsewhere.free and elsewhere.slots:
        return Choice(Where.ELSEWHERE, "another node has a free slot")
    if elsewhere.can_serve and not here.can_serve:
        full = "the queue of this node is full" if here.slots or here.loads else "this node cannot load it"
        return Choice(Where.ELSEWHERE, full)
    if here.can_serve and not elsewhere.can_serve:
        return Choice(Where.HERE, "only this node can take it")
    if here.slots and elsewhere.slots:
        if _turns(elsewhere) < _turns(here):
            return Choice(Where.ELSEWHERE, "all slots are busy, and the queue for other nodes is shorter")
        return Choice(Where.HERE, "all slots are busy, and the queue of this node is not longer")
    if here.slots:
        return Choice(Where.HERE, "only this node has it loaded")
    if elsewhere.slots:
        return Choice(Where.ELSEWHERE, "only other nodes have it loaded")
    if here.loads and elsewhere.loads:
        sooner = here.eta_s is not None and elsewhere.eta_s is not None and elsewhere.eta_s < here.eta_s
        if sooner:
            return Choice(Where.ELSEWHERE, "another node will have loaded it sooner")
        return Choice(Where.HERE, "this node loads it")
    if elsewhere.loads:
        return Choice(Where.ELSEWHERE, "another node loads it")
    return Choice(Where.HERE, "this node loads it" if here.loads else "no node has it loaded")


def _turns(side: ServedLoad) -> float:
    """Return how many requests are served before a new one, for each permit."""
    return (side.waiting + 1) / side.slots
