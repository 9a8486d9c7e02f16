"""Decides whether this node or other nodes get a request for a model that both have (pure)."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

__all__ = ["Choice", "Side", "Where", "choose_side"]


class Where(StrEnum):
    HERE = "here"
    ELSEWHERE = "elsewhere"


class Side(Struct, frozen=True):
    """One of the two. ``slots``: permits of the servers that serve now, 0: no server does. ``free``: how many
    are free. ``waiting``: requests in its queue. ``loads``: a server is being loaded; ``eta_s``: until it
    serves (None: not known). ``can_serve``: a request may wait there.
    """

    slots: int = 0
    free: int = 0
    waiting: int = 0
    loads: bool = False
    eta_s: float | None = None
    can_serve: bool = True


class Choice(Struct, frozen=True):
    where: Where
    reason: str


def choose_side(here: Side, elsewhere: Side) -> Choice:
    """A free permit here, else one elsewhere; else the shorter queue of the serving sides; else where the
    model loads; else here.
    """
    if here.free:
        return Choice(Where.HERE, "this node has a free slot")
    if elsewhere.free and elsewhere.slots:
        return Choice(Where.ELSEWHERE, "another node has a free slot")
    if here.slots and elsewhere.slots:
        if _turns(elsewhere) < _turns(here):
            return Choice(Where.ELSEWHERE, "all slots are busy, and the queue for other nodes is shorter")
        return Choice(Where.HERE, "all slots are busy, and the queue of this node is not longer")
    if here.slots:
        return Choice(Where.HERE, "only this node has it loaded")
    if elsewhere.slots:
        return Choice(Where.ELSEWHERE, "only other nodes have it loaded")
    if not here.can_serve and elsewhere.can_serve:
        return Choice(Where.ELSEWHERE, "this node cannot load it")
    if here.loads and elsewhere.loads:
        sooner = here.eta_s is not None and elsewhere.eta_s is not None and elsewhere.eta_s < here.eta_s
        if sooner:
            return Choice(Where.ELSEWHERE, "another node will have loaded it sooner")
        return Choice(Where.HERE, "this node loads it")
    if elsewhere.loads and elsewhere.can_serve:
        return Choice(Where.ELSEWHERE, "another node loads it")
    return Choice(Where.HERE, "this node loads it" if here.loads else "no node has it loaded")


def _turns(side: Side) -> float:
    """How many requests go before a new one, for each permit."""
    return (side.waiting + 1) / side.slots
