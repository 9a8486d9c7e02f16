"""The other nodes and their models, as this node uses them.

Owns the watches of the nodes, what is known of the nodes, and the models of the nodes. Follows the membership
and the models of this node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ListedModel, ResolvedModel
from llamasup.core.models.names import NameIndex
from llamasup.core.observability.counters import NodeGauges
from llamasup.core.pool.catalog.catalog import Catalog
from llamasup.core.pool.catalog.v1_models import NodeListing
from llamasup.core.pool.shown_state import ShownState
from llamasup.core.queueing.endpoint import NodeLink
from llamasup.core.supervision.not_serving import STOPPING
from llamasup.core.system.text import sentence
from llamasup.features.peers.groups import ModelGroup, explain_nodes, groups_of, listed_remote, listed_shared
from llamasup.features.peers.nodes import (
    KnownNode,
    Membership,
    NodeState,
    Peer,
    ProbePolicy,
    Trouble,
    answered,
    failed,
    first_of_same,
    same_names,
)
from llamasup.features.peers.remote_model import NodeAddress, RemoteModel, SharedModel
from llamasup.features.peers.watch import NodeWatch, address_of

FIRST_ANSWERS_S: Final = 2.5  # a start waits so long at most: a request for a model must find it

_SLICE: Final = 100  # models that are applied at once, which takes 2 to 5 ms

_log = logging.getLogger("llamasup.peers")


class NodeRoute(Struct, frozen=True):
    """A ``ModelRoute`` to other nodes, or to this one and others."""

    model: ResolvedModel
    served: RemoteModel | SharedModel
    listed: Callable[[], ListedModel]


class Peers:
    """The models of other nodes. ``timeout_s`` and ``max_waiting`` limit the queue of each model. Call
    all methods in the thread of the event loop.
    """

    def __init__(
        self,
        membership: Membership,
        catalog: Catalog,
        *,
        timeout_s: float,
        max_waiting: int,
        continues_streams: bool = False,
        policy: ProbePolicy | None = None,
    ) -> None:
        self.membership = membership
        self._catalog = catalog
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._continues_streams = continues_streams
        self._policy = ProbePolicy() if policy is None else policy
        self._nodes: dict[str, KnownNode] = {}  # by name, in the order of the membership
        self._watches: dict[str, NodeWatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._models: dict[str, RemoteModel] = {}
        self.routes: Mapping[str, NodeRoute] = {}
        """By exact name."""
        self.index = NameIndex({})
        self._waiting: dict[str, int] = {}  # as the membership knows it
        self._idle = asyncio.Event()
        self._stopping = False
        self._asked: set[str] = set()  # nodes that were asked at least once
        self._unlisted: set[str] = set()  # nodes that the membership does not name any more
        self._all_asked = asyncio.Event()
        self._refreshes = 0

    # --- life
    async def run(self) -> None:
        """Follow the membership until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.membership.run(), name="membership")
                while True:
                    self._follow(tasks)
                    await self.membership.changed()
        finally:
            for model in self._models.values():
                model.close(STOPPING)

    async def begun(self) -> None:
        """Wait until each node was probed once, for a limited time."""
        try:
            async with asyncio.timeout(FIRST_ANSWERS_S):
                await self._all_asked.wait()
        except TimeoutError:
            pass

    # --- state
    @property
    def nodes(self) -> tuple[KnownNode, ...]:
        return first_of_same(tuple(self._nodes.values()))

    @property
    def nodes_by_name(self) -> Mapping[str, KnownNode]:
        return {known.peer.name: known for known in self.nodes}

    @property
    def groups(self) -> Iterable[ModelGroup]:
        return (model.group for model in self._models.values())

    @property
    def in_flight(self) -> int:
        """The requests that other nodes work on for this one."""
        return sum(
            endpoint.in_flight for model in self._models.values() for endpoint in model.endpoints.values()
        )

    def status(self) -> Sequence[Mapping[str, Any]]:
        """Return the ``nodes`` of the status object (docs/design.md)."""
        return [self._status_of(known) for known in self.nodes]

    def gauges(self) -> NodeGauges:
        nodes = self.nodes
        in_flight = dict.fromkeys((known.peer.name for known in nodes), 0)
        for model in self._models.values():
            for name, endpoint in model.endpoints.items():
                in_flight[name] += endpoint.in_flight
        return NodeGauges(
            {known.peer.name: known.shown_state for known in nodes},
            in_flight,
            {id_: len(model.queue) for id_, model in self._models.items()},
        )

    def find(self, name: str) -> RemoteModel | None:
        """Return the model of other nodes with this name in any spelling."""
        found = self.index.resolve(name)
        return self._models.get(found[0]) if len(found) == 1 else None

    def why(self, model: RemoteModel, own: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return the answer of ``GET models/{id}/why``. ``own``: that of this node, if it has the model
        too.
        """
        group = model.group
        found = explain_nodes(group, self.nodes_by_name, len(model.queue))
        route = self.routes.get(group.model.id)
        last = route.served.last if route is not None and isinstance(route.served, SharedModel) else None
        if last is not None:
            reason = f"The last request went {last.where.value}: {last.reason}."
            found = replace(found, sentences=(*found.sentences, reason))
        if own is None:
            state = ShownState.READY if model.is_warm else ShownState.STOPPED
            return {
                "model": group.model.id,
                "state": state.value,
                "sentences": list(found.sentences),
                "change": list(found.change),
                "decisions": [],
            }
        return {**own, "sentences": [*own["sentences"], *found.sentences]}

    def _listed(self, model: RemoteModel) -> ListedModel:
        group = model.group
        here = self._catalog.resolve(group.model.id) if group.is_local else None
        if here is None or isinstance(here, HttpError):
            return listed_remote(group, self.nodes_by_name)
        return listed_shared(here.listed(), group, self.nodes_by_name)

    def _status_of(self, known: KnownNode) -> Mapping[str, Any]:
        listing = known.listing
        models = []
        for listed in () if listing is None else listing.models:
            remote = self._models.get(listed.id)
            endpoint = None if remote is None else remote.endpoints.get(known.peer.name)
            models.append(
                {
                    "id": listed.id,
                    "aliases": list(listed.aliases),
                    "state": listed.state if known.gets_requests else known.shown_state,
                    "slots": listed.slots or None,
                    "slots_busy": listed.busy,
                    "in_flight": 0 if endpoint is None else endpoint.in_flight,
                    "queued": listed.queued,
                    "ctx_size": listed.ctx_size,
                    "load": None
                    if listed.percent is None and listed.eta_s is None
                    else {"percent": listed.percent, "eta_s": listed.eta_s},
                    "problem": listed.problem or None,
                }
            )
        return {
            "name": known.peer.name,
            "url": known.peer.url,
            "state": known.shown_state,
            "reason": known.reason or None,
            "remedy": known.remedy or None,
            "version": None if listing is None else listing.version,
            "in_flight": sum(model["in_flight"] for model in models),
            "models": models,
        }

    # --- changes
    def ask_stop(self, *, now: bool) -> None:
        """Send no more requests; ``now``: also end the ones that other nodes work on."""
        self._stopping = True
        for model in self._models.values():
            model.pause(STOPPING)
            if now:
                model.close(STOPPING)

    async def drained(self, timeout_s: float) -> None:
        """Wait until no other node works on a request, for a limited time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.in_flight:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            _log.warning("Other nodes still work on %d requests; they end now.", self.in_flight)

    def refresh(self) -> None:
        """Apply what is known of the nodes, and of the models of this one."""
        for _ in self._refreshed():
            pass

    def _refreshed(self) -> Iterator[None]:
        """Do ``refresh`` in slices. A later one ends it, because that one applies everything."""
        if self._stopping:
            return
        self._refreshes = number = self._refreshes + 1
        nodes = self.nodes_by_name
        groups = groups_of(tuple(nodes.values()), self.membership.expected(), self._catalog.model_named)
        routes: dict[str, NodeRoute] = {}
        for count, group in enumerate(groups, 1):
            routes |= dict.fromkeys(group.model.names, self._applied(group, nodes))
            if not count % _SLICE:
                yield
                if number != self._refreshes:
                    return
        for id_ in self._models.keys() - {group.model.id for group in groups}:
            if self._waiting.pop(id_, 0):
                self.membership.wanted(id_, 0)
            self._models.pop(id_).close(
                HttpError(404, f"The model {id_!r} does not exist any more", "invalid_request_error")
            )
        self.routes = routes
        self.index = NameIndex({name: route.model.id for name, route in routes.items()})

    def _applied(self, group: ModelGroup, nodes: Mapping[str, KnownNode]) -> NodeRoute:
        id_ = group.model.id
        model = self._models.get(id_)
        if model is None:
            model = self._models[id_] = RemoteModel(
                group,
                timeout_s=self._timeout_s,
                max_waiting=self._max_waiting,
                continues_streams=self._continues_streams,
                on_wanted=partial(self._wanted, id_),
                on_idle=self._on_idle,
            )
        model.update(group, nodes, self._address_of)
        self._tell_wanted(model)
        served = self._shared(id_, model) if group.is_local else model
        return NodeRoute(group.model, served, partial(self._listed, model))

    def _refreshed_loads(self, name: str) -> Iterator[None]:
        """Apply the load of the models of one node, in slices; their names are the same as before."""
        if self._stopping:
            return
        number = self._refreshes
        nodes = self.nodes_by_name
        listing = self._nodes[name].listing
        for count, listed in enumerate(() if listing is None else listing.models, 1):
            if not count % _SLICE:
                yield
                if number != self._refreshes:
                    return
            model = self._models.get(listed.id)
            if model is None or model.group.nodes.get(name) in (None, listed):
                continue
            group = replace(model.group, nodes={**model.group.nodes, name: listed})
            model.update(group, nodes, self._address_of)
            route = self.routes.get(listed.id)
            if route is not None and isinstance(route.served, SharedModel):
                route.served.reconsider()

    def _shared(self, id_: str, model: RemoteModel) -> SharedModel:
        here = self._catalog.pool.managed_models[id_].served
        before = self.routes.get(id_)
        served = before.served if before is not None else None
        if not isinstance(served, SharedModel) or served.here is not here or served.elsewhere is not model:
            served = SharedModel(here, model)
        served.reconsider()
        return served

    def _address_of(self, name: str) -> NodeAddress | None:
        watch = self._watches.get(name)
        if watch is None:
            return None
        address, peer = address_of(watch.peer), watch.peer
        link = NodeLink(
            name,
            address.authority.encode(),
            self._catalog.node.encode(),
            watch.wake,
            watch.tls,
            replaced=bool(self.membership.expected()),
        )
        return NodeAddress(address, peer.key, link)

    def _wanted(self, id_: str) -> None:
        model = self._models.get(id_)
        if model is None:
            return
        for name in model.group.nodes:
            if name in self._watches:
                self._watches[name].wake()
        self._tell_wanted(model)

    def _tell_wanted(self, model: RemoteModel) -> None:
        """A source that starts nodes knows the requests that wait for one, also after a node went away."""
        id_, waiting = model.group.model.id, len(model.queue)
        if model.group.expected is not None and waiting != self._waiting.get(id_, 0):
            self._waiting[id_] = waiting
            self.membership.wanted(id_, waiting)

    def _is_urgent(self, name: str) -> bool:
        return any(name in model.group.nodes and model.awaits_load for model in self._models.values())

    # --- the membership
    def _follow(self, tasks: asyncio.TaskGroup) -> None:
        peers = {peer.name: peer for peer in self.membership.current()}
        for name, known in tuple(self._nodes.items()):
            now = peers.get(name)
            if now is None:  # it may still work on requests of this node
                self._unlisted.add(name)
                self._nodes[name] = replace(known, peer=replace(known.peer, leaving=True))
            elif replace(now, leaving=known.peer.leaving) == known.peer:
                self._unlisted.discard(name)
                self._nodes[name] = replace(known, peer=now)
            else:
                self._drop(name)
        for peer in peers.values():
            if peer.name not in self._nodes:
                self._watch(peer, tasks)
        unlisted = [name for name in self._nodes if name in self._unlisted]
        self._nodes = {name: self._nodes[name] for name in (*peers, *unlisted)}
        self.refresh()
        self._drop_unlisted()
        self._note_asked("")

    def _drop(self, name: str) -> None:
        self._tasks.pop(name).cancel()
        del self._watches[name], self._nodes[name]
        self._asked.discard(name)
        self._unlisted.discard(name)

    def _drop_unlisted(self) -> None:
        """Forget the nodes that the membership does not name any more, once their last request has ended, or
        they do not answer.
        """
        over = [
            name
            for name in self._unlisted
            if not self._nodes[name].keeps_requests or not self._in_flight_at(name)
        ]
        for name in over:
            self._drop(name)
        if over:
            self.refresh()

    def _in_flight_at(self, name: str) -> int:
        endpoints = (model.endpoints.get(name) for model in self._models.values())
        return sum(endpoint.in_flight for endpoint in endpoints if endpoint is not None)

    def _on_idle(self) -> None:
        self._idle.set()
        if self._unlisted:  # not inside the end of a request
            asyncio.get_running_loop().call_soon(self._drop_unlisted)

    def _watch(self, peer: Peer, tasks: asyncio.TaskGroup) -> None:
        name = peer.name
        self._nodes[name] = KnownNode(peer)
        watch = self._watches[name] = NodeWatch(
            peer,
            self._catalog.node,
            self._policy,
            on_listing=partial(self._on_listing, name),
            on_trouble=partial(self._on_trouble, name),
            is_urgent=partial(self._is_urgent, name),
        )
        self._tasks[name] = tasks.create_task(watch.run(), name=f"node {name}")

    async def _on_listing(self, name: str, listing: NodeListing) -> None:
        for _ in self._learn(name, lambda known: answered(known, listing, self._catalog.node)):
            await asyncio.sleep(0)
        for listed in listing.models:
            if (model := self._models.get(listed.id)) is not None:
                self._tell_wanted(model)

    def _on_trouble(self, name: str, trouble: Trouble) -> None:
        for _ in self._learn(name, lambda known: failed(known, trouble, self._policy)):
            pass

    def _learn(self, name: str, learn: Callable[[KnownNode], KnownNode]) -> Iterator[None]:
        """Apply news of a node in slices: between them, other tasks may run."""
        before = self._nodes[name]
        after = self._nodes[name] = learn(before)
        if (before.state, before.reason) != (after.state, after.reason) and not after.peer.leaving:
            _report(after, replaced=bool(self.membership.expected()))
        if before != after and not same_names(before, after):
            yield from self._refreshed()
        elif before != after:
            yield from self._refreshed_loads(name)
        self._note_asked(name)
        self._drop_unlisted()

    def _note_asked(self, name: str) -> None:
        if name:
            self._asked.add(name)
        if self._asked >= self._nodes.keys():
            self._all_asked.set()


def _report(known: KnownNode, *, replaced: bool) -> None:
    """Log the state. ``replaced``: another node starts for one that ends, so no user has to start it."""
    name = known.peer.name
    if known.state is NodeState.READY:
        _log.info("The node %r (%s) answers.", name, known.peer.url)
    elif known.reason:
        remedy = f"\n  → {sentence(known.remedy)}" if known.remedy and not replaced else ""
        _log.warning("The node %r (%s) gets no requests: %s.%s", name, known.peer.url, known.reason, remedy)
