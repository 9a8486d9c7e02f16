"""How busy the servers of a model are: what a choice between models, or between nodes, has to know."""

from __future__ import annotations

from msgspec import Struct


class ServedLoad(Struct, frozen=True):
    """``slots``: permits of the servers that serve now, 0: no server does. ``free``: how many are free.
    ``waiting``: requests in its queue. ``loads``: a server is being loaded; ``eta_s``: until it serves (None:
    not known). ``can_serve``: a request gets a permit, or may wait there.
    """

    slots: int = 0
    free: int = 0
    waiting: int = 0
    loads: bool = False
    eta_s: float | None = None
    can_serve: bool = True
