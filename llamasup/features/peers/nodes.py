"""The other nodes: their source, what is known of one, and how answers and failures change it (pure).

The config is one source of nodes (``static.py``). A source that starts nodes on demand also names the models
that it could start (``expected``), and learns how many requests wait for each of them (``wanted``).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.pool.catalog.v1_models import NodeListing


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


# --- what is known of a node -------------------------------------------------------------------------


class NodeState(StrEnum):
    """The state of a node. ``READY`` nodes get requests. A ``SILENT`` one has not answered lately, and keeps
    its requests. The requests of an ``ABSENT`` node are aborted. ``REFUSED``: only a person can correct it
    (key, certificate, address).
    """

    CONNECTING = "connecting"
    READY = "ready"
    SILENT = "silent"
    ABSENT = "absent"
    REFUSED = "refused"
    SELF = "self"
    DUPLICATE = "duplicate"


class ProbePolicy(Struct, frozen=True):
    """A node that stops answering is left out after ``interval_s`` + ``timeout_s``, and counts as absent
    after ``failures`` probes without an answer.
    """

    interval_s: float = 1.0
    busy_interval_s: float = 0.1  # while a request waits for a model of the node
    timeout_s: float = 2.0
    failures: int = 3


class Trouble(Struct, frozen=True):
    """The reason why a probe failed. ``gone``: nothing listens there. ``final``: a later probe will most
    likely fail as well.
    """

    reason: str
    remedy: str = ""
    gone: bool = False
    final: bool = False


class KnownNode(Struct, frozen=True):
    """A node as known here. ``listing`` is its last one, kept while it does not answer, so that requests for
    its models wait, and do not fail because of an unknown name. ``requests``: those that it works on or that
    wait there, for all its models together.
    """

    peer: Peer
    state: NodeState = NodeState.CONNECTING
    reason: str = ""
    remedy: str = ""
    listing: NodeListing | None = None
    requests: int = 0
    failures: int = 0
    restarts: int = 0
    """How often another process answered."""

    @property
    def gets_requests(self) -> bool:
        return self.state is NodeState.READY and not self.peer.leaving

    @property
    def keeps_requests(self) -> bool:
        return self.state in (NodeState.READY, NodeState.SILENT)

    @property
    def shown_state(self) -> str:
        """The state that users see."""
        return "leaving" if self.peer.leaving and self.keeps_requests else self.state.value


_SAME: Final = "It is this node itself"


def answered(known: KnownNode, listing: NodeListing, own_id: str) -> KnownNode:
    """The node has answered with its models."""
    before = known.listing
    restarts = known.restarts + (before is not None and before.node != listing.node)
    if listing.node == own_id:
        return replace(
            known,
            state=NodeState.SELF,
            reason=_SAME,
            remedy="Remove it from peers.",
            listing=None,
            failures=0,
            restarts=restarts,
        )
    return replace(
        known,
        state=NodeState.READY,
        reason=f"It lists {listing.left_out} models too many" if listing.left_out else "",
        remedy="",
        listing=listing,
        requests=sum(model.busy + model.queued for model in listing.models),
        failures=0,
        restarts=restarts,
    )


def failed(known: KnownNode, trouble: Trouble, policy: ProbePolicy) -> KnownNode:
    """A probe has failed."""
    failures = known.failures + 1
    if trouble.final:
        state = NodeState.REFUSED
    elif trouble.gone or failures >= policy.failures:
        state = NodeState.ABSENT
    elif known.keeps_requests:
        state = NodeState.SILENT
    else:
        state = known.state  # connecting, absent or refused
    return replace(known, state=state, reason=trouble.reason, remedy=trouble.remedy, failures=failures)


def same_names(before: KnownNode, after: KnownNode) -> bool:
    """Whether only the load of its models differs: they are the same models, and it is in the same state."""
    if (before.state, before.restarts) != (after.state, after.restarts):
        return False
    return _names(before) == _names(after)


def _names(known: KnownNode) -> tuple[tuple[object, ...], ...]:
    models = () if known.listing is None else known.listing.models
    return tuple((model.id, model.aliases, model.works) for model in models)


def first_of_same(nodes: tuple[KnownNode, ...]) -> tuple[KnownNode, ...]:
    """Return the nodes, of which only the first gets requests if several addresses lead to the same
    process.
    """
    first: dict[str, KnownNode] = {}
    result = []
    for known in nodes:
        if known.gets_requests and known.listing is not None:
            other = first.setdefault(known.listing.node, known)
            if other is not known:
                reason = f"It is the same process as {other.peer.name!r}"
                known = replace(
                    known, state=NodeState.DUPLICATE, reason=reason, remedy="remove one of them from peers"
                )
        result.append(known)
    return tuple(result)
