"""One model of a pool: what is said of it, its processes, and where it is between absent and resident."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from llamasup.downloads.manager import Progress
from llamasup.errors import LlamasupError
from llamasup.gguf.facts import ModelFacts
from llamasup.models.folder import look_at
from llamasup.models.spec import ModelSpec
from llamasup.planning.facts import Launch, prepare, projector_beside
from llamasup.planning.memory.shares import MemoryBudget, needs_of
from llamasup.planning.planner import Planner
from llamasup.pool.eviction import UNUSED
from llamasup.pool.policy import ModelSnapshot, Phase
from llamasup.pool.replicas.replica_set import ReplicaSet
from llamasup.queueing.endpoint import Unavailable
from llamasup.queueing.wait_estimate import retry_after_s
from llamasup.supervision.backoff import HALF_OPEN_S
from llamasup.supervision.runner import InstanceRunner
from llamasup.supervision.states import LIVE, Policy, State
from llamasup.system.text import memory_text

__all__ = [
    "ManagedModel",
    "PendingDemand",
    "SizedModel",
    "absent",
    "as_unavailable",
    "being_unloaded",
    "estimate_model",
    "policy_for",
    "prepare_listed",
    "share_of",
    "with_devices",
]

T = TypeVar("T")

_NOWHERE = Path("/nonexistent")
# Weights come from a disk at about 1 GB/s, and a server needs a moment for itself. Until it was measured.
_BYTES_PER_S = 1e9
_MIN_LOAD_S = 0.5


@dataclass(frozen=True, slots=True)
class SizedModel:
    """What is known of ``spec`` before its first start. ``needs``: bytes by place, of all its replicas.
    ``found`` is the spec with the file that it led to, where that had to be downloaded first.
    """

    spec: ModelSpec
    launch: Launch
    needs: Mapping[str, int]
    found: ModelSpec

    def is_of(self, spec: ModelSpec) -> bool:
        """Whether processes made from this are what ``spec`` asks for."""
        return spec.started_as in (self.spec.started_as, self.found.started_as)


def estimate_model(
    spec: ModelSpec, budget: Mapping[str, int], runtime: str | None, environ: Mapping[str, str]
) -> SizedModel:
    """Read what a plan needs and see what it takes. Blocks for some milliseconds.

    Raises what ``prepare`` and ``Planner.check`` do: DoesNotFit where not even all of ``budget`` is enough.
    """
    launch = prepare_listed(spec, runtime=runtime, environ=environ)
    devices = launch.runtime.capabilities.devices
    share = share_of(spec, budget, alone=True)
    of_one: dict[tuple[str, ...], Mapping[str, int]] = {}  # by the devices that it has
    needs: Counter[str] = Counter()
    for number in range(spec.replicas):
        own = devices_of(spec, number)
        if own not in of_one:
            planner = Planner(with_devices(launch, spec, number), _NOWHERE, share=lambda: share)
            admission = planner.admission()
            if (refused := planner.refused(admission)) is not None:
                raise refused
            of_one[own] = needs_of(admission.plan.memory, devices)
        needs.update(of_one[own])
    return SizedModel(spec, launch, dict(needs), _as_found(spec, launch))


def _as_found(spec: ModelSpec, launch: Launch) -> ModelSpec:
    """As a registry says it of what was only just downloaded."""
    if spec.identity:
        return spec
    projector = None if launch.found is None else launch.found.projector
    beside = () if projector is None else (projector.path,)
    paths = (str(launch.model_path), *beside, *spec.options.files)
    states = (state for path in paths for state in look_at(Path(path)).files)
    return replace(spec, identity=tuple(dict.fromkeys(states)))


def share_of(spec: ModelSpec, places: Mapping[str, int], *, alone: bool = False) -> MemoryBudget:
    """What each of its processes may take of ``places``, which are for all of them."""
    return MemoryBudget(places, alone=alone, replicas=spec.replicas, devices=spec.options.devices or ())


def with_devices(launch: Launch, spec: ModelSpec, number: int) -> Launch:
    """As one replica is launched."""
    if spec.replicas == 1 or not spec.options.devices:
        return launch
    extra = (*launch.settings.extra, "--device", ",".join(devices_of(spec, number)))
    return replace(launch, settings=replace(launch.settings, extra=extra))


def devices_of(spec: ModelSpec, number: int) -> tuple[str, ...]:
    """Those of one replica: each has one of its own where there is more than one replica."""
    devices = spec.options.devices or ()
    return devices if spec.replicas == 1 or not devices else (devices[number % len(devices)],)


def policy_for(spec: ModelSpec, base: Policy, started: ModelSpec | None = None) -> Policy:
    """``base`` with what is said of this model. ``started``: what its processes are started from, where that
    is not (or not yet) what is said of it now.

    After a crash loop the pool decides about another try, since that takes memory; a process whose siblings
    serve has its memory, and tries by itself.
    """
    options, started = spec.options, started or spec
    half_open_s = (base.restart.half_open_s or HALF_OPEN_S) if started.replicas > 1 else None

    def said(own: T | None, otherwise: T) -> T:
        return otherwise if own is None else own

    return replace(
        base,
        restart=replace(base.restart, half_open_s=half_open_s),
        warm_up=said(started.options.warm_up, base.warm_up),
        wait_timeout_s=said(options.wait_timeout_s, base.wait_timeout_s),
        max_concurrent=said(options.max_concurrent, base.max_concurrent),
        max_queued=said(options.max_queued, base.max_queued),
        drain_timeout_s=said(options.drain_timeout_s, base.drain_timeout_s),
    )


@dataclass(frozen=True, slots=True)
class PendingDemand:
    """Of requests that were refused while it is not loaded, and told to come again: when the first was, and
    until when one may come (monotonic).
    """

    since_s: float
    until_s: float


class ManagedModel:
    """Owned by the pool, which alone changes it. Times are monotonic."""

    __slots__ = (
        "answered",
        "cordoned",
        "error",
        "leaving",
        "load_waiters",
        "load_waiters_since_s",
        "old_needs",
        "old_replicas",
        "pending_demand",
        "reload_after",
        "removed",
        "resident_since_s",
        "retry_at_s",
        "rolling_out",
        "rollout",
        "runners",
        "served",
        "sized",
        "sizing",
        "spec",
        "starting",
        "swapping",
        "unloaded",
        "unloading",
        "use",
    )

    def __init__(self, spec: ModelSpec, served: ReplicaSet) -> None:
        self.spec = spec
        self.served = served
        self.sized: SizedModel | None = None
        self.sizing: asyncio.Task[SizedModel | LlamasupError] | None = None  # and its download before
        self.runners: list[InstanceRunner] = []  # one for each replica, once it was wanted
        self.rolling_out = False  # what it was changed to is looked at, waits for its turn, or is swapped in
        self.swapping = False  # that is: from one spec to the next
        self.rollout: asyncio.Task[LlamasupError | None] | None = None  # the last; why it came to nothing
        self.reload_after = False  # it made way for its successor, which is to be loaded
        self.removed = False  # it is served no more, once it has ended
        self.unloaded = False  # as asked, and nobody has wanted it since: no reload preloads it
        self.old_replicas: list[InstanceRunner] = []  # of the spec before: they finish what they began
        self.old_needs: Mapping[str, int] = {}
        self.starting = False  # told to start, and nothing heard of it yet
        self.cordoned = False
        self.leaving = False
        self.unloading: asyncio.Task[None] | None = None
        self.error: LlamasupError | None = None  # why it cannot be loaded for now
        self.retry_at_s = 0.0  # after an error
        self.resident_since_s = 0.0
        self.answered = 0  # requests, as it was last idle
        self.use = UNUSED  # lately; it outlasts what is loaded
        self.load_waiters: list[asyncio.Future[None]] = []  # of those who asked for it to be loaded
        self.load_waiters_since_s = 0.0
        self.pending_demand: PendingDemand | None = None

    @property
    def phase(self) -> Phase:
        if self.leaving or self.removed:
            return Phase.UNLOADING
        if self.swapping:
            return Phase.LOADING  # whatever serves meanwhile: it is not to be taken away in the middle
        if self.cordoned:
            return Phase.CORDONED
        states = {runner.instance.state for runner in self.runners}
        if State.READY in states:
            return Phase.RESIDENT
        if self.starting or states & LIVE or State.BACKOFF in states:
            return Phase.LOADING
        return Phase.FAILED if self.error is not None or State.FAILED in states else Phase.ABSENT

    @property
    def key(self) -> str:
        """Its id among all that hold memory. One that is served no more has none of its own: another may have
        come under its name, and no name has a space.
        """
        return f"{self.spec.id} removed {id(self)}" if self.removed else self.spec.id

    @property
    def wanted(self) -> bool:
        return bool(self.load_waiters) or len(self.served.queue) > 0 or self.pending_demand is not None

    @property
    def is_outdated(self) -> bool:
        """Whether it was changed since its processes were made."""
        return self.sized is not None and not self.sized.is_of(self.spec)

    @property
    def found(self) -> ModelSpec:
        """What is said of it, of the file that it was found to be."""
        if self.sized is None or self.sized.spec.started_as != self.spec.started_as:
            return self.spec
        return replace(self.sized.found, id=self.spec.id, aliases=self.spec.aliases)

    @property
    def facts(self) -> ModelFacts | None:
        """Of its file, once that was seen: one that had to be downloaded was not in any folder."""
        return self.spec.listed or (None if self.sized is None else self.sized.launch.model)

    @property
    def serves(self) -> bool:
        """Whether a server of it is there, for as long as it may stay."""
        return self.phase is Phase.RESIDENT

    @property
    def holds_memory(self) -> bool:
        """Whether memory is its own."""
        return self.phase not in {Phase.ABSENT, Phase.FAILED}

    @property
    def all_runners(self) -> tuple[InstanceRunner, ...]:
        return (*self.runners, *self.old_replicas)

    @property
    def needs(self) -> Mapping[str, int]:
        """What it holds, or would, by place. While it is changed both generations hold theirs."""
        needs = {} if self.sized is None else self.sized.needs
        before = self.old_needs
        return {place: needs.get(place, 0) + before.get(place, 0) for place in {*needs, *before}}

    @property
    def load_s(self) -> float:
        measured = [runner.load_s for runner in self.runners if runner.load_s is not None]
        if measured:
            return max(measured)
        return _MIN_LOAD_S + sum(self.needs.values()) / _BYTES_PER_S

    def snapshot(self) -> ModelSnapshot:
        """As the policy sees it."""
        served, stay = self.served, self.spec.stay
        waiting = len(served.queue) + len(self.load_waiters) + (self.pending_demand is not None)
        since_s = min(
            served.queue.oldest_s,
            self.load_waiters_since_s if self.load_waiters else float("inf"),
            float("inf") if self.pending_demand is None else self.pending_demand.since_s,
        )
        return ModelSnapshot(
            self.key,
            self.needs,
            phase=self.phase,
            pinned=stay.pin,
            groups=stay.groups,
            ttl_s=stay.ttl_s,
            load_s=self.load_s,
            in_flight=served.in_flight,
            waiting=waiting,
            waiting_since_s=since_s,
            used_s=max(self.resident_since_s, served.idle_since_s),
            resident_since_s=self.resident_since_s,
            use=self.use,
            old_replicas=self.old_needs,
        )

    def stop_sizing(self) -> None:
        """Nobody has any use for it, or it is another one by now. With it ends what it downloads."""
        if self.sizing is not None:
            self.sizing.cancel()

    def downloading(self, progress: Progress | None) -> None:
        """Tell those who wait how far it is; None: it is over. Where it has failed that is told on."""
        if self.error is None:
            self.served.unavailable_reason = (
                absent(self.spec) if progress is None else _downloading(self.spec, progress)
            )

    def count_use(self) -> None:
        """Add what was answered since it was last idle. A new generation counts from 0 again."""
        answered = self.served.answered
        requests = max(1, answered - self.answered)
        self.use, self.answered = self.use.after(self.served.idle_since_s, requests), answered

    def resolve_load_waiters(self, error: LlamasupError | None = None) -> None:
        """Tell those who asked for it to be loaded how that came out."""
        load_waiters, self.load_waiters = self.load_waiters, []
        for claim in load_waiters:
            if not claim.done():
                if error is None:
                    claim.set_result(None)
                else:
                    claim.set_exception(error)


def as_unavailable(error: LlamasupError, spec: ModelSpec, why: Unavailable | None = None) -> Unavailable:
    """What requests for a model hear that cannot be loaded; ``why``: as its server said it, if it had one."""
    why = why or Unavailable(503, error.message, cause=error.cause, remedy=error.remedy)
    return replace(why, message=spec.told(why.message), remedy=spec.redacted(why.remedy))


def absent(spec: ModelSpec) -> Unavailable:
    """What is told of a model that is not loaded and will be: those who may wait do not hear it."""
    return Unavailable(
        503,
        f"The model {spec.id!r} is not loaded",
        cause="loading",
        remedy="try again: it is loaded for the first request that may wait",
        retry_after_s=1.0,
        may_wait=True,
    )


def _downloading(spec: ModelSpec, progress: Progress) -> Unavailable:
    done, total = progress.done_bytes, progress.total_bytes
    of = "" if total is None else f" of {memory_text(total)}"
    left_s = 1.0
    if total is not None and progress.bytes_per_s:
        left_s = max(left_s, (total - done) / progress.bytes_per_s)
    return Unavailable(
        503,
        f"The model {spec.id!r} is being downloaded: {memory_text(done)}{of}",
        cause="downloading",
        retry_after_s=retry_after_s(left_s),
        may_wait=True,
    )


def being_unloaded(spec: ModelSpec, for_id: str) -> Unavailable:
    """What is told of a model that is on its way out."""
    makes_room = f" to make room for {for_id!r}" if for_id else ""
    return Unavailable(
        503,
        f"The model {spec.id!r} is being unloaded{makes_room}",
        cause="unloading",
        retry_after_s=1.0,
        may_wait=True,
    )


def prepare_listed(spec: ModelSpec, *, runtime: str | None, environ: Mapping[str, str]) -> Launch:
    """As ``prepare``, for a model of a registry: with the projector that is its own among those found, which
    lie where files may lie (X10). What was only just downloaded is in no registry yet.
    """
    pair = projector_beside if spec.listed is None else lambda *_: spec.pairing
    return prepare(spec.source, spec.settings, runtime=runtime, environ=environ, pair=pair)
