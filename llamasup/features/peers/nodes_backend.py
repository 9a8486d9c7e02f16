"""The proxy's backend with other nodes: the catalog of this node, and the models of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ListedModel, unnamed_model
from llamasup.core.pool.catalog.catalog import Catalog, PoolRoute
from llamasup.errors import Conflict
from llamasup.features.peers.groups import listed_remote, listed_shared
from llamasup.features.peers.peers import NodeRoute, Peers


class NodesBackend:
    """A ``Backend``. Used only if there are other nodes. Models of other nodes are changed there."""

    lists_models = True

    def __init__(self, catalog: Catalog, peers: Peers) -> None:
        self.node = catalog.node
        self._catalog = catalog
        self._peers = peers

    def resolve(
        self, model: str | None, *, create: bool = False, local: bool = False
    ) -> PoolRoute | NodeRoute | HttpError:
        if local or model is None:
            found = self._catalog.resolve(model, create=create)
            if model is None and not local and isinstance(found, HttpError):
                return unnamed_model(tuple(dict.fromkeys(listed.model.id for listed in self.models())))
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

    def readiness(self) -> HttpError | None:
        return self._catalog.readiness()

    def models(self, *, for_node: bool = False) -> Iterator[ListedModel]:
        """In ``llamasup`` of an entry, ``nodes`` names the other nodes that have the model."""
        here = self._catalog.models(for_node=for_node)
        if for_node:
            yield from here
            return
        nodes = self._peers.nodes_by_name
        groups = {group.model.id: group for group in self._peers.groups}
        for listed in here:
            group = groups.get(listed.model.id)
            yield listed if group is None else listed_shared(listed, group, nodes)
        for group in groups.values():
            if not group.is_local:
                yield listed_remote(group, nodes)

    def why(self, name: str) -> Mapping[str, Any]:
        remote = self._peers.find(name)
        if remote is None:
            return self._catalog.why(name)
        return self._peers.why(remote, self._catalog.why(name) if remote.group.is_local else None)

    def refuse(self, what: str, name: str) -> None:
        remote = self._peers.find(name)
        if remote is not None and not remote.group.is_local:
            nodes = " and ".join(map(repr, remote.group.nodes))
            raise Conflict(
                f"The model {name!r} is not on this node, but on {nodes or 'no node yet'}.",
                remedy=f"Run `llamasup {what} {name} --url URL` with the URL of that node."
                if what in ("load", "unload", "restart")
                else f"Run `llamasup {what}` on the machine of that node.",
            )
