"""The proxy's backend with other nodes: the catalog of this node, and the models of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ResolvedModel, unnamed_model
from llamasup.core.pool.catalog.catalog import Catalog
from llamasup.core.pool.catalog.model_listing import ModelListing, encode_list, encode_one
from llamasup.core.pool.replicas.replica_set import ModelRoute
from llamasup.features.peers.groups import ModelGroup, warm
from llamasup.features.peers.known import KnownNode, NodeState
from llamasup.features.peers.peers import NodeRoute, Peers


class NodesBackend:
    """A ``Backend``. Used only if there are other nodes."""

    def __init__(self, catalog: Catalog, peers: Peers) -> None:
        self._catalog = catalog
        self._peers = peers

    def resolve(
        self, model: str | None, *, create: bool = False, local: bool = False
    ) -> ModelRoute | NodeRoute | HttpError:
        if local or model is None:
            found = self._catalog.resolve(model, create=create)
            if model is None and not local and isinstance(found, HttpError):
                return unnamed_model(self._ids())
            return found
        route = self._peers.routes.get(model)
        if route is not None:
            return route
        if self._catalog.is_exact(model):
            return self._catalog.resolve(model)
        ids = self._peers.index.resolve(model)
        if len(ids) == 1:
            return self._peers.routes[ids[0]]
        return self._catalog.resolve(model, create=create)

    def _ids(self) -> tuple[str, ...]:
        here = (entry["id"] for entry in self._catalog.listing().entries())
        return tuple(dict.fromkeys((*here, *(group.model.id for group in self._peers.groups))))

    def readiness(self) -> HttpError | None:
        return self._catalog.readiness()

    def listing(self) -> NodesListing:
        nodes = {known.peer.name: known for known in self._peers.nodes}
        return NodesListing(self._catalog.listing(), tuple(self._peers.groups), nodes)

    def node_listing(self, seen: Callable[[ResolvedModel], ResolvedModel | None] | None = None) -> bytes:
        return self._catalog.node_listing(seen)


class NodesListing:
    """A ``ModelList``. In ``llamasup`` of an entry, ``nodes`` names the other nodes that have the model."""

    def __init__(
        self, here: ModelListing, groups: tuple[ModelGroup, ...], nodes: Mapping[str, KnownNode]
    ) -> None:
        self._here = here
        self._nodes = nodes
        self._groups = {group.model.id: group for group in groups}

    def all(self, allowed: Callable[[ResolvedModel], bool] | None = None) -> bytes:
        return encode_list(self.entries(allowed))

    def one(self, model: str) -> bytes:
        return encode_one(self.entry(model))

    def entry(self, model: str) -> dict[str, Any]:
        group = self._groups.get(model)
        if group is None:
            return self._here.entry(model)
        return (
            _with_nodes(self._here.entry(model), group, self._nodes)
            if group.is_local
            else _entry(group, self._nodes)
        )

    def entries(self, allowed: Callable[[ResolvedModel], bool] | None = None) -> Iterator[dict[str, Any]]:
        for entry in self._here.entries(allowed):
            group = self._groups.get(entry["id"])
            yield entry if group is None else _with_nodes(entry, group, self._nodes)
        for group in self._groups.values():
            if not group.is_local and (allowed is None or allowed(group.model)):
                yield _entry(group, self._nodes)


def _entry(group: ModelGroup, nodes: Mapping[str, KnownNode]) -> dict[str, Any]:
    """The entry of a node that serves the model, else of one that gets requests, else of the first.

    The last one is what an absent node has reported, so the entry shows the state of the node.
    """
    entry: dict[str, Any] = {"object": "model", "created": 0, "owned_by": "llamasup", "tags": ()}
    present = [name for name in group.nodes if name in nodes and nodes[name].gets_requests]
    away = ""
    for name in (*warm(group, nodes), *present, *group.nodes)[:1]:
        entry |= group.nodes[name].entry
        if not present:  # during a stop, the membership may have dropped the node
            away = nodes[name].shown_state if name in nodes else NodeState.ABSENT.value
    entry |= {"id": group.model.id, "aliases": group.model.names[1:]}
    return _with_nodes(entry, group, nodes, away)


def _with_nodes(
    entry: dict[str, Any], group: ModelGroup, nodes: Mapping[str, KnownNode], away: str = ""
) -> dict[str, Any]:
    """Add the nodes. ``away`` is the state of the node of this entry, if no node gets requests."""
    own = entry.get("llamasup")
    shown: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    serves = bool(warm(group, nodes))
    if not group.is_local:
        shown["default"] = False
    if away:
        shown["state"] = away
    if serves or away or "status" not in entry:
        entry["status"] = {"value": "loaded" if serves else "unloaded"}
    return {**entry, "llamasup": {**shown, "nodes": list(group.nodes)}}
