"""The interface between a source of other llamasup nodes and its users (pure).

The config is one source (``static.py``). A source that starts nodes on demand also names the models that it
could start (``expected``), and learns how many requests wait for each of them (``wanted``).
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class Peer(Struct, frozen=True):
    """Another llamasup node. Two nodes with the same ``name`` are the same node: a change of the other fields
    makes new connections.

    ``leaving``: it takes no new requests, and finishes its running ones.

    ``url``: ``http://HOST:PORT`` or ``https://HOST:PORT``. ``key``: its API key for us; it needs no right but
    to use models. ``ca``: certificates in PEM that sign its certificate; empty: those of the system.
    """

    name: str
    url: str
    key: str = ""
    ca: str = ""
    leaving: bool = False

    def __repr__(self) -> str:
        return f"<Peer {self.name} at {self.url}>"


class ExpectedModel(Struct, frozen=True):
    """A model that a node will serve if requests want it, although no node may have it now.

    ``message``: why no node serves it now, for clients. ``eta_s``: how long the start of one takes; None: not
    known. ``ready_at_s``: when the node that starts already will be ready; None: none starts, or not known.
    """

    id: str
    aliases: tuple[str, ...] = ()
    message: str = "No node serves the model yet"
    eta_s: float | None = None
    ready_at_s: float | None = None


class Membership(Protocol):
    """A source of nodes. All methods are for the event loop's thread."""

    async def run(self) -> None:
        """Follow the source until cancelled; may end before if it never changes."""
        ...

    def current(self) -> tuple[Peer, ...]:
        """Return the nodes now, without this one; in an order that stays."""
        ...

    async def changed(self) -> None:
        """Wait until ``current`` or ``expected`` may differ from their values at the time of the call."""
        ...

    def expected(self) -> tuple[ExpectedModel, ...]:
        """Return the models that the source can start nodes for."""
        ...

    def wanted(self, model: str, waiting: int) -> None:
        """Note that ``waiting`` requests wait for ``model``: no node serves it, or all slots of its nodes are
        busy. Called about each second while the number changes, and at once if no node serves. Must return at
        once.
        """
        ...
