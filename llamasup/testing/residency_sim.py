"""Clients in a world of models: to compare policies, or to ask how many loads the trace of a run needs."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from llamasup.pool.policy import Action, Cordon, DeviceBytes, Evict, Load, ResidencyPolicy, decide
from llamasup.testing.residency_world import Decide, Model, ModelWorld

__all__ = ["Call", "Outcome", "Request", "Simulation", "replay", "simulate"]


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a client: ``after_s`` after its last answer (its first: after the start)."""

    model: str
    service_s: float = 0.0
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it was: when it came, and how long its model worked at it once it was let in."""

    model: str
    arrived_s: float
    service_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """``hits``: requests that found their model loaded and were served by that load. ``waits_s``: of each
    answered request from its arrival to its service. ``loads`` by model."""

    answered: int
    refused: int
    hits: int
    loads: Mapping[str, int]
    load_s: float
    evictions: int
    yields: int
    waits_s: tuple[float, ...]
    ended_s: float
    trace: tuple[Request, ...]
    log: tuple[tuple[float, Action], ...]

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.answered, 1)


@dataclass(frozen=True, slots=True)
class _Asked:
    client: int
    call: Call
    arrived_s: float


class Simulation:
    """Clients who each ask one thing after the other: the next follows the answer, or the refusal, of the one
    before."""

    def __init__(self, world: ModelWorld, clients: Sequence[Sequence[Call]]) -> None:
        self.world = world
        self.clients = [iter(calls) for calls in clients]
        self.issued = 0
        self.asked: dict[int, _Asked] = {}
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
        self.asked[self.world.arrive(call.model)] = _Asked(client, call, self.world.now_s)

    def _begin(self) -> None:
        world = self.world
        for ticket in world.began:
            asked = self.asked.pop(ticket)
            self.waits_s.append(world.now_s - asked.arrived_s)
            self.hits += world.lives[asked.call.model].resident_since_s <= asked.arrived_s
            self._at(world.now_s + asked.call.service_s, partial(self._answer, asked))
        world.began.clear()

    def _answer(self, asked: _Asked) -> None:
        self.answered += 1
        self.world.finish(asked.call.model)
        self._next(asked.client)

    def _follow(self, actions: list[Action]) -> None:
        world = self.world
        for action in actions:
            match action:
                case Load(id_):
                    after_s = world.lives[id_].model.load_s
                    self._at(world.now_s + after_s, partial(world.loaded, id_))
                case Evict(id_):
                    after_s = world.lives[id_].model.leave_s
                    self._at(world.now_s + after_s, partial(world.gone, id_))
        self._begin()
        for ticket in world.refused:
            self.refused += 1
            self._next(self.asked.pop(ticket).client)
        world.refused.clear()
        if world.wake_at_s < self._woken_at_s:
            self._woken_at_s = world.wake_at_s
            self._at(world.wake_at_s, self._woken)

    def _woken(self) -> None:
        self._woken_at_s = float("inf")

    def _outcome(self) -> Outcome:
        lives = self.world.lives.values()
        log = tuple(self.world.log)
        return Outcome(
            answered=self.answered,
            refused=self.refused,
            hits=self.hits,
            loads={life.model.id: life.loads for life in lives},
            load_s=sum(life.loads * life.model.load_s for life in lives),
            evictions=sum(isinstance(action, Evict) for _, action in log),
            yields=sum(isinstance(action, Cordon) for _, action in log),
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
    """The requests of a real run once more, each at its time whatever becomes of the others: how many loads
    would they have needed? ``models`` have the load times and needs that were measured."""
    clients = [[Call(request.model, request.service_s, request.arrived_s)] for request in requests]
    return simulate(models, clients, budget, policy)
