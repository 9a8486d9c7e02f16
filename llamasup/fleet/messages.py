"""The messages between nodes, the directory and the fronts (pure). Fields may be added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

_ENDED = "ended"
POLL_PATH = "/fleet/v1/poll"
SIGNATURE = "x-llamasup-signature"
POLL_S = 20.0
"""How long the directory holds a poll without news. Proxies between two machines often end a connection after
30 or 60 s without bytes."""


SETTLED_AFTER_S = 5.0
"""By then, each node has reported to a directory that was started again."""
LEAVE_S = SETTLED_AFTER_S + 3.0
"""How long a node that ends waits at most until all fronts know it, also if the directory just started."""


class NodeLoad(Struct, frozen=True):
    """The load of a node. ``slots``: how many requests the model serves at a time. ``waiting``: its share of
    the requests that wait at the fronts, which send a node only as many as it has slots. ``by_serve``: the
    requests in ``busy`` and ``queued`` that entered at Serve. ``asleep``: the model is unloaded, and the next
    request loads it. ``ready``: it is loaded.
    """

    slots: int = 0
    busy: int = 0
    queued: int = 0
    waiting: float = 0.0
    by_serve: int = 0
    asleep: bool = False
    ready: bool = True

    @property
    def demand(self) -> float:
        """The multiple of its slots that the node would need to serve all requests at once."""
        return (self.busy + self.queued + self.waiting) / max(self.slots, 1)


def routing_stats(load: NodeLoad, *, ended: bool) -> dict[str, Any]:
    """Make a replica's report to Serve's routers. ``ended``: its llamasup has exited; Serve notices later."""
    return {**asdict(load), _ENDED: ended}


def is_asleep(stats: Mapping[str, Any]) -> bool:
    """Tell whether a replica sleeps, by ``routing_stats``. A request since then may have woken it."""
    return bool(stats.get("asleep"))


def routing_load(stats: Mapping[str, Any], sent: int | None, *, woken: bool = False) -> float:
    """Return the part of a replica's slots that is taken; infinite if its llamasup has exited.

    A replica whose model is not loaded counts as almost full: free slots of other replicas are used first,
    then slots of a replica that loads, then a sleeping replica.

    ``stats`` is the last report of the replica to Serve's routers (``routing_stats``); empty before the first
    one. ``sent`` is the number of requests that Serve itself has sent to it now; None: not known. ``woken``:
    the replica got a request that its report may not show.
    """
    if stats.get(_ENDED):
        return math.inf
    slots, busy, queued, by_serve = (
        int(stats.get(name, 0)) for name in ("slots", "busy", "queued", "by_serve")
    )
    taken = busy + queued
    if sent is not None:  # newer than the report
        taken = max(0, taken - by_serve) + sent
    slots = max(slots, 1)
    asleep = is_asleep(stats)
    if asleep and not taken and not woken:
        return 1.0 - 0.5 / slots
    if asleep or not stats.get("ready", True):
        return max(1.0 - 0.75 / slots, taken / slots)
    return taken / slots


class NodeReport(Struct, frozen=True):
    """The report of a node about itself, each second."""

    name: str
    url: str
    model: str
    load: NodeLoad = NodeLoad()


class FleetNode(Struct, frozen=True):
    """A node as fronts see it. ``leaving``: it takes no new requests, and finishes its running ones."""

    name: str
    url: str
    model: str
    leaving: bool = False


class ListedModel(Struct, frozen=True):
    """A model of the fleet. ``eta_s``: how long until its first node is ready; None: not known. ``starts``:
    that node starts already, because requests wait for it. ``problem``: why no node starts, as a part of a
    sentence, as long as no node serves the model.
    """

    id: str
    aliases: tuple[str, ...] = ()
    eta_s: float | None = None
    problem: str = ""
    starts: bool = False


class Poll(Struct, frozen=True):
    """A front requests a snapshot with another version than ``seen``. ``waiting``: how many of its requests
    wait for each model. ``number`` grows: a poll may arrive after the one that replaces it.
    """

    front: str
    nonce: str
    seen: int = 0
    waiting: Mapping[str, int] = {}
    number: int = 0


class Snapshot(Struct, frozen=True):
    """The nodes and models that the directory tells fronts. ``settled`` is False while nodes may exist that
    have not reported to this directory yet. ``ca``: PEM.
    """

    version: int
    settled: bool
    ca: str
    nodes: tuple[FleetNode, ...]
    models: tuple[ListedModel, ...]
