"""One model of a pool: its state (``model_states.py``), its queue, its processes and its use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.plan_limits import Reduction
from llamasup.core.models.spec import KeepResult, ModelSpec
from llamasup.core.pool.answers import pause_of, reason_of
from llamasup.core.pool.cheapest_set import UNUSED
from llamasup.core.pool.driver import ProcessDriver
from llamasup.core.pool.estimate import SizedModel
from llamasup.core.pool.eviction_policy import Grounds, ModelSnapshot, Phase
from llamasup.core.pool.model_states import (
    Model,
    ModelState,
    Sizing,
    is_outdated,
    is_proof_under_way,
    needs_of,
    old_needs_of,
    phase_of,
)
from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.pool.why.recording import LoadedBy
from llamasup.core.settings.model import NO_REPAIRS, repairs_of
from llamasup.core.supervision.backoff import HALF_OPEN_S
from llamasup.core.supervision.not_serving import lacks_memory
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Policy
from llamasup.errors import LlamasupError

_log = logging.getLogger(__name__)

_OWN_LIMITS = ("wait_timeout_s", "max_concurrent", "max_queued", "continue_streams", "drain_timeout_s")

# Until a load was measured: weights come from a disk at about 1 GB/s, and a server needs a moment for itself.
_BYTES_PER_S = 1e9
_MIN_LOAD_S = 0.5


def policy_for(spec: ModelSpec, base: Policy, started: ModelSpec | None = None) -> Policy:
    """The policy ``base`` with the options of this model. ``started``: the spec of its running processes, if
    that differs.

    After a crash loop the pool decides about another try, since that takes memory. One of several replicas
    keeps its memory and tries by itself, and so does a model that shares no memory.
    """
    options, started = spec.options, started or spec
    own = {name: getattr(options, name) for name in _OWN_LIMITS} | {"warm_up": started.options.warm_up}
    if options.repair is not None:
        own["repairs"] = repairs_of(options.repair)
    if spec.engine is not None:  # the rest needs what only llama-server has
        own |= {"warm_up": spec.engine.warms_up, "continue_streams": False, "repairs": NO_REPAIRS}
    changed = {name: value for name, value in own.items() if value is not None}
    if spec.stay.by_command:
        return replace(base, **changed)
    half_open_s = (base.restart.half_open_s or HALF_OPEN_S) if started.replicas > 1 else None
    return replace(base, restart=replace(base.restart, half_open_s=half_open_s), **changed)


# A model that failed is loaded again for the first request after this time. Memory that another program uses
# may soon be free; a broken file is replaced by a user, who can run `llamasup load` then.
RETRY_AFTER_MEMORY_S = 10.0
RETRY_AFTER_FAILURE_S = 300.0
DEMAND_TTL_S = 60.0
"""The pool expects a refused client to retry for this time after its Retry-After."""


class PendingDemand(Struct, frozen=True):
    """Requests that got a 503 with Retry-After while the model is not loaded: the time of the first, and how
    long the pool expects another (monotonic).
    """

    since_s: float
    until_s: float


class ManagedModel:
    """Only the pool changes it. Times are monotonic."""

    def __init__(self, spec: ModelSpec, served: ReplicaSet, driver: ProcessDriver) -> None:
        self.model = Model(spec)
        self.served = served
        self.driver = driver
        self.pause: HttpError | None = None  # as ``served`` has it
        # As ``served`` has it, with the time of a retry.
        self.reason: tuple[HttpError | None, float | None] | None = None
        self.rollout: asyncio.Future[LlamasupError | None] | None = None  # the last one, with its error
        self.unloaded = False  # by a command, and not requested since: a reload does not preload it
        self.retry_at_s = 0.0  # after an error
        self.resident_since_s = 0.0
        self.answered = 0  # requests until it was last idle
        self.use = UNUSED  # kept while it is not loaded
        self.load_waiters: list[asyncio.Future[None]] = []  # of ``load`` commands
        self.load_waiters_since_s = 0.0
        self.loaded_by: LoadedBy = "command"  # what the last ``load`` was for
        self.waits: Grounds | None = None  # why it is not loaded, while the policy makes it wait
        self.unload_waiters: list[asyncio.Future[None]] = []
        self.pending_demand: PendingDemand | None = None
        self.kept_s: float | None = None  # its ttl until the next load, from its last request

    def __repr__(self) -> str:
        return f"<ManagedModel {self.model!r}, {self.all_runners!r}>"

    # --- its state

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def state(self) -> ModelState:
        return self.model.state

    @property
    def phase(self) -> Phase:
        return phase_of(self.model)

    @property
    def error(self) -> LlamasupError | None:
        """The reason why it cannot be loaded for now."""
        return self.model.error

    @property
    def sized(self) -> SizedModel | None:
        sized = self.model.sized
        assert sized is None or isinstance(sized, SizedModel)
        return sized

    @property
    def sizing(self) -> Sizing | None:
        return self.model.sizing

    @property
    def rolling_out(self) -> bool:
        return self.model.rollout is not None

    @property
    def removed(self) -> bool:
        return self.model.removal is not None and not self.model.removal.stops

    @property
    def key(self) -> str:
        """Its id among the models that hold memory. A new model may have the name of a removed one, and no
        name contains a space.
        """
        return f"{self.spec.id} removed {id(self)}" if self.removed else self.spec.id

    @property
    def queued(self) -> int:
        """The requests that wait, and have it loaded."""
        return 0 if self.spec.stay.by_command else len(self.served.queue)

    @property
    def wanted(self) -> bool:
        return bool(self.load_waiters) or self.queued > 0 or self.pending_demand is not None

    def is_used(self, own: int = 0) -> bool:
        """Whether more requests than ``own``, or a ``load`` command, use it or wait for it."""
        served = self.served
        return served.in_flight > own or len(served.queue) > 0 or bool(self.load_waiters)

    def policy(self, base: Policy, sized: SizedModel | None) -> Policy:
        """The policy ``base`` with the options of this model. ``sized``: of its processes."""
        return policy_for(self.spec, base, None if sized is None else sized.spec)

    def as_built(self, spec: ModelSpec) -> ModelSpec:
        """``spec`` with the build of the model, which no config decides."""
        return replace(spec, runtime=self.spec.runtime, unproven=self.spec.unproven)

    @property
    def is_outdated(self) -> bool:
        """Whether its spec changed after its processes were started."""
        return is_outdated(self.model)

    @property
    def found(self) -> ModelSpec:
        """Its spec, with the identity of a downloaded file."""
        if self.sized is None or self.sized.spec.started_as != self.spec.started_as:
            return self.spec
        return replace(self.sized.found, id=self.spec.id, aliases=self.spec.aliases)

    @property
    def facts(self) -> ModelFacts | None:
        """Facts about its file; None until it was read."""
        return self.spec.listed or (None if self.sized is None else self.sized.facts)

    @property
    def ttl_s(self) -> float:
        """The time that it stays loaded without requests."""
        return self.spec.stay.ttl_s if self.kept_s is None else self.kept_s

    @property
    def serves(self) -> bool:
        return self.phase is Phase.RESIDENT

    @property
    def holds_memory(self) -> bool:
        return self.phase not in {Phase.ABSENT, Phase.FAILED}

    @property
    def needs(self) -> Mapping[str, int]:
        """Bytes by device that it holds, or would hold. A rollout holds those of both specs."""
        return needs_of(self.model)

    # --- its processes

    @property
    def runners(self) -> list[InstanceRunner]:
        """One for each replica, made at the first load. During the proof of a build, those that serve."""
        model = self.model
        shown = model.old if is_proof_under_way(model) and model.old is not None else model.current
        return [] if shown is None else self.driver.runners_of(shown.id)

    @property
    def old_replicas(self) -> list[InstanceRunner]:
        """The processes of the old spec, which finish their requests."""
        return [] if self.model.old is None else self.driver.runners_of(self.model.old.id)

    @property
    def all_runners(self) -> tuple[InstanceRunner, ...]:
        return self.driver.all_runners

    def reductions(self, generation: int) -> Sequence[Reduction]:
        """Everything that is smaller in the plan of a generation that serves."""
        plans = (each.plan for each in self.runners if each.instance.generation == generation)
        return next((plan.reduced for plan in plans if plan is not None and plan.reduced), ())

    @property
    def load_s(self) -> float:
        measured = [runner.load_s for runner in self.runners if runner.load_s is not None]
        if measured:
            return max(measured)
        return _MIN_LOAD_S + sum(self.needs.values()) / _BYTES_PER_S

    def snapshot(self) -> ModelSnapshot:
        served, stay = self.served, self.spec.stay
        waiting = self.queued + len(self.load_waiters) + (self.pending_demand is not None)
        since_s = min(
            served.queue.oldest_s,
            self.load_waiters_since_s if self.load_waiters else float("inf"),
            float("inf") if self.pending_demand is None else self.pending_demand.since_s,
        )
        return ModelSnapshot(
            self.key,
            self.needs,
            # A proof is not evicted: the pool ends it if the memory is needed.
            phase=Phase.LOADING if is_proof_under_way(self.model) else self.phase,
            pinned=stay.pin,
            groups=stay.groups,
            ttl_s=self.ttl_s,
            load_s=self.load_s,
            in_flight=served.in_flight,
            waiting=waiting,
            waiting_since_s=since_s,
            used_s=max(self.resident_since_s, served.idle_since_s),
            resident_since_s=self.resident_since_s,
            use=self.use,
            old_replicas=old_needs_of(self.model),
        )

    # --- its use

    def keep(self, ttl_s: float | None, own: int) -> KeepResult:
        """See ``Pool.keep``."""
        if self.spec.stay.pin or self.spec.stay.by_command:
            return "fixed"
        if ttl_s == 0 and self.is_used(own):
            return "in_use"
        self.kept_s = ttl_s
        return "kept"

    def record_demand(self, why: HttpError | None, now_s: float) -> None:
        """Note that a request got the answer ``why``, and that its client may retry."""
        since_s = now_s if self.pending_demand is None else self.pending_demand.since_s
        again_s = now_s if why is None else now_s + (why.retry_after_s or 0.0)
        self.pending_demand = PendingDemand(since_s, again_s + DEMAND_TTL_S)

    def note_wait(self, grounds: Grounds | None) -> Grounds | None:
        """Note why the model is not loaded, and return it if the model lacks something else than before. The
        amounts that are free change with each request.
        """
        before, self.waits = self.waits, grounds if self.state is ModelState.ABSENT else None
        if self.waits is None or (before is not None and before.missing == self.waits.missing):
            return None
        return self.waits

    def note_failure(self, error: LlamasupError, now_s: float) -> None:
        self.pending_demand = None
        self.retry_at_s = now_s + (RETRY_AFTER_MEMORY_S if lacks_memory(error) else RETRY_AFTER_FAILURE_S)

    def count_use(self) -> int:
        """Add the requests since it was last idle, and return their number. A new generation counts from 0
        again.
        """
        answered = self.served.answered
        requests = max(1, answered - self.answered)
        self.use, self.answered = self.use.after(self.served.idle_since_s, requests), answered
        return requests

    # --- those who wait for it

    def tell_queue(self) -> None:
        """Tell the queue the current answer to requests, if it has changed."""
        reason = reason_of(self.model), self.retry_at_s if self.error is not None else None
        if reason != self.reason:
            self.reason = reason
            self.served.explain(*reason)
        pause = pause_of(self.model, awaited=bool(self.load_waiters))
        if pause != self.pause:
            self.pause = pause
            if pause is None:
                self.served.resume()
            else:
                self.served.pause(pause)

    def add_load_waiter(self, waiter: asyncio.Future[None], by: LoadedBy, now_s: float) -> None:
        if not self.load_waiters:
            self.load_waiters_since_s = now_s
        self.load_waiters.append(waiter)
        self.loaded_by = by

    def end_rollout(self, error: LlamasupError | None) -> None:
        if error is not None:
            _log.error("rollout of model %r failed, its old processes keep running: %s", self.spec.id, error)
        if self.rollout is not None and not self.rollout.done():
            self.rollout.set_result(error)

    def end_reload(
        self, rollout: asyncio.Future[LlamasupError | None] | None, load: asyncio.Future[None], *, stops: bool
    ) -> None:
        """The load that ends ``rollout`` has ended."""
        error = None if load.cancelled() else load.exception()
        failure = error if isinstance(error, LlamasupError) and not stops else None
        if failure is not None:
            _log.warning("model %r was updated but could not be loaded again: %s", self.spec.id, failure)
        if rollout is not None and not rollout.done():
            rollout.set_result(failure)

    def resolve_unload_waiters(self) -> None:
        """End the pending ``unload`` commands."""
        unload_waiters, self.unload_waiters = self.unload_waiters, []
        _resolve(unload_waiters, None)

    def resolve_load_waiters(self, error: LlamasupError | None = None) -> None:
        """End the pending ``load`` commands."""
        load_waiters, self.load_waiters = self.load_waiters, []
        _resolve(load_waiters, error)


def _resolve(waiters: Iterable[asyncio.Future[None]], error: LlamasupError | None) -> None:
    for waiter in waiters:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
