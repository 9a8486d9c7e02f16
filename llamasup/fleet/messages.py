"""The messages between nodes, the directory and the fronts (pure). Fields may be added."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

__all__ = [
    "POLL_PATH",
    "POLL_S",
    "SIGNATURE",
    "FleetNode",
    "ListedModel",
    "NodeLoad",
    "NodeReport",
    "Poll",
    "Snapshot",
]

POLL_PATH = "/fleet/v1/poll"
SIGNATURE = "x-llamasup-signature"
POLL_S = 20.0
"""How long the directory holds a poll without news. Proxies between two machines often end a connection after
30 or 60 s without bytes."""


class NodeLoad(Struct, frozen=True):
    """``slots``: how many requests the model serves at a time."""

    slots: int = 0
    busy: int = 0
    queued: int = 0

    @property
    def part(self) -> float:
        """The part of its slots that the node would need for all requests it has."""
        return (self.busy + self.queued) / max(self.slots, 1)


class NodeReport(Struct, frozen=True):
    """What a node reports about itself, each second."""

    name: str
    url: str
    model: str
    load: NodeLoad = NodeLoad()


class FleetNode(Struct, frozen=True):
    """A node as fronts see it. ``leaving``: it takes no new requests, and finishes those that it has."""

    name: str
    url: str
    model: str
    leaving: bool = False


class ListedModel(Struct, frozen=True):
    """A model of the fleet. ``eta_s``: when its first node will be ready; None: not known."""

    id: str
    aliases: tuple[str, ...] = ()
    eta_s: float | None = None


class Poll(Struct, frozen=True):
    """A front asks for a snapshot with another version than ``seen``. ``wanted``: how many of its requests
    wait for a model without nodes.
    """

    front: str
    nonce: str
    seen: int = 0
    wanted: Mapping[str, int] = {}


class Snapshot(Struct, frozen=True):
    """``settled``: False while nodes may exist that have not reported to this directory yet. ``ca``: PEM."""

    version: int
    settled: bool
    ca: str
    nodes: tuple[FleetNode, ...]
    models: tuple[ListedModel, ...]
