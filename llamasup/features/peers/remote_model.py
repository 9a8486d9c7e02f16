"""A model of other nodes: one queue, and an endpoint for each node. ``SharedModel`` adds this node.

The owner updates it with what is known of the nodes. An endpoint has as many permits as the node has slots
for the model, so that requests wait here, where clients take turns. The queue of the node protects it from
several nodes that send requests. A node that must first load the model gets only one request, which
starts the load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.http.address import Address
from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.answers import ContextWindow
from llamasup.core.pool.replicas.load_balancer import LoadBalancer
from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.queueing.endpoint import (
    BUSY,
    Endpoint,
    Lease,
    NodeLink,
    Serving,
    generation_ended,
    permits_of,
)
from llamasup.core.queueing.request_queue import RequestQueue
from llamasup.core.queueing.wait_estimate import ServedLoad, retry_after_s
from llamasup.core.settings.model import NO_REPAIRS, Repairs
from llamasup.features.peers.groups import (
    RETRY_S,
    Choice,
    ModelGroup,
    Where,
    choose_side,
    cold_choice,
    warm,
    why_not_served,
)
from llamasup.features.peers.nodes import KnownNode

COLD_PERMITS: Final = 1  # of a node that has to load the model first


class NodeAddress(Struct, frozen=True):
    """The address of a node, and how to connect to it."""

    address: Address
    key: str
    link: NodeLink


class RemoteModel:
    """A ``ServedModel``. ``on_wanted``: see ``RequestQueue``; also called when a waiting request goes away.
    ``on_idle`` is called each time the last request of a node ends.
    """

    repairs: Final = NO_REPAIRS
    """Its nodes decide that."""

    def __init__(
        self,
        group: ModelGroup,
        *,
        timeout_s: float,
        max_waiting: int,
        continues_streams: bool = False,
        on_wanted: Callable[[], None],
        on_idle: Callable[[], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.group = group
        self.balancer = LoadBalancer()
        self.queue = RequestQueue(
            self.serving,
            timeout_s=timeout_s,
            max_waiting=max_waiting,
            continues_streams=continues_streams,
            choose=self.balancer.pick_for,
            prefer=self.balancer.preference,
            on_wanted=on_wanted,
            on_unserved=lambda _: on_wanted(),
        )
        self.endpoints: dict[str, Endpoint] = {}
        """By the name of the node."""
        self._warm: tuple[Endpoint, ...] = ()
        self._cold: Endpoint | None = None
        self._only: Endpoint | None = None
        """The only one that can get requests: then no prompt has to be read."""
        self._why = why_not_served(group, {})
        self._generations = 0
        self._restarts: dict[str, int] = {}
        self._on_idle = on_idle
        self._paused: HttpError | None = None
        self._clock = clock

    def __repr__(self) -> str:
        return f"<RemoteModel {self.group.model.id!r}: {list(self.endpoints.values())!r}, {self.queue!r}>"

    # --- for the proxy
    def lease(self, *, infers: bool = False, body: bytes = b"") -> Lease | HttpError:
        if self._only is not None:
            return self._only.lease_if_free(infers=infers)
        state = self.serving()
        if isinstance(state, HttpError):
            return state
        free = self.free(state) if infers else state
        if not free:
            return BUSY
        return self.balancer.pick(self._healthy(free), infers=infers, body=body).lease(infers=infers)

    def serving(self) -> Serving:
        """Return the endpoints of the nodes that serve, else the endpoint of the node that should load the
        model.
        """
        if self._paused is not None:
            return self._paused
        if self._warm:
            return self._warm
        cold = self._cold
        return self._why_not() if cold is None or cold.busy >= COLD_PERMITS else (cold,)

    def load(self) -> ServedLoad:
        waiting, has_room = len(self.queue), not self.queue.is_full
        if self.is_warm:
            slots, free = permits_of(self.warm)
            return ServedLoad(slots, free, waiting, can_serve=has_room or free > 0)
        state = self.serving()
        if isinstance(state, HttpError):
            loads = state.cause == "loading"
            return ServedLoad(0, 0, waiting, loads, state.eta_s, state.queueable and has_room)
        return ServedLoad(0, 0, waiting)

    # --- for its owner
    @property
    def is_warm(self) -> bool:
        return bool(self._warm)

    @property
    def awaits_load(self) -> bool:
        """Whether a request waits until a node has loaded the model."""
        return not self._warm and bool(
            len(self.queue) or any(endpoint.busy for endpoint in self.endpoints.values())
        )

    @property
    def warm(self) -> tuple[Endpoint, ...]:
        """The endpoints of the serving nodes, without any that just broke a request."""
        return tuple(endpoint for endpoint in self._warm if endpoint.ejected_until_s <= self._clock())

    def free(self, endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
        return tuple(endpoint for endpoint in endpoints if endpoint.busy < endpoint.max_concurrent)

    def update(
        self,
        group: ModelGroup,
        nodes: Mapping[str, KnownNode],
        address_of: Callable[[str], NodeAddress | None],
    ) -> None:
        """Use these nodes. ``address_of`` returns the address of a node, or None before it can be reached."""
        self.group = group
        for name in tuple(self.endpoints):
            known = nodes.get(name)
            if name not in group.nodes or known is None or not known.keeps_requests:
                self._close(name, known)
            elif known.restarts != self._restarts[name]:
                self._close(name, known, "has been started again")
        for name, model in group.nodes.items():
            known = nodes.get(name)
            if known is None or not known.keeps_requests:
                continue
            endpoint = self.endpoints.get(name) or self._open(name, known, address_of(name))
            if endpoint is None:
                continue
            endpoint.max_concurrent = model.slots if model.serves else COLD_PERMITS
            if model.ctx_size:
                endpoint.window = ContextWindow(model.ctx_size, model.ctx_size)
        self._warm = tuple(self.endpoints[name] for name in warm(group, nodes) if name in self.endpoints)
        cold = cold_choice(group, nodes)
        self._cold = None if cold is None else self.endpoints.get(cold)
        self._why = why_not_served(group, nodes)
        is_only = len(group.nodes) == len(self._warm) == 1 and not group.is_local
        self._only = self._warm[0] if is_only and self._paused is None else None
        self.queue.changed()

    def pause(self, why: HttpError) -> None:
        """Grant no leases any more."""
        self._paused, self._only = why, None
        self.queue.changed()

    def close(self, why: HttpError) -> None:
        """End the requests and reject the waiting ones, because no node has the model any more."""
        self._why, self._warm, self._cold, self._only = why, (), None, None
        for name in tuple(self.endpoints):
            self._close(name, None)
        self.queue.changed()

    # --- private
    def _why_not(self) -> HttpError:
        """Return why no node serves it, with the remaining time of a start that nothing reports about."""
        why, expected = self._why, self.group.expected
        if expected is None or expected.ready_at_s is None or why.message != expected.message:
            return why
        left_s = expected.ready_at_s - self._clock()
        if left_s <= 0.0:  # it takes longer than the last one
            return replace(why, eta_s=None, retry_after_s=RETRY_S)
        return replace(why, eta_s=left_s, retry_after_s=retry_after_s(left_s))

    def _open(self, name: str, known: KnownNode, at: NodeAddress | None) -> Endpoint | None:
        if at is None:
            return None
        self._generations += 1
        endpoint = self.endpoints[name] = Endpoint(
            self.group.model.id,
            self._generations,
            at.address,
            at.key,
            max_concurrent=COLD_PERMITS,
            on_permit_free=self.queue.permit_freed,
            on_idle=lambda _: self._on_idle(),
            node=at.link,
        )
        self._restarts[name] = known.restarts
        return endpoint

    def _close(self, name: str, known: KnownNode | None, what: str = "") -> None:
        reason = what or (f"does not answer: {known.reason}" if known is not None and known.reason else "")
        endpoint = self.endpoints.pop(name)
        self._warm = tuple(each for each in self._warm if each is not endpoint)
        if self._cold is endpoint:
            self._cold = None
        if self._only is endpoint:
            self._only = None
        endpoint.close(
            generation_ended(f"The node {name!r} {reason or 'has gone'}", "node_absent", "try again")
        )

    def _healthy(self, endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
        """The endpoints that are not ejected, or all if all are."""
        now_s = self._clock()
        return tuple(endpoint for endpoint in endpoints if endpoint.ejected_until_s <= now_s) or endpoints


# --- a model that this node also has -------------------------------------------------------------------


class SharedModel:
    """A ``ServedModel`` of this node and of others. A request is sent, or waits, where ``choose_side`` says.

    Requests that another node has forwarded go to ``here`` without it.
    """

    def __init__(self, here: ReplicaSet, elsewhere: RemoteModel) -> None:
        self.here = here
        self.elsewhere = elsewhere
        elsewhere.queue.suspects = here.queue.suspects  # no node gets what ends servers
        self.last: Choice | None = None
        """The last choice, for ``why``."""

    @property
    def queue(self) -> RequestQueue:
        """The queue of the side where a request would wait now."""
        return self._of(self._choice()).queue

    @property
    def repairs(self) -> Repairs:
        """The repairs, which also apply to requests that another node gets first: they may come back."""
        return self.here.repairs

    def lease(self, *, infers: bool = False, body: bytes = b"") -> Lease | HttpError:
        choice = self.last = self._choice()
        elsewhere = self.elsewhere
        if choice.where is Where.HERE:
            matching = elsewhere.free(elsewhere.warm) if infers else ()
            if not matching or isinstance(state := self.here.serving(), HttpError):
                return self.here.lease(infers=infers, body=body)
            near = elsewhere.free(state)
            if near:  # another node gets it only if its cache has the beginning of the prompt
                picked = elsewhere.balancer.pick(near, infers=infers, body=body, others=matching)
                if picked.node is not None:
                    self.last = Choice(Where.ELSEWHERE, "another node has the beginning in its cache")
                return picked.lease(infers=infers)
        return self._of(choice).lease(infers=infers, body=body)

    def reconsider(self) -> None:
        """The other nodes have changed: requests that wait for them wait here if none of them serves."""
        elsewhere = self.elsewhere
        if len(elsewhere.queue) and self._choice().where is Where.HERE and not elsewhere.is_warm:
            elsewhere.queue.move_to(self.here.queue)

    def _of(self, choice: Choice) -> ReplicaSet | RemoteModel:
        return self.here if choice.where is Where.HERE else self.elsewhere

    def load(self) -> ServedLoad:
        """Return the load of the side where a request would be sent now."""
        return self._of(self._choice()).load()

    def _choice(self) -> Choice:
        return choose_side(self.here.load(), self.elsewhere.load())
