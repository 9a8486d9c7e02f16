"""One model of a pool: its spec, its processes, and its phase."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, structs
from msgspec.structs import replace

from llamasup.downloads.manager import Progress
from llamasup.errors import LlamasupError
from llamasup.gguf.facts import ModelFacts
from llamasup.models.folder import look_at
from llamasup.models.spec import ModelSpec
from llamasup.planning.attempts import Planner
from llamasup.planning.facts import Launch, prepare, sibling_projector
from llamasup.planning.memory.shares import MemoryBudget, needs_of
from llamasup.pool.cheapest_set import UNUSED
from llamasup.pool.eviction_policy import ModelSnapshot, Phase
from llamasup.pool.replicas.replica_set import ReplicaSet
from llamasup.queueing.unavailable import Unavailable
from llamasup.queueing.wait_estimate import retry_after_s
from llamasup.supervision.backoff import HALF_OPEN_S
from llamasup.supervision.runner import InstanceRunner
from llamasup.supervision.states import LIVE, Policy, State
from llamasup.system.text import memory_text

__all__ = [
    "ManagedModel",
    "PendingDemand",
    "SizedModel",
    "as_unavailable",
    "being_unloaded",
    "estimate_model",
    "not_loaded",
    "policy_for",
    "prepare_listed",
    "share_of",
    "with_devices",
]

_OWN_LIMITS = ("wait_timeout_s", "max_concurrent", "max_queued", "drain_timeout_s")

_NOWHERE = Path("/nonexistent")
# Until a load was measured: weights come from a disk at about 1 GB/s, and a server needs a moment for itself.
_BYTES_PER_S = 1e9
_MIN_LOAD_S = 0.5


class SizedModel(Struct, frozen=True):
    """The facts about ``spec`` before its first start. ``needs``: bytes by device, of all its replicas.
    ``found``: ``spec`` with the identity of its downloaded file.
    """

    spec: ModelSpec
    launch: Launch
    needs: Mapping[str, int]
    found: ModelSpec

    def is_of(self, spec: ModelSpec) -> bool:
        """Whether processes started from this match ``spec``."""
        return spec.started_as in (self.spec.started_as, self.found.started_as)


def estimate_model(
    spec: ModelSpec, budget: Mapping[str, int], runtime: str | None, environ: Mapping[str, str]
) -> SizedModel:
    """Read the model's header and plan it alone in ``budget``. Blocks for some milliseconds.

    Raises the errors of ``prepare`` and ``Planner.check``, such as DoesNotFit.
    """
    launch = prepare_listed(spec, runtime=runtime, environ=environ)
    devices = launch.runtime.capabilities.devices
    share = share_of(spec, budget, alone=True)
    of_one: dict[tuple[str, ...], Mapping[str, int]] = {}  # the needs of one replica by its devices
    needs: Counter[str] = Counter()
    for number in range(spec.replicas):
        own = devices_of(spec, number)
        if own not in of_one:
            planner = Planner(with_devices(launch, spec, number), _NOWHERE, budget=lambda: share)
            admission = planner.admission()
            if (refused := planner.refused(admission)) is not None:
                raise refused
            of_one[own] = needs_of(admission.plan.memory, devices)
        needs.update(of_one[own])
    return SizedModel(spec, launch, dict(needs), _as_found(spec, launch))


def _as_found(spec: ModelSpec, launch: Launch) -> ModelSpec:
    """The spec as a registry would make it now that its file is downloaded."""
    if spec.identity:
        return spec
    projector = None if launch.found is None else launch.found.projector
    paired = () if projector is None else (projector.path,)
    paths = (str(launch.model_path), *paired, *spec.options.files)
    states = (state for path in paths for state in look_at(Path(path)).files)
    return replace(spec, identity=tuple(dict.fromkeys(states)))


def share_of(spec: ModelSpec, budget: Mapping[str, int], *, alone: bool = False) -> MemoryBudget:
    """The part of ``budget`` (for all replicas) that one process may use."""
    return MemoryBudget(budget, alone=alone, replicas=spec.replicas, devices=spec.options.devices or ())


def with_devices(launch: Launch, spec: ModelSpec, number: int) -> Launch:
    """The launch of one replica."""
    if spec.replicas == 1 or not spec.options.devices:
        return launch
    extra = (*launch.settings.extra, "--device", ",".join(devices_of(spec, number)))
    return replace(launch, settings=structs.replace(launch.settings, extra=extra))


def devices_of(spec: ModelSpec, number: int) -> tuple[str, ...]:
    """The devices of one replica: each of several replicas uses one device."""
    devices = spec.options.devices or ()
    return devices if spec.replicas == 1 or not devices else (devices[number % len(devices)],)


def policy_for(spec: ModelSpec, base: Policy, started: ModelSpec | None = None) -> Policy:
    """``base`` with the options of this model. ``started``: the spec of its running processes, if that
    differs.

    After a crash loop the pool decides about another try, since that takes memory. One of several replicas
    keeps its memory and tries by itself.
    """
    options, started = spec.options, started or spec
    half_open_s = (base.restart.half_open_s or HALF_OPEN_S) if started.replicas > 1 else None
    own = {name: getattr(options, name) for name in _OWN_LIMITS} | {"warm_up": started.options.warm_up}
    changed = {name: value for name, value in own.items() if value is not None}
    return replace(base, restart=replace(base.restart, half_open_s=half_open_s), **changed)


class PendingDemand(Struct, frozen=True):
    """Requests that got a 503 with Retry-After while the model is not loaded: the time of the first, and how
    long the pool expects another (monotonic).
    """

    since_s: float
    until_s: float


class ManagedModel:
    """Only the pool changes it. Times are monotonic."""

    __slots__ = (
        "answered",
        "cordoned",
        "error",
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
        self.sizing: asyncio.Task[SizedModel | LlamasupError] | None = None  # with its download
        self.runners: list[InstanceRunner] = []  # one for each replica, made at the first load
        self.rolling_out = False  # the new spec is sized, waits for its turn, or is swapped in
        self.swapping = False  # the new spec replaces the old one
        self.rollout: asyncio.Task[LlamasupError | None] | None = None  # the last one, with its error
        self.reload_after = False  # the old processes stopped for the rollout; load the new ones
        self.removed = False  # no longer served; its processes are stopping
        self.unloaded = False  # by a command, and not requested since: a reload does not preload it
        self.old_replicas: list[InstanceRunner] = []  # of the old spec; they finish their requests
        self.old_needs: Mapping[str, int] = {}
        self.starting = False  # a start was requested, and no state change has come yet
        self.cordoned = False
        self.unloading: asyncio.Task[None] | None = None
        self.error: LlamasupError | None = None  # why it cannot be loaded for now
        self.retry_at_s = 0.0  # after an error
        self.resident_since_s = 0.0
        self.answered = 0  # requests until it was last idle
        self.use = UNUSED  # kept while it is not loaded
        self.load_waiters: list[asyncio.Future[None]] = []  # of ``load`` commands
        self.load_waiters_since_s = 0.0
        self.pending_demand: PendingDemand | None = None

    def __repr__(self) -> str:
        return f"<ManagedModel {self.spec.id!r}: {self.phase.value}, {self.runners!r}>"

    @property
    def phase(self) -> Phase:
        if self.unloading is not None or self.removed:
            return Phase.UNLOADING
        if self.swapping:
            return Phase.LOADING  # also while the old processes serve: it must not be evicted during a swap
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
        """Its id among the models that hold memory. A new model may have the name of a removed one, and no
        name contains a space.
        """
        return f"{self.spec.id} removed {id(self)}" if self.removed else self.spec.id

    @property
    def wanted(self) -> bool:
        return bool(self.load_waiters) or len(self.served.queue) > 0 or self.pending_demand is not None

    @property
    def is_outdated(self) -> bool:
        """Whether its spec changed after its processes were started."""
        return self.sized is not None and not self.sized.is_of(self.spec)

    @property
    def found(self) -> ModelSpec:
        """Its spec, with the identity of a downloaded file."""
        if self.sized is None or self.sized.spec.started_as != self.spec.started_as:
            return self.spec
        return replace(self.sized.found, id=self.spec.id, aliases=self.spec.aliases)

    @property
    def facts(self) -> ModelFacts | None:
        """Facts about its file; None until it was read."""
        return self.spec.listed or (None if self.sized is None else self.sized.launch.model)

    @property
    def serves(self) -> bool:
        return self.phase is Phase.RESIDENT

    @property
    def holds_memory(self) -> bool:
        return self.phase not in {Phase.ABSENT, Phase.FAILED}

    @property
    def all_runners(self) -> tuple[InstanceRunner, ...]:
        return (*self.runners, *self.old_replicas)

    @property
    def needs(self) -> Mapping[str, int]:
        """Bytes by device that it holds, or would hold. A rollout holds those of both specs."""
        needs = {} if self.sized is None else self.sized.needs
        old = self.old_needs
        return {device: needs.get(device, 0) + old.get(device, 0) for device in {*needs, *old}}

    @property
    def load_s(self) -> float:
        measured = [runner.load_s for runner in self.runners if runner.load_s is not None]
        if measured:
            return max(measured)
        return _MIN_LOAD_S + sum(self.needs.values()) / _BYTES_PER_S

    def snapshot(self) -> ModelSnapshot:
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
        """Cancel the sizing and its download: the result is not needed any more."""
        if self.sizing is not None:
            self.sizing.cancel()

    def downloading(self, progress: Progress | None) -> None:
        """Show the progress to waiting requests; None: the download has ended. An error is not replaced."""
        if self.error is None:
            self.served.unavailable_reason = (
                not_loaded(self.spec) if progress is None else _downloading(self.spec, progress)
            )

    def count_use(self) -> None:
        """Add the requests since it was last idle. A new generation counts from 0 again."""
        answered = self.served.answered
        requests = max(1, answered - self.answered)
        self.use, self.answered = self.use.after(self.served.idle_since_s, requests), answered

    def resolve_load_waiters(self, error: LlamasupError | None = None) -> None:
        """End the pending ``load`` commands."""
        load_waiters, self.load_waiters = self.load_waiters, []
        for waiter in load_waiters:
            if not waiter.done():
                if error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)


def as_unavailable(error: LlamasupError, spec: ModelSpec, why: Unavailable | None = None) -> Unavailable:
    """The response for a model that cannot be loaded; ``why``: the error of its server, if any."""
    why = why or Unavailable(503, error.message, cause=error.cause, remedy=error.remedy)
    return replace(why, message=spec.public_problem(why.message), remedy=spec.redacted(why.remedy))


def not_loaded(spec: ModelSpec) -> Unavailable:
    """The response to a request that may not wait for the load."""
    return Unavailable(
        503,
        f"The model {spec.id!r} is not loaded",
        cause="loading",
        remedy="try again: the first request that may wait loads it",
        retry_after_s=1.0,
        queueable=True,
    )


def _downloading(spec: ModelSpec, progress: Progress) -> Unavailable:
    done, total = progress.done_bytes, progress.total_bytes
    of = "" if total is None else f" of {memory_text(total)}"
    remaining_s = 1.0
    if total is not None and progress.bytes_per_s:
        remaining_s = max(remaining_s, (total - done) / progress.bytes_per_s)
    return Unavailable(
        503,
        f"The model {spec.id!r} is being downloaded: {memory_text(done)}{of}",
        cause="downloading",
        retry_after_s=retry_after_s(remaining_s),
        queueable=True,
    )


def being_unloaded(spec: ModelSpec, for_id: str) -> Unavailable:
    purpose = f" to make room for {for_id!r}" if for_id else ""
    return Unavailable(
        503,
        f"The model {spec.id!r} is being unloaded{purpose}",
        cause="unloading",
        retry_after_s=1.0,
        queueable=True,
    )


def prepare_listed(spec: ModelSpec, *, runtime: str | None, environ: Mapping[str, str]) -> Launch:
    """``prepare`` with the projector that the registry chose, which lies in an allowed folder (X10). A model
    that was just downloaded has no registry entry yet.
    """
    pair = sibling_projector if spec.listed is None else lambda *_: spec.pairing
    return prepare(spec.source, spec.settings, runtime=runtime, environ=environ, pair=pair)
