"""Keeps what is known of one node, and decides how answers and failures change it (pure)."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.pool.catalog.node_listing import NodeListing
from llamasup.features.peers.membership import Peer


class NodeState(StrEnum):
    """The state of a node. ``READY`` nodes get requests. A ``SILENT`` one has not answered lately, and keeps
    its requests. ``ABSENT``: those end too. ``REFUSED``: only a person can correct it (key, certificate,
    address).
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
    likely fail too.
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
