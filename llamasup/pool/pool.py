"""Loads and unloads many models in the available memory, as ``eviction_policy.decide`` orders.

The pool owns all models, their processes and the only timer. After each event it passes a snapshot to the
policy and carries out the actions (``reconcile``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from time import monotonic
from typing import Any, TypeVar, assert_never

from msgspec.structs import replace

from llamasup.errors import Conflict, DoesNotFit, LlamasupError, ModelUnknown, Stopping
from llamasup.models.spec import ModelSpec
from llamasup.planning.memory.shares import remaining
from llamasup.pool.eviction_policy import (
    Action,
    Cordon,
    Evict,
    Load,
    Phase,
    Reject,
    Snapshot,
    Uncordon,
    WakeAt,
    decide,
)
from llamasup.pool.model import (
    ManagedModel,
    PendingDemand,
    SizedModel,
    as_unavailable,
    being_unloaded,
    not_loaded,
    policy_for,
    share_of,
)
from llamasup.pool.options import PoolOptions
from llamasup.pool.processes import Runners
from llamasup.pool.replicas.replica_set import ReplicaSet
from llamasup.pool.sizing import Fetch, ModelSizer
from llamasup.pool.unload import is_settled, memory_released, stop_all
from llamasup.queueing.unavailable import Unavailable
from llamasup.supervision.availability import STOPPING
from llamasup.supervision.events import Bus, LoadFailed, ModelUnloading, PublishedEvent, StateChanged
from llamasup.supervision.failure import failure_of, lacks_memory
from llamasup.supervision.runner import InstanceRunner
from llamasup.supervision.states import KillRequested, Policy, StartRequested, State, StopRequested
from llamasup.system.timers import DeadlineTimer

__all__ = ["DEMAND_TTL_S", "Pool", "reconcile"]


T = TypeVar("T")

# A model that failed is loaded again for the first request after this time. Memory that another program uses
# may soon be free; a broken file is replaced by a user, who can run `llamasup load` then.
RETRY_AFTER_MEMORY_S = 10.0
RETRY_AFTER_FAILURE_S = 300.0
DEMAND_TTL_S = 60.0
"""How long after its Retry-After time the pool expects a refused client to come again."""


class Pool:
    """The models of one llamasup. Call all methods in the thread of the event loop."""

    def __init__(self, options: PoolOptions, runners: Runners, bus: Bus, fetch: Fetch | None = None) -> None:
        """``fetch`` downloads a model; None: downloads are off."""
        self._sizer = ModelSizer(fetch, bus, lambda: self.options)
        self.options = options
        self.bus = bus
        self.runners = runners
        self.stopping = False
        self.running = asyncio.Event()
        self.swapping = asyncio.Lock()
        """Rollouts swap one model at a time: then two generations fit in the memory more often."""
        self.managed_models: dict[str, ManagedModel] = {}
        self.on_sized: Callable[[ManagedModel], None] | None = None
        """Called after each successful sizing."""
        # The models that the policy sees: requested, with processes, or removed and still stopping.
        self.active: dict[ManagedModel, None] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._loop = asyncio.get_running_loop()
        self._reconcile_scheduled = False
        self.timer = DeadlineTimer(self.reconcile_soon)
        bus.listen(self._on_event)

    def __repr__(self) -> str:
        return f"<Pool of {list(self.managed_models.values())!r}>"

    # --- life -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. No child survives."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self.running.set()
                self.reconcile_soon()
                await self._loop.create_future()
        finally:
            self.stopping = True
            self.timer.stop()
            for managed in self._all():
                managed.served.pause(STOPPING)

    def ask_stop(self, *, now: bool = False) -> None:
        """Stop all servers after their requests, or ``now``. No model is started any more."""
        self.stopping = True
        self.timer.stop()
        for managed in self._all():
            managed.served.pause(STOPPING)
            managed.resolve_load_waiters(_stopping())
            managed.stop_sizing()
            for runner in managed.all_runners:
                runner.post(KillRequested() if now else StopRequested())

    async def ended(self) -> None:
        """Wait until all servers have stopped and none will restart."""
        for managed in self._all():
            for runner in managed.all_runners:
                await runner.until(is_settled)

    def _all(self) -> Iterable[ManagedModel]:
        return dict.fromkeys((*self.managed_models.values(), *self.active))

    def apply_options(self, options: PoolOptions) -> None:
        """Use these options from now on. Models over a smaller budget are evicted when they are idle."""
        before, self.options = self.options, options
        if options.budget != before.budget:
            for managed in self.managed_models.values():
                self.clear_failure(managed)
                if managed.phase is Phase.ABSENT:
                    managed.sized = None  # another plan may fit the new budget
        if options.policy != before.policy:
            for managed in self._all():
                managed.served.apply_policy(self._policy_for(managed, managed.sized))
        self.reconcile_soon()

    # --- models -----------------------------------------------------------------------------------------

    def add(self, spec: ModelSpec) -> ManagedModel:
        """Add a model that can be loaded."""
        served = ReplicaSet(
            policy=policy_for(spec, self.options.policy),
            on_wanted=lambda: self._on_wanted(managed),
            on_unserved=lambda why: self._on_unserved(managed, why),
            on_idle=lambda: self._on_idle(managed),
        )
        managed = ManagedModel(spec, served)
        served.unavailable_reason = not_loaded(spec)
        self.managed_models[spec.id] = managed
        return managed

    def forget(self, managed: ManagedModel) -> None:
        """Drop a removed model whose processes have ended."""
        self.runners.drop(managed, managed.all_runners)
        managed.runners = []
        self.active.pop(managed, None)
        if self.managed_models.get(managed.spec.id) is managed:
            del self.managed_models[managed.spec.id]
        self.reconcile_soon()

    def rename(self, managed: ManagedModel, id_: str) -> None:
        """Give the model an unused id. It keeps its processes and its queue."""
        del self.managed_models[managed.spec.id]
        managed.spec = replace(managed.spec, id=id_)
        self.managed_models[id_] = managed
        self.runners.rename(managed.all_runners, id_)
        if managed.error is None:
            managed.served.unavailable_reason = not_loaded(managed.spec)

    def update_spec(self, managed: ManagedModel, spec: ModelSpec) -> None:
        """Change the spec of a model without a change to its processes."""
        managed.spec = spec
        managed.served.apply_policy(self._policy_for(managed, managed.sized))
        self.reconcile_soon()

    async def load(self, managed: ManagedModel) -> None:
        """Wait until the model serves. Raises the error of the load."""
        if self.stopping:
            raise _stopping()
        if managed.removed:
            raise ModelUnknown(
                f"Model {managed.spec.id!r} is no longer served.",
                remedy="List the models with `llamasup ps --all`.",
            )
        if managed.phase is Phase.RESIDENT:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self.add_load_waiter(managed, waiter)
        try:
            await waiter
        finally:
            if waiter in managed.load_waiters:  # the caller gave up
                managed.load_waiters.remove(waiter)
                self.reconcile_soon()

    def add_load_waiter(self, managed: ManagedModel, waiter: asyncio.Future[None]) -> None:
        """Load the model, and end ``waiter`` with the outcome."""
        self.clear_failure(managed)
        if not managed.load_waiters:
            managed.load_waiters_since_s = monotonic()
        managed.load_waiters.append(waiter)
        self.want(managed)

    async def unload(self, managed: ManagedModel) -> None:
        """Wait until its memory is free. Requests in flight get the drain time; queued ones load it again."""
        self.clear_failure(managed)
        managed.reload_after, managed.pending_demand = False, None
        managed.unloaded = True
        managed.resolve_load_waiters(
            Conflict(
                f"{managed.spec.id!r} was unloaded while it was loading.",
                remedy=f"Run `llamasup load {managed.spec.id}`.",
            )
        )
        self.reconcile_soon()  # cancels its download
        if managed.phase is not Phase.ABSENT:
            await asyncio.shield(self.begin_unload(managed, "asked"))

    def clear_failure(self, managed: ManagedModel) -> None:
        """Allow another load."""
        if managed.phase is Phase.FAILED:
            self.runners.drop(managed, managed.runners)
            managed.runners = []
            managed.error = None
            managed.stop_sizing()  # its file may be gone, and may have to be downloaded again
            managed.sized = None
            managed.served.unavailable_reason = not_loaded(managed.spec)

    def make_runners(self, managed: ManagedModel, sized: SizedModel) -> list[InstanceRunner]:
        """Stopped runners for ``sized``, with the current limits."""
        assert self._tasks is not None
        return self.runners.make(
            managed,
            sized,
            self._policy_for(managed, sized),
            self._tasks,
            share=lambda: share_of(sized.spec, self.remaining_for(managed)),
            on_measured=lambda: self._on_measured(managed),
        )

    def _policy_for(self, managed: ManagedModel, sized: SizedModel | None) -> Policy:
        return policy_for(managed.spec, self.options.policy, None if sized is None else sized.spec)

    def remaining_for(self, managed: ManagedModel) -> Mapping[str, int]:
        """The budget less the other models and the old replicas of this one. Planner threads call it, too."""
        others = (other.needs for other in tuple(self.active) if other is not managed and other.holds_memory)
        return remaining(self.options.budget, (*others, managed.old_needs))

    async def size(self, managed: ManagedModel, spec: ModelSpec) -> SizedModel:
        """Download the model if it is missing, and estimate its memory."""
        return await self._sizer.size(managed, spec)

    def begin_sizing(self, managed: ManagedModel, what: str) -> asyncio.Task[SizedModel | LlamasupError]:
        """Size the current spec in place of an earlier one."""
        managed.stop_sizing()
        name = f"{managed.spec.id}/{what}"
        task = managed.sizing = self.start(self._sized(managed, managed.spec), name)

        def over(_: object) -> None:
            if managed.sizing is task:
                managed.sizing = None
            self.reconcile_soon()

        task.add_done_callback(over)
        return task

    def size_soon(self, managed: ManagedModel, what: str) -> None:
        """Size the model; it fails if that fails."""
        spec = managed.spec

        def over(task: asyncio.Task[SizedModel | LlamasupError]) -> None:
            outcome = None if task.cancelled() or managed.removed else task.result()
            if isinstance(outcome, SizedModel) and outcome.is_of(managed.spec):
                managed.sized = outcome
                if self.on_sized is not None:
                    self.on_sized(managed)
            elif isinstance(outcome, LlamasupError) and managed.spec is spec and managed.sized is None:
                self.fail(managed, outcome)
                self.bus.publish(LoadFailed(spec.id, outcome))

        self.begin_sizing(managed, what).add_done_callback(over)

    async def _sized(self, managed: ManagedModel, spec: ModelSpec) -> SizedModel | LlamasupError:
        try:
            return await self.size(managed, spec)
        except LlamasupError as error:
            return error

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that ends with the pool."""
        assert self._tasks is not None
        return self._tasks.create_task(work, name=name)

    # --- events -----------------------------------------------------------------------------------------
    def _on_wanted(self, managed: ManagedModel) -> None:
        """A request waits for the model, or was refused because it may not wait: load it in both cases."""
        if not managed.load_waiters and not len(managed.served.queue):
            self._record_demand(managed, managed.served.unavailable_reason)
        self.want(managed)

    def _on_unserved(self, managed: ManagedModel, why: Unavailable | None) -> None:
        """A request left the queue unserved. A client that saw a download may come again."""
        if why is not None and why.cause == "downloading":
            self._record_demand(managed, why)
        self.reconcile_soon()

    def _record_demand(self, managed: ManagedModel, why: Unavailable | None) -> None:
        now_s = monotonic()
        since_s = now_s if managed.pending_demand is None else managed.pending_demand.since_s
        again_s = now_s if why is None else now_s + (why.retry_after_s or 0.0)
        managed.pending_demand = PendingDemand(since_s, again_s + DEMAND_TTL_S)

    def want(self, managed: ManagedModel) -> None:
        """Add the model to those that the policy sees, because of a request or a command."""
        managed.unloaded = False
        if not managed.removed:
            self.active[managed] = None
            self.reconcile_soon()

    def _on_idle(self, managed: ManagedModel) -> None:
        """The last request in flight has ended."""
        managed.count_use()
        if managed.cordoned or any(model.wanted and not model.serves for model in self.active):
            self.reconcile_soon()
        elif managed.spec.stay.ttl_s < float("inf"):
            self.timer.schedule(monotonic() + managed.spec.stay.ttl_s)

    def _on_event(self, event: PublishedEvent) -> None:
        managed = self.managed_models.get(event.model) if isinstance(event, StateChanged) else None
        if managed is None or not isinstance(event, StateChanged):
            return
        # The event has the model's name only: it may come from a removed model of this name.
        states = {runner.instance.state for runner in managed.runners}
        if states - {State.STOPPED}:
            managed.starting = False
        if event.state is State.READY and State.READY in states:
            managed.resident_since_s = monotonic()
        self.reconcile_soon()

    def fail(self, managed: ManagedModel, error: LlamasupError, why: Unavailable | None = None) -> None:
        """The model cannot be loaded for now: reject its waiting requests with ``why`` (the error of its
        server) or ``error``. Other models are not affected (S17).
        """
        managed.error, managed.pending_demand = error, None
        managed.retry_at_s = monotonic() + _retry_after_s(error)
        managed.served.fail(as_unavailable(error, managed.spec, why), managed.retry_at_s)
        for runner in managed.runners:
            if not runner.instance.is_settled:
                runner.post(StopRequested())  # it must not restart in memory that is not its own
        managed.resolve_load_waiters(error)
        self.timer.schedule(managed.retry_at_s)

    def _on_measured(self, managed: ManagedModel) -> None:
        """A load has measured the memory of the model."""
        if not (managed.sizing or managed.swapping or managed.is_outdated or self.stopping):
            self.size_soon(managed, "measure")

    # --- reconciliation ---------------------------------------------------------------------------------
    def reconcile_soon(self) -> None:
        """Reconcile once in the next iteration of the loop, for all events of this one."""
        if not self._reconcile_scheduled:
            self._reconcile_scheduled = True
            self._loop.call_soon(self._reconcile)

    def _reconcile(self) -> None:
        self._reconcile_scheduled = False
        if self._tasks is not None and not self.stopping:
            reconcile(self)

    def begin_unload(self, managed: ManagedModel, reason: str, for_id: str = "") -> asyncio.Task[None]:
        """Stop its servers, which get no more requests. The task ends when their memory is free."""
        if managed.unloading is None:
            self.bus.publish(ModelUnloading(managed.spec.id, reason, for_id))
            if managed.rolling_out:
                managed.stop_sizing()  # the next load sizes the new spec
            managed.cordoned = False
            managed.unloading = self.start(self._unload(managed), f"{managed.spec.id}/unload")
            managed.served.pause(being_unloaded(managed.spec, for_id))
        return managed.unloading

    async def _unload(self, managed: ManagedModel) -> None:
        try:
            async with memory_released(managed.sized):
                await stop_all(managed.all_runners)
        finally:
            managed.starting, managed.unloading = False, None
            if not (self.stopping or managed.removed):
                managed.served.resume()
            self.reconcile_soon()


def _stopping() -> Stopping:
    return Stopping("llamasup is stopping.", remedy="Start it again.")


def _retry_after_s(error: LlamasupError) -> float:
    return RETRY_AFTER_MEMORY_S if lacks_memory(error) else RETRY_AFTER_FAILURE_S


_DOES_NOT_FIT_REMEDY = (
    "Reduce its size (ctx_size, parallel), pin fewer models, or raise a limit (memory, max_loaded, groups)."
)


def reconcile(pool: Pool) -> None:
    """Observe the active models, ask the policy, and carry out its actions."""
    now_s = monotonic()
    for managed in tuple(pool.active):
        if not managed.removed:
            _observe(pool, managed, now_s)
    models = {managed.key: managed.snapshot() for managed in pool.active if managed.sized is not None}
    for action in decide(Snapshot(now_s, models, pool.options.budget, pool.options.residency)):
        _apply(pool, action)


def _observe(pool: Pool, managed: ManagedModel, now_s: float) -> None:
    """Handle what does not depend on other models: expired demand, failures, outdated sizes."""
    _expire_demand(pool, managed, now_s)
    if managed.serves:
        _mark_serving(managed)
    if managed.phase is Phase.FAILED:
        if managed.error is None:
            runner = next(runner for runner in managed.runners if runner.instance.state is State.FAILED)
            pool.fail(managed, failure_of(runner.instance), runner.unavailable())
        if managed.retry_at_s > now_s:
            pool.timer.schedule(managed.retry_at_s)
            return
        pool.clear_failure(managed)
    if managed.sized is not None and managed.phase is Phase.ABSENT and managed.is_outdated:
        pool.runners.drop(managed, managed.runners)
        managed.runners, managed.sized = [], None
    if managed.phase is Phase.ABSENT and not managed.wanted:
        if managed.sizing is None:
            del pool.active[managed]
        elif managed.sized is None:
            managed.stop_sizing()
    elif managed.sized is None and not (managed.sizing or managed.swapping):
        pool.size_soon(managed, "size")


def _expire_demand(pool: Pool, managed: ManagedModel, now_s: float) -> None:
    if managed.pending_demand is not None:
        if managed.pending_demand.until_s <= now_s:
            managed.pending_demand = None
        else:
            pool.timer.schedule(managed.pending_demand.until_s)


def _mark_serving(managed: ManagedModel) -> None:
    """The model serves: end its ``load`` commands, and forget its last error."""
    managed.pending_demand = None
    if managed.error is not None:
        managed.error = None
        managed.served.unavailable_reason = not_loaded(managed.spec)
    managed.resolve_load_waiters()


def _apply(pool: Pool, action: Action) -> None:
    match action:
        case Load(id_):
            _start_runners(pool, pool.managed_models[id_])
        case Evict(id_, reason, for_id):
            pool.begin_unload(pool.managed_models[id_], reason, for_id)
        case Cordon(id_, for_id):
            managed = pool.managed_models[id_]
            managed.cordoned = True
            managed.served.pause(being_unloaded(managed.spec, for_id))
        case Uncordon(id_):
            managed = pool.managed_models[id_]
            managed.cordoned = False
            managed.served.resume()
            _mark_serving(managed)
        case Reject(id_, reason):
            refused = DoesNotFit(f"Model {id_!r} does not fit: {reason}.", remedy=_DOES_NOT_FIT_REMEDY)
            pool.fail(pool.managed_models[id_], refused)
            pool.bus.publish(LoadFailed(id_, refused))
        case WakeAt(at_s):
            pool.timer.schedule(at_s)
        case _ as unreachable:
            assert_never(unreachable)


def _start_runners(pool: Pool, managed: ManagedModel) -> None:
    if not managed.runners:
        assert managed.sized is not None  # the policy loads only sized models
        managed.runners = pool.make_runners(managed, managed.sized)
    managed.starting = True
    for runner in managed.runners:
        runner.post(StartRequested())
