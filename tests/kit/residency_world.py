"""A simulated pool that carries out the actions of a policy event by event, with a manual clock.

Raises ``PolicyViolation`` for an action that is impossible or exceeds a limit, from its own sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Final

from msgspec import Struct, field

from llamasup.core.pool.cheapest_set import UNUSED, Use
from llamasup.core.pool.eviction_policy import (
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

__all__ = ["Decide", "Model", "ModelWorld", "PolicyViolation"]

Decide = Callable[[Snapshot], tuple[Action, ...]]

_MAX_ROUNDS: Final = 100  # decisions without an event
_MAX_LOGGED: Final = 100_000


class PolicyViolation(AssertionError):
    """The policy ordered an impossible or forbidden action."""


class Model(Struct, frozen=True, kw_only=True):
    """``unload_s``: from its eviction until its memory is free. ``slots``: concurrent requests."""

    id: str
    needs: DeviceBytes
    load_s: float = 1.0
    unload_s: float = 0.0
    slots: int = 1
    pinned: bool = False
    groups: frozenset[str] = frozenset()
    ttl_s: float = float("inf")


class _ModelState(Struct):
    """One model now. ``queue``: ids and arrival times of its waiting requests."""

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
    """Call ``settle`` after each event. ``began`` and ``refused``: the ids of requests that were served or
    rejected; the caller empties them.
    """

    def __init__(
        self,
        models: Iterable[Model],
        budget: DeviceBytes,
        policy: ResidencyPolicy | None = None,
        decide: Decide = decide,
    ) -> None:
        self.states = {model.id: _ModelState(model) for model in models}
        self.budget: dict[str, int] = dict(budget)
        self.policy = ResidencyPolicy() if policy is None else policy
        self.decide = decide
        self.now_s = 0.0
        self.wake_at_s = float("inf")
        self.log: deque[tuple[float, Action]] = deque(maxlen=_MAX_LOGGED)
        self.began: list[int] = []
        self.refused: list[int] = []
        self._request_ids = count(1)

    def snapshot(self) -> Snapshot:
        models = {id_: state.snapshot() for id_, state in self.states.items()}
        return Snapshot(self.now_s, models, self.budget, self.policy)

    def arrive(self, id_: str) -> int:
        """Add a request; it is served at once if a slot is free. Returns its id."""
        request = next(self._request_ids)
        self.states[id_].queue.append((request, self.now_s))
        self._serve(self.states[id_])
        return request

    def finish(self, id_: str) -> None:
        """A request in flight has its answer."""
        state = self.states[id_]
        state.in_flight -= 1
        state.used_s = self.now_s
        state.use = state.use.after(self.now_s)
        self._serve(state)

    def give_up(self, id_: str, request: int) -> None:
        """A waiting client leaves."""
        state = self.states[id_]
        state.queue = deque(waiting for waiting in state.queue if waiting[0] != request)

    def loaded(self, id_: str) -> None:
        state = self._expect(id_, Phase.LOADING)
        state.phase = Phase.RESIDENT
        state.used_s = state.resident_since_s = self.now_s
        self._serve(state)

    def unloaded(self, id_: str) -> None:
        """Its memory is free."""
        self._expect(id_, Phase.UNLOADING).phase = Phase.ABSENT

    def failed(self, id_: str) -> list[int]:
        """The load fails. Returns the ids of its waiting requests, which are rejected."""
        state = self._expect(id_, Phase.LOADING)
        state.phase = Phase.FAILED
        return self._reject_waiting(state)

    def retry_allowed(self, id_: str) -> None:
        """The model may be loaded again."""
        self._expect(id_, Phase.FAILED).phase = Phase.ABSENT

    def settle(self) -> list[Action]:
        """Decide and apply until no action is left. Returns the actions."""
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
        raise PolicyViolation(f"endless actions: {done[-5:]}")

    def held(self) -> dict[str, int]:
        """Bytes in use by device."""
        total = dict.fromkeys(self.budget, 0)
        for state in self.states.values():
            if state.phase not in (Phase.ABSENT, Phase.FAILED):
                for device, size in state.model.needs.items():
                    total[device] = total.get(device, 0) + size
        return total

    def _apply(self, action: Action) -> None:
        match action:
            case Load(id_):
                state = self._expect(id_, Phase.ABSENT)
                state.phase = Phase.LOADING
                state.loads += 1
                self._check_limits(state.model)
            case Evict(id_):
                state = self._expect(id_, Phase.RESIDENT, Phase.CORDONED)
                if state.in_flight or state.model.pinned:
                    raise PolicyViolation(
                        f"{action}: {state.in_flight} in flight, pinned: {state.model.pinned}"
                    )
                state.phase = Phase.UNLOADING
            case Cordon(id_):
                state = self._expect(id_, Phase.RESIDENT)
                if state.model.pinned or not state.in_flight:
                    raise PolicyViolation(
                        f"{action}: {state.in_flight} in flight, pinned: {state.model.pinned}"
                    )
                state.phase = Phase.CORDONED
            case Uncordon(id_):
                state = self._expect(id_, Phase.CORDONED)
                state.phase = Phase.RESIDENT
                self._serve(state)
            case Reject(id_):
                self.refused += self._reject_waiting(self._expect(id_, Phase.ABSENT))
            case WakeAt(at_s):
                if at_s <= self.now_s:
                    raise PolicyViolation(f"{action} is not after {self.now_s}")
                self.wake_at_s = at_s

    def _expect(self, id_: str, *phases: Phase) -> _ModelState:
        state = self.states[id_]
        if state.phase not in phases:
            raise PolicyViolation(f"{id_} is {state.phase}, not {' or '.join(phases)}")
        return state

    def _check_limits(self, new: Model) -> None:
        held = self.held()
        over = [
            device for device, size in new.needs.items() if size and held[device] > self.budget.get(device, 0)
        ]
        if over:
            raise PolicyViolation(f"{new.id} was loaded into {over}: held {held}, budget {self.budget}")
        there = [
            state.model for state in self.states.values() if state.phase not in (Phase.ABSENT, Phase.FAILED)
        ]
        most = self.policy.max_loaded
        if most is not None and len(there) > most:
            raise PolicyViolation(f"{new.id} is the {len(there)}th of {most}")
        for other in there:
            shared = _devices(new) & _devices(other)
            if other is not new and shared and new.groups & other.groups:
                raise PolicyViolation(f"{new.id} shares {shared} with {other.id} of its group")

    def _serve(self, state: _ModelState) -> None:
        while state.phase is Phase.RESIDENT and state.queue and state.in_flight < state.model.slots:
            state.in_flight += 1
            self.began.append(state.queue.popleft()[0])

    def _reject_waiting(self, state: _ModelState) -> list[int]:
        requests = [request for request, _ in state.queue]
        state.queue.clear()
        return requests


def _devices(model: Model) -> frozenset[str]:
    return frozenset(device for device, size in model.needs.items() if size and device != "ram") or frozenset(
        {"ram"}
    )
