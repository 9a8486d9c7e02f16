"""The load of a model's servers, for a choice between models or between nodes."""

from __future__ import annotations

from msgspec import Struct


class ServedLoad(Struct, frozen=True):
    """The load of one model's servers.

    ``slots``: the permits of the servers that serve now; 0: no server serves. ``free``: the free permits.
    ``waiting``: the requests in its queue. ``loads``: a server is being loaded. ``eta_s``: the time until it
    serves; None: not known. ``can_serve``: a request gets a permit, or may wait for one.
    """

    slots: int = 0
    free: int = 0
    waiting: int = 0
    loads: bool = False
    eta_s: float | None = None
    can_serve: bool = True
