"""Decides which models to load, evict and cordon (pure). docs/residency.md has the rules.
Keeps no state between decisions: earlier decisions show in the phases of the models. It may be called at any
time; what an earlier action was for may be gone by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from heapq import nsmallest
from typing import Final, Literal, assert_never

from msgspec import Struct, field

from llamasup.core.pool.cheapest_set import (
    COUNT,
    UNUSED,
    Candidate,
    Cost,
    Demand,
    Resource,
    Use,
    add,
    cheapest_set,
    demand,
    lacking,
    take,
)
from llamasup.core.system.text import memory_text

DeviceBytes = Mapping[str, int]
"""Bytes by device: ``ram``, and each device by llama-server's name for it (``CUDA0``)."""


Reason = Literal["memory", "group", "count", "ttl"]
"""Why a model is evicted: its memory is needed or over the budget, its group or ``max_loaded`` is full, or
its time to live has expired."""


class Phase(StrEnum):
    """The state of a model. In all phases but ABSENT and FAILED it holds its memory."""

    ABSENT = "absent"
    LOADING = "loading"  # or restarting after a crash
    RESIDENT = "resident"
    CORDONED = "cordoned"  # gets no new requests, so that it can be evicted after those in flight
    UNLOADING = "unloading"  # its processes are stopping; its memory is not free yet
    FAILED = "failed"  # cannot be loaded for now


class ModelSnapshot(Struct, frozen=True):
    """One model as the policy sees it. Times are monotonic seconds."""

    id: str
    needs: DeviceBytes
    """Estimated, then measured."""
    phase: Phase = Phase.ABSENT
    pinned: bool = False
    groups: frozenset[str] = frozenset()
    ttl_s: float = float("inf")
    load_s: float = 1.0
    """The cost of another load."""
    in_flight: int = 0
    waiting: int = 0
    """Requests that wait for a load or a permit, and pending ``load`` commands."""
    waiting_since_s: float = float("inf")
    """The start of the longest wait."""
    used_s: float = 0.0
    """The end of its last request or of its load. The model is idle since then if nothing is in flight."""
    resident_since_s: float = 0.0
    use: Use = UNUSED
    """Recent use; the default is safe where it is not known."""
    old_replicas: DeviceBytes = field(default_factory=dict[str, int])
    """The part of ``needs`` that is free again at the end of a rollout."""


class ResidencyPolicy(Struct, frozen=True):
    """``time_slice_s``: how long a request waits before busy models are cordoned for it, and the least time
    that a busy model stays loaded (or its load time, if that is more). ``idle_grace``: the part of its load
    time that a model counts as busy after its last request, because the next may follow at once.
    """

    time_slice_s: float = 5.0
    idle_grace: float = 0.1
    max_loaded: int | None = None


class Snapshot(Struct, frozen=True):
    now_s: float
    models: Mapping[str, ModelSnapshot]
    budget: DeviceBytes
    policy: ResidencyPolicy = field(default_factory=ResidencyPolicy)


class Load(Struct, frozen=True):
    id: str


class Evict(Struct, frozen=True):
    """Unload a model without requests in flight. ``for_id``: the model that gets its memory, if any."""

    id: str
    reason: Reason
    for_id: str = ""


class Cordon(Struct, frozen=True):
    """Send no new requests to the model, so that it can be evicted after those in flight."""

    id: str
    for_id: str


class Uncordon(Struct, frozen=True):
    """Send requests to the model again."""

    id: str


class Reject(Struct, frozen=True):
    """The model can never be loaded with this budget: reject the requests that wait for it."""

    id: str
    reason: str


class WakeAt(Struct, frozen=True):
    """Decide again at this time if no event comes before."""

    at_s: float


Action = Load | Evict | Cordon | Uncordon | Reject | WakeAt


class Grounds(Struct, frozen=True):
    """The numbers behind the decision about a model that is to be loaded.

    ``free``: of the ``wanted`` resources, now. ``lack``: the missing amounts once the evictions under way are
    over; empty: nothing more has to be evicted. ``chosen``: the models that it evicts, or waits for; empty:
    no set of models that may be evicted by now frees enough. From ``overdue_at_s`` on, these include models
    that are busy.
    """

    wanted: Demand
    free: Demand
    lack: Demand
    chosen: tuple[Candidate, ...]
    overdue_at_s: float

    @property
    def missing(self) -> tuple[Resource, ...]:
        """The resources of which less is free now than wanted."""
        return tuple(lacking(self.wanted, self.free))

    @property
    def idle_models_suffice(self) -> bool:
        """Whether nothing more than the eviction of idle models is needed."""
        return not self.lack or (
            bool(self.chosen) and all(candidate.cost < _BUSY for candidate in self.chosen)
        )


class Decided(Struct, frozen=True):
    """``grounds``: by the id of the model to load; with the id ``""`` of evictions that the budget needs."""

    actions: tuple[Action, ...]
    grounds: Mapping[str, Grounds]


_HOLDING: Final = frozenset({Phase.LOADING, Phase.RESIDENT, Phase.CORDONED, Phase.UNLOADING})
_STAYING: Final = _HOLDING - {Phase.UNLOADING}
MAX_LOADS: Final = 32
"""Waiting models that one decision looks at, the longest wait first: a few milliseconds at most. No machine
holds so many models that the next one could be loaded."""

RECHECK_S: Final = 1.0
"""While models are cordoned, or over the budget and busy: a waiting client may leave, and a model may become
idle for a moment, without an event."""

_NEVER: Final = float("inf")
_SESSION_S: Final = 60.0  # a last use this long ago weighs as much as one recent use
_MIN_S: Final = 0.001  # lower bound of a divisor
_REASONS: Final[tuple[Reason, ...]] = ("memory", "group", "count")
_BUSY: Final[Cost] = (0, 1, 0.0)  # a model in use, and everything dearer
_UNDUE: Final[Cost] = (1, 0, 0.0)  # a model that may not be evicted yet


def decide(snapshot: Snapshot) -> tuple[Action, ...]:
    """The actions that are due now. Actions under way show in the phases and are not repeated.

    ``snapshot`` may omit absent and failed models without waiting requests, and omits those whose needs are
    not known yet.
    """
    return _Decision(snapshot).actions()


def decide_with_grounds(snapshot: Snapshot) -> Decided:
    """Decide as ``decide`` does, with the numbers behind the actions."""
    decision = _Decision(snapshot)
    return Decided(decision.actions(), decision.grounds)


def never_fits(id_: str, snapshot: Snapshot) -> str:
    """The reason why the model exceeds the budget next to the loaded pinned models. Empty if it can fit."""
    model = snapshot.models[id_]
    capacity = _capacity(snapshot)
    pinned = [
        other
        for other in snapshot.models.values()
        if other.pinned and other.phase in _STAYING and other.id != id_
    ]
    for other in pinned:
        take(capacity, _lasting(other))
    wanted = _demand(model)
    return "; ".join(_shortage(key, wanted[key], snapshot, pinned) for key in lacking(wanted, capacity))


def _shortage(key: Resource, wanted: int, snapshot: Snapshot, pinned: list[ModelSnapshot]) -> str:
    kind, name = key
    holders = [model for model in pinned if key in _lasting(model)]
    names = ", ".join(sorted(model.id for model in holders))
    match kind:
        case "memory":
            held = sum(_lasting(model)[key] for model in holders)
            pinned_text = f", of which pinned models hold {memory_text(held)} ({names})" if holders else ""
            budget = memory_text(snapshot.budget.get(name, 0))
            return f"it needs {memory_text(wanted)} of {name}, and the budget is {budget}{pinned_text}"
        case "count":
            return f"max_loaded is {snapshot.policy.max_loaded}, and pinned models use all of it ({names})"
        case "group":
            group, _, device = name.partition("@")
            return f"group {group} allows one model on {device}, and {names} is pinned there"
        case _:
            assert_never(kind)


def _demand(model: ModelSnapshot) -> dict[Resource, int]:
    return demand(model.needs, model.groups)


def _lasting(model: ModelSnapshot) -> dict[Resource, int]:
    """The resources that the model takes while it stays loaded."""
    needs = {device: size - model.old_replicas.get(device, 0) for device, size in model.needs.items()}
    return demand(needs, model.groups)


def _capacity(snapshot: Snapshot) -> dict[Resource, int]:
    capacity: dict[Resource, int] = {("memory", device): size for device, size in snapshot.budget.items()}
    max_loaded = snapshot.policy.max_loaded
    capacity[COUNT] = len(snapshot.models) if max_loaded is None else max_loaded
    for model in snapshot.models.values():
        if model.groups:
            capacity |= {key: 1 for key in _demand(model) if key[0] == "group"}
    return capacity


class _Decision:
    """One decision. ``free`` is free now; ``expected_free`` is free after all evictions, less the share of
    models that have waited longer. A model is loaded if it fits in both.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.now = snapshot.now_s
        self.snapshot = snapshot
        self.policy = snapshot.policy
        self.holding = [model for model in snapshot.models.values() if model.phase in _HOLDING]
        self.free = _capacity(snapshot)
        self.max_free = dict(self.free)  # free without all models that are not pinned
        self.expected_free = dict(self.free)
        self.candidates: list[Candidate] = []
        for model in self.holding:
            held = _demand(model)
            take(self.free, held)
            if model.phase is Phase.UNLOADING:
                continue
            take(self.expected_free, held)
            if model.pinned:
                take(self.max_free, _lasting(model))
            else:
                self.candidates.append(Candidate(model.id, held, self.cost(model)))
        self.reserved: set[str] = set()  # candidates that a longer wait gets once they may be evicted
        self.overdue_lack: set[Resource] = set()  # missing for models that have waited a time slice
        self.evictions: dict[str, Evict | Cordon] = {}
        self.loads: list[Action] = []
        self.grounds: dict[str, Grounds] = {}
        self.wakes: list[float] = []

    def actions(self) -> tuple[Action, ...]:
        self.evict_expired()
        self.evict_over_budget()
        wanted = [
            model for model in self.snapshot.models.values() if model.phase is Phase.ABSENT and model.waiting
        ]
        for model in nsmallest(MAX_LOADS, wanted, key=lambda model: (model.waiting_since_s, model.id)):
            self.load(model)
        uncordoned = (
            Uncordon(model.id)
            for model in self.holding
            if model.phase is Phase.CORDONED
            and model.id not in self.evictions
            and not self.is_still_lacked(model)
        )
        new = (
            action
            for id_, action in self.evictions.items()
            if isinstance(action, Evict) or self.snapshot.models[id_].phase is Phase.RESIDENT
        )
        due = [at for at in self.wakes if self.now < at < _NEVER]
        wake = (WakeAt(min(due)),) if due else ()
        return (*uncordoned, *new, *self.loads, *wake)

    def is_still_lacked(self, model: ModelSnapshot) -> bool:
        """Whether an overdue load lacks a resource that the model holds. Several such loads may take each
        other's choices away in turns: a cordoned model stays cordoned meanwhile.
        """
        return not self.overdue_lack.isdisjoint(_demand(model))

    def evict_expired(self) -> None:
        for model in self.holding:
            if model.phase is not Phase.RESIDENT or model.pinned or model.in_flight or model.waiting:
                continue
            due = model.used_s + model.ttl_s
            if self.now >= due:
                self.evictions[model.id] = Evict(model.id, "ttl")
                add(self.expected_free, _demand(model))
            else:
                self.wakes.append(due)

    def evict_over_budget(self) -> None:
        """The budget has shrunk, or a model has turned out larger: evict idle models. Busy ones stay until
        they are idle, or until a request waits for their memory.
        """
        over = {key: -amount for key, amount in self.expected_free.items() if amount < 0}
        if not over:
            return
        helping = [candidate for candidate in self.available() if any(key in candidate.frees for key in over)]
        idle = [candidate for candidate in helping if candidate.cost < _BUSY]
        chosen = cheapest_set(idle, over)
        if chosen is None and len(idle) < len(helping):
            self.wakes.append(self.now + RECHECK_S)
        evicted = tuple(idle if chosen is None else chosen)
        self.grounds[""] = Grounds({}, {}, over, evicted, _NEVER)
        self.evict(evicted, over, "")

    def load(self, model: ModelSnapshot) -> None:
        wanted = _demand(model)
        if lacking(wanted, self.max_free):
            self.loads.append(Reject(model.id, never_fits(model.id, self.snapshot)))
            return
        lack = lacking(wanted, self.expected_free)
        overdue_at = model.waiting_since_s + self.policy.time_slice_s
        if lack:
            overdue = self.now >= overdue_at
            candidates = self.available()
            affordable = [candidate for candidate in candidates if overdue or candidate.cost < _BUSY]
            chosen = cheapest_set(affordable, lack)
            self.note(model, wanted, lack, chosen or ())
            if overdue and (chosen is None or any(candidate.cost >= _BUSY for candidate in chosen)):
                self.overdue_lack |= lack.keys()
            if chosen is None or any(candidate.cost >= _UNDUE for candidate in chosen):
                self.wakes += [overdue_at, *self.evictable_at(candidates if chosen is None else chosen)]
            if chosen is None:
                return
            self.evict(chosen, lack, model.id)
        else:
            self.note(model, wanted, lack)
            if not lacking(wanted, self.free):
                self.loads.append(Load(model.id))
                take(self.free, wanted)
        take(self.expected_free, wanted)

    def note(
        self, model: ModelSnapshot, wanted: Demand, lack: Demand, chosen: tuple[Candidate, ...] = ()
    ) -> None:
        """Keep the numbers of the decision about ``model``."""
        free = {resource: self.free.get(resource, 0) for resource in wanted}
        overdue_at_s = model.waiting_since_s + self.policy.time_slice_s
        self.grounds[model.id] = Grounds(wanted, free, lack, chosen, overdue_at_s)

    def available(self) -> list[Candidate]:
        """The candidates that are neither evicted nor reserved for a longer wait."""
        return [
            candidate
            for candidate in self.candidates
            if candidate.id not in self.evictions and candidate.id not in self.reserved
        ]

    def cost(self, model: ModelSnapshot) -> Cost:
        """The cost of an eviction: models that may not be evicted yet, then models in use, then load time."""
        if model.phase is Phase.LOADING:
            return _UNDUE  # an event reports its end
        if self.now >= self.idle_at(model):
            idle_s = max(self.now - model.used_s, _MIN_S)
            return 0, 0, model.load_s * (model.use.at(self.now) + _SESSION_S / idle_s)
        if model.phase is Phase.CORDONED:
            return _BUSY  # cheaper than to cordon another model
        if self.now >= self.slice_ends_at(model):
            return 0, 1, model.load_s / max(self.now - model.resident_since_s, _MIN_S)
        return _UNDUE

    def idle_at(self, model: ModelSnapshot) -> float:
        if model.in_flight or model.waiting:
            return _NEVER
        return model.used_s + self.policy.idle_grace * model.load_s

    def slice_ends_at(self, model: ModelSnapshot) -> float:
        """A slice is at least as long as the load: at most half of the time is spent on loads."""
        return model.resident_since_s + max(self.policy.time_slice_s, model.load_s)

    def evictable_at(self, candidates: Iterable[Candidate]) -> Iterator[float]:
        """The times from which a candidate may be evicted."""
        for candidate in candidates:
            model = self.snapshot.models[candidate.id]
            if model.phase is not Phase.LOADING:
                yield self.idle_at(model)
                yield self.slice_ends_at(model)

    def evict(self, chosen: Sequence[Candidate], lack: Demand, for_id: str) -> None:
        """Evict all of them, or reserve all of them while one may not be evicted yet."""
        all_due = all(candidate.cost < _UNDUE for candidate in chosen)
        for candidate in chosen:
            add(self.expected_free, candidate.frees)
            if not all_due:
                self.reserved.add(candidate.id)
            elif self.snapshot.models[candidate.id].in_flight:
                self.evictions[candidate.id] = Cordon(candidate.id, for_id)
                self.wakes.append(self.now + RECHECK_S)
            else:
                self.evictions[candidate.id] = Evict(candidate.id, _reason(candidate.frees, lack), for_id)


def _reason(frees: Demand, lack: Demand) -> Reason:
    kinds = {kind for kind, name in lack if (kind, name) in frees}
    return next(kind for kind in _REASONS if kind in kinds)
