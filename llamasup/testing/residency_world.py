"""A world of models that carries out what ``core.residency`` decides, with time as an argument.

It is moved event by event, and raises ``Broken`` where a verdict cannot be carried out or must not be: it
does its own sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from llamasup.pool.eviction import UNUSED, Use
from llamasup.pool.policy import (
    Action,
    Cordon,
    DeviceBytes,
    Evict,
    Load,
    ModelSnapshot,
    Phase,
    Reject,
    ResidencyPolicy,
    Snapshot,
    Uncordon,
    WakeAt,
    decide,
)

__all__ = ["Broken", "Decide", "Model", "ModelWorld"]

Decide = Callable[[Snapshot], tuple[Action, ...]]

_MAX_ROUNDS: Final = 100  # of deciding without an event: a policy that goes on for ever is broken
_MAX_LOGGED: Final = 100_000  # verdicts kept for whoever wants to read what happened


class Broken(AssertionError):
    """The policy ordered what must never be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """``leave_s``: from being told to end to its memory's being free. ``slots``: requests at a time."""

    id: str
    needs: DeviceBytes
    load_s: float = 1.0
    leave_s: float = 0.0
    slots: int = 1
    pinned: bool = False
    groups: frozenset[str] = frozenset()
    ttl_s: float = float("inf")


@dataclass(slots=True)
class _Life:
    """One model as it is now. ``queue``: tickets and times of those who wait for it."""

    model: Model
    phase: Phase = Phase.ABSENT
    in_flight: int = 0
    queue: deque[tuple[int, float]] = field(default_factory=deque)
    used_s: float = 0.0
    resident_since_s: float = 0.0
    use: Use = UNUSED
    loads: int = 0

    def snapshot(self) -> ModelSnapshot:
        model = self.model
        return ModelSnapshot(
            model.id,
            model.needs,
            phase=self.phase,
            pinned=model.pinned,
            groups=model.groups,
            ttl_s=model.ttl_s,
            load_s=model.load_s,
            in_flight=self.in_flight,
            waiting=len(self.queue),
            waiting_since_s=self.queue[0][1] if self.queue else float("inf"),
            used_s=self.used_s,
            resident_since_s=self.resident_since_s,
            use=self.use,
        )


class ModelWorld:
    """Models in a budget, and requests known by their tickets. Every method that is an event of the world is
    followed by ``settle``. ``began`` and ``refused`` are the tickets that were, since they were last emptied.
    """

    def __init__(
        self,
        models: Iterable[Model],
        budget: DeviceBytes,
        policy: ResidencyPolicy | None = None,
        decide: Decide = decide,
    ) -> None:
        self.lives = {model.id: _Life(model) for model in models}
        self.budget: dict[str, int] = dict(budget)
        self.policy = ResidencyPolicy() if policy is None else policy
        self.decide = decide
        self.now_s = 0.0
        self.wake_at_s = float("inf")
        self.log: deque[tuple[float, Action]] = deque(maxlen=_MAX_LOGGED)
        self.began: list[int] = []
        self.refused: list[int] = []
        self._tickets = count(1)

    def snapshot(self) -> Snapshot:
        models = {id_: life.snapshot() for id_, life in self.lives.items()}
        return Snapshot(self.now_s, models, self.budget, self.policy)

    def arrive(self, id_: str) -> int:
        """A request; served at once where there is a slot, else it waits. Returns its ticket."""
        ticket = next(self._tickets)
        self.lives[id_].queue.append((ticket, self.now_s))
        self._serve(self.lives[id_])
        return ticket

    def finish(self, id_: str) -> None:
        """One of the requests in flight has its answer."""
        life = self.lives[id_]
        life.in_flight -= 1
        life.used_s = self.now_s
        life.use = life.use.after(self.now_s)
        self._serve(life)

    def give_up(self, id_: str, ticket: int) -> None:
        """One that waits does not any more."""
        life = self.lives[id_]
        life.queue = deque(waiting for waiting in life.queue if waiting[0] != ticket)

    def loaded(self, id_: str) -> None:
        life = self._expect(id_, Phase.LOADING)
        life.phase = Phase.RESIDENT
        life.used_s = life.resident_since_s = self.now_s
        self._serve(life)

    def gone(self, id_: str) -> None:
        """Its memory is free."""
        self._expect(id_, Phase.UNLOADING).phase = Phase.ABSENT

    def failed(self, id_: str) -> list[int]:
        """It cannot be loaded. Returns the tickets of its waiters, who are told."""
        life = self._expect(id_, Phase.LOADING)
        life.phase = Phase.FAILED
        return self._dismiss(life)

    def forgiven(self, id_: str) -> None:
        """It may be tried again."""
        self._expect(id_, Phase.FAILED).phase = Phase.ABSENT

    def settle(self) -> list[Action]:
        """Decide and carry out until there is nothing more to do. Returns what was carried out."""
        done: list[Action] = []
        for _ in range(_MAX_ROUNDS):
            actions = self.decide(self.snapshot())
            self.wake_at_s = float("inf")
            orders = [action for action in actions if not isinstance(action, WakeAt)]
            for action in actions:
                self._apply(action)
            self.log.extend((self.now_s, action) for action in orders)
            done += orders
            if not orders:
                return done
        raise Broken(f"no end of verdicts: {done[-5:]}")

    def held(self) -> dict[str, int]:
        """Bytes by place that are in use."""
        total = dict.fromkeys(self.budget, 0)
        for life in self.lives.values():
            if life.phase not in (Phase.ABSENT, Phase.FAILED):
                for place, size in life.model.needs.items():
                    total[place] = total.get(place, 0) + size
        return total

    def _apply(self, action: Action) -> None:
        match action:
            case Load(id_):
                life = self._expect(id_, Phase.ABSENT)
                life.phase = Phase.LOADING
                life.loads += 1
                self._check_room(life.model)
            case Evict(id_):
                life = self._expect(id_, Phase.RESIDENT, Phase.CORDONED)
                if life.in_flight or life.model.pinned:
                    raise Broken(f"{action}: {life.in_flight} in flight, pinned: {life.model.pinned}")
                life.phase = Phase.UNLOADING
            case Cordon(id_):
                life = self._expect(id_, Phase.RESIDENT)
                if life.model.pinned or not life.in_flight:
                    raise Broken(f"{action}: {life.in_flight} in flight, pinned: {life.model.pinned}")
                life.phase = Phase.CORDONED
            case Uncordon(id_):
                life = self._expect(id_, Phase.CORDONED)
                life.phase = Phase.RESIDENT
                self._serve(life)
            case Reject(id_):
                self.refused += self._dismiss(self._expect(id_, Phase.ABSENT))
            case WakeAt(at_s):
                if at_s <= self.now_s:
                    raise Broken(f"{action} is not after {self.now_s}")
                self.wake_at_s = at_s

    def _expect(self, id_: str, *phases: Phase) -> _Life:
        life = self.lives[id_]
        if life.phase not in phases:
            raise Broken(f"{id_} is {life.phase}, not {' or '.join(phases)}")
        return life

    def _check_room(self, new: Model) -> None:
        held = self.held()
        over = [
            place for place, size in new.needs.items() if size and held[place] > self.budget.get(place, 0)
        ]
        if over:
            raise Broken(f"{new.id} was loaded into {over}: held {held}, budget {self.budget}")
        there = [life.model for life in self.lives.values() if life.phase not in (Phase.ABSENT, Phase.FAILED)]
        most = self.policy.max_loaded
        if most is not None and len(there) > most:
            raise Broken(f"{new.id} is the {len(there)}th of {most}")
        for other in there:
            shared = _devices(new) & _devices(other)
            if other is not new and shared and new.groups & other.groups:
                raise Broken(f"{new.id} shares {shared} with {other.id} of its group")

    def _serve(self, life: _Life) -> None:
        while life.phase is Phase.RESIDENT and life.queue and life.in_flight < life.model.slots:
            life.in_flight += 1
            self.began.append(life.queue.popleft()[0])

    def _dismiss(self, life: _Life) -> list[int]:
        tickets = [ticket for ticket, _ in life.queue]
        life.queue.clear()
        return tickets


def _devices(model: Model) -> frozenset[str]:
    return frozenset(place for place, size in model.needs.items() if size and place != "ram") or frozenset(
        {"ram"}
    )
