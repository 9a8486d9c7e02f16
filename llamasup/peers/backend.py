"""The proxy's backend with other nodes: the catalog of this node, and the models of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llamasup.models.access import ResolvedModel, unnamed_model
from llamasup.peers.groups import ModelGroup
from llamasup.peers.peers import NodeRoute, Peers
from llamasup.pool.catalog.catalog import Catalog
from llamasup.pool.catalog.listing import ModelListing, encode_list, encode_one
from llamasup.pool.catalog.route import ModelRoute
from llamasup.queueing.unavailable import Unavailable

__all__ = ["NodesBackend", "NodesListing"]


class NodesBackend:
    """A ``Backend``. Used only if there are other nodes."""

    def __init__(self, catalog: Catalog, peers: Peers) -> None:
        self._catalog = catalog
        self._peers = peers

    def resolve(
        self, model: str | None, *, create: bool = False, local: bool = False
    ) -> ModelRoute | NodeRoute | Unavailable:
        if local or model is None:
            found = self._catalog.resolve(model, create=create)
            if model is None and not local and isinstance(found, Unavailable):
                return Unavailable.because(unnamed_model(self._ids()))
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

    def readiness(self) -> Unavailable | None:
        return self._catalog.readiness()

    def listing(self) -> NodesListing:
        return NodesListing(self._catalog.listing(), tuple(self._peers.groups))

    def node_listing(self, allowed: Callable[[ResolvedModel], bool] | None = None) -> bytes:
        return self._catalog.node_listing(allowed)


class NodesListing:
    """A ``ModelList``. In ``llamasup`` of an entry, ``nodes`` names the other nodes that have the model."""

    def __init__(self, here: ModelListing, groups: tuple[ModelGroup, ...]) -> None:
        self._here = here
        self._groups = {group.model.id: group for group in groups}

    def all(self, allowed: Callable[[ResolvedModel], bool] | None = None) -> bytes:
        return encode_list(self.entries(allowed))

    def one(self, model: str) -> bytes:
        return encode_one(self.entry(model))

    def entry(self, model: str) -> dict[str, Any]:
        group = self._groups.get(model)
        if group is None:
            return self._here.entry(model)
        return _with_nodes(self._here.entry(model), group) if group.is_local else _entry(group)

    def entries(self, allowed: Callable[[ResolvedModel], bool] | None = None) -> Iterator[dict[str, Any]]:
        for entry in self._here.entries(allowed):
            group = self._groups.get(entry["id"])
            yield entry if group is None else _with_nodes(entry, group)
        for group in self._groups.values():
            if not group.is_local and (allowed is None or allowed(group.model)):
                yield _entry(group)


def _entry(group: ModelGroup) -> dict[str, Any]:
    """The entry of the node that serves the model, else of the first."""
    models = sorted(group.nodes.values(), key=lambda model: not model.serves)
    entry: dict[str, Any] = {"object": "model", "created": 0, "owned_by": "llamasup", "tags": ()}
    if models:
        entry |= models[0].entry
    entry |= {"id": group.model.id, "aliases": group.model.names[1:]}
    return _with_nodes(entry, group)


def _with_nodes(entry: dict[str, Any], group: ModelGroup) -> dict[str, Any]:
    own = entry.get("llamasup")
    shown: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    serves = any(model.serves for model in group.nodes.values())
    if not group.is_local:
        shown["default"] = False
    if serves or "status" not in entry:
        entry["status"] = {"value": "loaded" if serves else "unloaded"}
    return {**entry, "llamasup": {**shown, "nodes": list(group.nodes)}}
