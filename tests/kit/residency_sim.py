"""Simulates clients of a pool, to compare policies or to count the loads of a recorded run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count

from msgspec import Struct

from llamasup.core.pool.eviction_policy import (
    Action,
    Cordon,
    DeviceBytes,
    Evict,
    Load,
    ResidencyPolicy,
    decide,
)
from tests.kit.residency_world import Decide, Model, ModelWorld

__all__ = ["Call", "Outcome", "Request", "Simulation", "replay", "simulate"]


class Call(Struct, frozen=True):
    """One request of a client, ``after_s`` after its last answer or after the start."""

    model: str
    service_s: float = 0.0
    after_s: float = 0.0


class Request(Struct, frozen=True):
    """A recorded request: its arrival, and how long its model worked on it."""

    model: str
    arrived_s: float
    service_s: float


class Outcome(Struct, frozen=True):
    """``hits``: requests that found their model loaded and were served by that load. ``waits_s``: of each
    answered request. ``loads`` by model."""

    answered: int
    refused: int
    hits: int
    loads: Mapping[str, int]
    load_s: float
    evictions: int
    cordons: int
    waits_s: tuple[float, ...]
    ended_s: float
    trace: tuple[Request, ...]
    log: tuple[tuple[float, Action], ...]

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.answered, 1)


class _Pending(Struct, frozen=True):
    client: int
    call: Call
    arrived_s: float


class Simulation:
    """Clients that each send one request after the other, after the answer or the refusal."""

    def __init__(self, world: ModelWorld, clients: Sequence[Sequence[Call]]) -> None:
        self.world = world
        self.clients = [iter(calls) for calls in clients]
        self.issued = 0
        self.pending: dict[int, _Pending] = {}
        self.waits_s: list[float] = []
        self.trace: list[Request] = []
        self.hits = self.refused = self.answered = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._woken_at_s = float("inf")

    def run(self) -> Outcome:
        for client in range(len(self.clients)):
            self._next(client)
        while self._events:
            at_s, _, happen = heapq.heappop(self._events)
            self.world.now_s = at_s
            happen()
            self._begin()
            self._follow(self.world.settle())
        return self._outcome()

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), happen))

    def _next(self, client: int) -> None:
        call = next(self.clients[client], None)
        if call is not None:
            self._at(self.world.now_s + call.after_s, partial(self._ask, client, call))

    def _ask(self, client: int, call: Call) -> None:
        self.issued += 1
        self.trace.append(Request(call.model, self.world.now_s, call.service_s))
        self.pending[self.world.arrive(call.model)] = _Pending(client, call, self.world.now_s)

    def _begin(self) -> None:
        world = self.world
        for request_id in world.began:
            pending = self.pending.pop(request_id)
            self.waits_s.append(world.now_s - pending.arrived_s)
            self.hits += world.states[pending.call.model].resident_since_s <= pending.arrived_s
            self._at(world.now_s + pending.call.service_s, partial(self._answer, pending))
        world.began.clear()

    def _answer(self, pending: _Pending) -> None:
        self.answered += 1
        self.world.finish(pending.call.model)
        self._next(pending.client)

    def _follow(self, actions: list[Action]) -> None:
        world = self.world
        for action in actions:
            match action:
                case Load(id_):
                    after_s = world.states[id_].model.load_s
                    self._at(world.now_s + after_s, partial(world.loaded, id_))
                case Evict(id_):
                    after_s = world.states[id_].model.unload_s
                    self._at(world.now_s + after_s, partial(world.unloaded, id_))
        self._begin()
        for request_id in world.refused:
            self.refused += 1
            self._next(self.pending.pop(request_id).client)
        world.refused.clear()
        if world.wake_at_s < self._woken_at_s:
            self._woken_at_s = world.wake_at_s
            self._at(world.wake_at_s, self._woken)

    def _woken(self) -> None:
        self._woken_at_s = float("inf")

    def _outcome(self) -> Outcome:
        states = self.world.states.values()
        log = tuple(self.world.log)
        return Outcome(
            answered=self.answered,
            refused=self.refused,
            hits=self.hits,
            loads={state.model.id: state.loads for state in states},
            load_s=sum(state.loads * state.model.load_s for state in states),
            evictions=sum(isinstance(action, Evict) for _, action in log),
            cordons=sum(isinstance(action, Cordon) for _, action in log),
            waits_s=tuple(self.waits_s),
            ended_s=self.world.now_s,
            trace=tuple(self.trace),
            log=log,
        )


def simulate(
    models: Iterable[Model],
    clients: Sequence[Sequence[Call]],
    budget: DeviceBytes,
    policy: ResidencyPolicy | None = None,
    decide: Decide = decide,
) -> Outcome:
    """Run all clients to their ends."""
    return Simulation(ModelWorld(models, budget, policy, decide), clients).run()


def replay(
    models: Iterable[Model],
    requests: Iterable[Request],
    budget: DeviceBytes,
    policy: ResidencyPolicy | None = None,
) -> Outcome:
    """Replay the requests of a real run, each at its time, to count the loads. ``models`` have the measured
    load times and needs."""
    clients = [[Call(request.model, request.service_s, request.arrived_s)] for request in requests]
    return simulate(models, clients, budget, policy)
