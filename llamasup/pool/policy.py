"""Which models are loaded: who comes in, who goes for it, who waits (pure). The reasons are in
docs/residency.md.

Decides from what is, each time afresh: it remembers nothing, and what has been decided shows in the phases.
So it may be asked as often as one likes, and what a verdict was for may have gone by the next time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import nsmallest
from typing import Final, Literal, assert_never

from llamasup.pool.eviction import (
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
from llamasup.system.text import memory_text

__all__ = [
    "MAX_LOADS",
    "RECHECK_S",
    "Action",
    "Cordon",
    "DeviceBytes",
    "Evict",
    "Load",
    "ModelSnapshot",
    "Phase",
    "Reason",
    "Reject",
    "ResidencyPolicy",
    "Snapshot",
    "Uncordon",
    "WakeAt",
    "decide",
    "never_fits",
]

DeviceBytes = Mapping[str, int]
"""Bytes by place: ``ram``, and each device by llama-server's name for it (``CUDA0``)."""


Reason = Literal["memory", "group", "count", "ttl"]
"""Why one has to go: its memory is needed or too much, a group or ``max_loaded`` allows no more, it was
idle for long enough."""


class Phase(StrEnum):
    """Where a model is. All but ABSENT and FAILED hold the memory that they need."""

    ABSENT = "absent"
    LOADING = "loading"  # or restarting after a crash
    RESIDENT = "resident"
    CORDONED = "yielding"  # takes no new request, so that it can go; those in flight finish
    UNLOADING = "leaving"  # told to end; its memory is not free yet
    FAILED = "failed"  # cannot be loaded for now


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """One model as the policy sees it. Times are monotonic seconds."""

    id: str
    needs: DeviceBytes
    """Estimated, then measured; empty: not known yet."""
    phase: Phase = Phase.ABSENT
    pinned: bool = False
    groups: frozenset[str] = frozenset()
    ttl_s: float = float("inf")
    load_s: float = 1.0
    """What loading it again would cost."""
    in_flight: int = 0
    waiting: int = 0
    """Requests that wait for it to be loaded (or for a place); a load that somebody asked for counts too."""
    waiting_since_s: float = float("inf")
    """Since when the one that has waited longest does."""
    used_s: float = 0.0
    """The end of its last request, or of its load: since when it is idle, if nothing is in flight."""
    resident_since_s: float = 0.0
    use: Use = UNUSED
    """How much it was used lately; what is not known of it does no harm."""
    old_replicas: DeviceBytes = field(default_factory=dict[str, int])
    """The part of ``needs`` that is free again when the replacement of the process ends."""


@dataclass(frozen=True, slots=True)
class ResidencyPolicy:
    """``turn_s``: how long a request waits for a model that is shut out by busy ones before these have to
    give way; and how long a model that has just been loaded may stay before it is made to (or as long as its
    load took, where that is more). ``linger``: the part of its load time after its last request in which a
    model does not count as idle, since the next one may follow at once.
    """

    time_slice_s: float = 5.0
    idle_grace: float = 0.1
    max_loaded: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    now_s: float
    models: Mapping[str, ModelSnapshot]
    budget: DeviceBytes
    policy: ResidencyPolicy = field(default_factory=ResidencyPolicy)


@dataclass(frozen=True, slots=True)
class Load:
    id: str


@dataclass(frozen=True, slots=True)
class Evict:
    """End it: nothing is in flight. ``for_id``: who waits for what it holds, if somebody does."""

    id: str
    reason: Reason
    for_id: str = ""


@dataclass(frozen=True, slots=True)
class Cordon:
    """Take no new requests for it; end it when those in flight are over."""

    id: str
    for_id: str


@dataclass(frozen=True, slots=True)
class Uncordon:
    """It need not yield any more."""

    id: str


@dataclass(frozen=True, slots=True)
class Reject:
    """It can never be loaded with this budget: those who wait for it are to be told."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Decide again then, if nothing has happened before."""

    at_s: float


Action = Load | Evict | Cordon | Uncordon | Reject | WakeAt

_HOLDING: Final = frozenset({Phase.LOADING, Phase.RESIDENT, Phase.CORDONED, Phase.UNLOADING})
_STAYING: Final = _HOLDING - {Phase.UNLOADING}
MAX_LOADS: Final = 32
"""Models whose waiters are looked at in one decision, those first who have waited longest: it takes a few
milliseconds at most, whatever comes. On no machine are so many loaded that the next one could be served."""

RECHECK_S: Final = 1.0
"""While models give way, or are too much and busy: those who wait for them may leave without a word, and one
that is idle for a moment need not tell if nobody waits."""

_NEVER: Final = float("inf")
_SESSION_S: Final = 60.0  # to have been used this long ago weighs as much as one use lately
_MIN_S: Final = 0.001  # of an idle time that something is divided by
_REASONS: Final[tuple[Reason, ...]] = ("memory", "group", "count")
# what a model costs that is ... and, with what is added to it, everything dearer
_BUSY: Final[Cost] = (0, 1, 0.0)
_UNDUE: Final[Cost] = (1, 0, 0.0)


def decide(snapshot: Snapshot) -> tuple[Action, ...]:
    """What is to be done now. Nothing twice: what is under way is seen by its phase.

    Tenants that are absent or failed and that nobody waits for may be left out of ``world``. One with waiters
    whose needs are not known is passed over until they are.
    """
    return _Round(snapshot).actions()


def never_fits(id_: str, snapshot: Snapshot) -> str:
    """Why it cannot be loaded, however long one waits: with what is pinned and loaded it exceeds the budget.
    Empty: it can."""
    model = snapshot.models[id_]
    room = _capacity(snapshot)
    pinned = [
        each for each in snapshot.models.values() if each.pinned and each.phase in _STAYING and each.id != id_
    ]
    for each in pinned:
        take(room, _lasting(each))
    wanted = _demand(model)
    return "; ".join(_shortage(key, wanted[key], snapshot, pinned) for key in lacking(wanted, room))


def _shortage(key: Resource, wanted: int, snapshot: Snapshot, pinned: list[ModelSnapshot]) -> str:
    kind, name = key
    holders = [each for each in pinned if key in _lasting(each)]
    beside = ", ".join(sorted(each.id for each in holders))
    match kind:
        case "memory":
            held = sum(_lasting(each)[key] for each in holders)
            pinned_text = f", of which pinned models hold {memory_text(held)} ({beside})" if holders else ""
            budget = memory_text(snapshot.budget.get(name, 0))
            return f"it needs {memory_text(wanted)} of {name}, and the budget there is {budget}{pinned_text}"
        case "count":
            return (
                f"max_loaded is {snapshot.policy.max_loaded}, and so many pinned models are loaded ({beside})"
            )
        case "group":
            group, _, device = name.partition("@")
            return f"of group {group} one model at a time may be on {device}, and {beside} is pinned there"
        case _:
            assert_never(kind)


def _demand(model: ModelSnapshot) -> dict[Resource, int]:
    return demand(model.needs, model.groups)


def _lasting(model: ModelSnapshot) -> dict[Resource, int]:
    """The resources that it takes while it stays loaded."""
    old_replicas = model.old_replicas
    needs = {place: size - old_replicas.get(place, 0) for place, size in model.needs.items()}
    return demand(needs, model.groups)


def _capacity(snapshot: Snapshot) -> dict[Resource, int]:
    room: dict[Resource, int] = {("memory", place): size for place, size in snapshot.budget.items()}
    most = snapshot.policy.max_loaded
    room[COUNT] = len(snapshot.models) if most is None else most
    for model in snapshot.models.values():
        if model.groups:
            room |= {key: 1 for key in _demand(model) if key[0] == "group"}
    return room


class _Round:
    """One decision. ``free`` is free now; ``soon`` is what will be when all have gone that go, less what
    older claims are promised of it. A model may be started if it fits in both."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.now = snapshot.now_s
        self.snapshot = snapshot
        self.policy = snapshot.policy
        self.holding = [each for each in snapshot.models.values() if each.phase in _HOLDING]
        self.free = _capacity(snapshot)
        self.most = dict(self.free)  # that will ever be free, as long as what is pinned stays
        self.expected_free = dict(self.free)
        self.candidates: list[Candidate] = []
        for each in self.holding:
            held = _demand(each)
            take(self.free, held)
            if each.phase is Phase.UNLOADING:
                continue
            take(self.expected_free, held)
            if each.pinned:
                take(self.most, _lasting(each))
            else:
                self.candidates.append(Candidate(each.id, held, self.cost(each)))
        self.kept: set[str] = set()  # those that an older claim will take, once it may
        self.lacked: set[Resource] = set()  # by claims that have waited for long enough
        self.going: dict[str, Evict | Cordon] = {}
        self.others: list[Action] = []
        self.wakes: list[float] = []

    def actions(self) -> tuple[Action, ...]:
        self.expire()
        self.come_within_bounds()
        claims = [
            each
            for each in self.snapshot.models.values()
            if each.phase is Phase.ABSENT and each.waiting and each.needs
        ]
        for claim in nsmallest(MAX_LOADS, claims, key=lambda each: (each.waiting_since_s, each.id)):
            self.serve(claim)
        resumed = (
            Uncordon(each.id)
            for each in self.holding
            if each.phase is Phase.CORDONED and each.id not in self.going and not self.is_still_lacked(each)
        )
        due = [at for at in self.wakes if self.now < at < _NEVER]
        wake = (WakeAt(min(due)),) if due else ()
        return (*resumed, *self.orders(), *self.others, *wake)

    def is_still_lacked(self, model: ModelSnapshot) -> bool:
        """Whether what it holds is of use to a claim that has waited for long enough and gets nothing that is
        idle. Several such claims may take each other's choices away in turns: who yields goes on with it.
        """
        return not self.lacked.isdisjoint(_demand(model))

    def orders(self) -> Iterator[Evict | Cordon]:
        """What is not under way already."""
        for id_, order in self.going.items():
            if isinstance(order, Evict) or self.snapshot.models[id_].phase is Phase.RESIDENT:
                yield order

    def expire(self) -> None:
        for each in self.holding:
            if each.phase is not Phase.RESIDENT or each.pinned or each.in_flight or each.waiting:
                continue
            due = each.used_s + each.ttl_s
            if self.now >= due:
                self.going[each.id] = Evict(each.id, "ttl")
                add(self.expected_free, _demand(each))
            else:
                self.wakes.append(due)

    def come_within_bounds(self) -> None:
        """The budget has become less, or a model has turned out larger: idle ones go. Busy ones are left
        until they are idle, or until somebody waits for what they hold."""
        over = {key: -amount for key, amount in self.expected_free.items() if amount < 0}
        if not over:
            return
        helping = [each for each in self.movable() if any(key in each.frees for key in over)]
        idle = [each for each in helping if each.cost < _BUSY]
        chosen = cheapest_set(idle, over)
        if chosen is None and len(idle) < len(helping):
            self.wakes.append(self.now + RECHECK_S)
        self.send(idle if chosen is None else chosen, over, "")

    def serve(self, claim: ModelSnapshot) -> None:
        wanted = _demand(claim)
        if lacking(wanted, self.most):
            self.others.append(Reject(claim.id, never_fits(claim.id, self.snapshot)))
            return
        lack = lacking(wanted, self.expected_free)
        overdue_at = claim.waiting_since_s + self.policy.time_slice_s
        if lack:
            overdue = self.now >= overdue_at
            candidates = self.movable()
            chosen = cheapest_set([each for each in candidates if overdue or each.cost < _BUSY], lack)
            if overdue and (chosen is None or any(each.cost >= _BUSY for each in chosen)):
                self.lacked |= lack.keys()
            if chosen is None or any(each.cost >= _UNDUE for each in chosen):
                self.wakes += [overdue_at, *self.changes(candidates if chosen is None else chosen)]
            if chosen is None:
                return
            self.send(chosen, lack, claim.id)
        elif not lacking(wanted, self.free):
            self.others.append(Load(claim.id))
            take(self.free, wanted)
        take(self.expected_free, wanted)

    def movable(self) -> list[Candidate]:
        """Those that can be sent away, some day, and that no older claim gets."""
        return [each for each in self.candidates if each.id not in self.going and each.id not in self.kept]

    def cost(self, model: ModelSnapshot) -> Cost:
        """Of losing it: first what may not go yet, then what is in use, then what it would take to have it
        again."""
        if model.phase is Phase.LOADING:
            return _UNDUE  # its end is an event
        if self.now >= self.idle_at(model):
            idle_s = max(self.now - model.used_s, _MIN_S)
            return 0, 0, model.load_s * (model.use.at(self.now) + _SESSION_S / idle_s)
        if model.phase is Phase.CORDONED:
            return _BUSY  # rather than one more
        if self.now >= self.turn_ends_at(model):
            return 0, 1, model.load_s / max(self.now - model.resident_since_s, _MIN_S)
        return _UNDUE

    def idle_at(self, model: ModelSnapshot) -> float:
        if model.in_flight or model.waiting:
            return _NEVER
        return model.used_s + self.policy.idle_grace * model.load_s

    def turn_ends_at(self, model: ModelSnapshot) -> float:
        """Half of the time at most goes into loading, however many want the same place."""
        return model.resident_since_s + max(self.policy.time_slice_s, model.load_s)

    def changes(self, candidates: Iterable[Candidate]) -> Iterator[float]:
        """When one of these may go that may not now."""
        for each in candidates:
            model = self.snapshot.models[each.id]
            if model.phase is not Phase.LOADING:
                yield self.idle_at(model)
                yield self.turn_ends_at(model)

    def send(self, chosen: Sequence[Candidate], lack: Demand, for_id: str) -> None:
        """All together or, while one may not go yet, none; then younger claims cannot have them either."""
        ripe = all(each.cost < _UNDUE for each in chosen)
        for each in chosen:
            add(self.expected_free, each.frees)
            if not ripe:
                self.kept.add(each.id)
            elif self.snapshot.models[each.id].in_flight:
                self.going[each.id] = Cordon(each.id, for_id)
                self.wakes.append(self.now + RECHECK_S)
            else:
                self.going[each.id] = Evict(each.id, _reason(each.frees, lack), for_id)


def _reason(frees: Demand, lack: Demand) -> Reason:
    helps = {kind for kind, name in lack if (kind, name) in frees}
    return next(kind for kind in _REASONS if kind in helps)
