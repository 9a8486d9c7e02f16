"""Many models in the memory there is: starts and ends their servers as ``core.residency`` says.

The pool owns every model, all their processes and the only timer. It decides nothing about who stays: after
everything that happens the policy is shown the world, and its verdicts are carried out (``deciding``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar, assert_never

from llamasup.errors import Conflict, DoesNotFit, LlamasupError, ModelUnknown, Stopping
from llamasup.models.spec import ModelSpec
from llamasup.planning.memory.shares import remaining
from llamasup.pool.model import (
    ManagedModel,
    PendingDemand,
    SizedModel,
    absent,
    as_unavailable,
    being_unloaded,
    policy_for,
    share_of,
)
from llamasup.pool.options import PoolOptions
from llamasup.pool.policy import (
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
from llamasup.pool.processes import Runners
from llamasup.pool.replicas.replica_set import ReplicaSet
from llamasup.pool.sizing import Fetch, ModelSizer
from llamasup.pool.unload import is_settled, memory_released, stop_all
from llamasup.queueing.endpoint import Unavailable
from llamasup.supervision.events import Bus, LoadFailed, ModelUnloading, PublishedEvent, StateChanged
from llamasup.supervision.failure import failure_of, lacks_memory
from llamasup.supervision.runner import STOPPING, InstanceRunner
from llamasup.supervision.states import KillRequested, Policy, StartRequested, State, StopRequested
from llamasup.system.timers import DeadlineTimer

__all__ = ["DEMAND_TTL_S", "Pool", "reconcile"]


T = TypeVar("T")

# A model that could not be loaded is tried again for the first request that comes after so long. Memory that
# somebody else has taken may soon be free; a broken file is mended by people, who can say so (`load`).
RETRY_AFTER_MEMORY_S = 10.0
RETRY_AFTER_FAILURE_S = 300.0
DEMAND_TTL_S = 60.0
"""How long a model is wanted for a request that was told to come again, from when it should: who does not,
does not want it any more."""


class Pool:
    """All models of one llamasup. All methods are for the event loop's thread."""

    def __init__(self, options: PoolOptions, runners: Runners, bus: Bus, fetch: Fetch | None = None) -> None:
        """``fetch`` has a model here that is somewhere else; it raises a LlamasupError where it cannot."""
        self._sizer = ModelSizer(fetch, bus, lambda: self.options)
        self.options = options
        self.bus = bus
        self.runners = runners
        self.stopping = False
        self.running = asyncio.Event()
        self.swapping = asyncio.Lock()
        """One model at a time is changed: then there is room beside the old one more often."""
        self.managed_models: dict[str, ManagedModel] = {}
        self.on_sized: Callable[[ManagedModel], None] | None = None
        """Hears of each model of which it is known by now what it is."""
        # Wanted, or with a process: all that the policy has to see. Those that are served no more, too.
        self.active: dict[ManagedModel, None] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._loop = asyncio.get_running_loop()
        self._reconcile_scheduled = False
        self.timer = DeadlineTimer(self.reconcile_soon)
        bus.listen(self._on_event)

    # --- life -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. However it ends, no child is left."""
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
        """End all servers: kindly, or at once. No model is started any more."""
        self.stopping = True
        self.timer.stop()
        for managed in self._all():
            managed.served.pause(STOPPING)
            managed.resolve_load_waiters(_stopping())
            managed.stop_sizing()
            for runner in managed.all_runners:
                runner.post(KillRequested() if now else StopRequested())

    async def ended(self) -> None:
        """Wait until no server is left, and none will start by itself."""
        for managed in self._all():
            for runner in managed.all_runners:
                await runner.until(is_settled)

    def _all(self) -> Iterable[ManagedModel]:
        return dict.fromkeys((*self.managed_models.values(), *self.active))

    def apply_options(self, options: PoolOptions) -> None:
        """From now on. What is loaded in memory that there is no longer goes as soon as it is idle."""
        before, self.options = self.options, options
        if options.budget != before.budget:
            for managed in self.managed_models.values():
                self.clear_failure(managed)
                if managed.phase is Phase.ABSENT:
                    managed.sized = None  # in another budget another plan may fit
        if options.policy != before.policy:
            for managed in self._all():
                managed.served.apply_policy(self._policy_for(managed, managed.sized))
        self.reconcile_soon()

    # --- models -----------------------------------------------------------------------------------------

    def add(self, spec: ModelSpec) -> ManagedModel:
        """A model that can be loaded from now on."""
        served = ReplicaSet(
            policy=policy_for(spec, self.options.policy),
            on_wanted=lambda: self._on_wanted(managed),
            on_unserved=lambda why: self._on_unserved(managed, why),
            on_idle=lambda: self._on_idle(managed),
        )
        managed = ManagedModel(spec, served)
        served.unavailable_reason = absent(spec)
        self.managed_models[spec.id] = managed
        return managed

    def forget(self, managed: ManagedModel) -> None:
        """It has no process any more, and gets none."""
        self.runners.drop(managed, managed.all_runners)
        managed.runners = []
        self.active.pop(managed, None)
        if self.managed_models.get(managed.spec.id) is managed:
            del self.managed_models[managed.spec.id]
        self.reconcile_soon()

    def rename(self, managed: ManagedModel, id_: str) -> None:
        """The same model under another id, which is free: its processes and those who wait stay with it."""
        del self.managed_models[managed.spec.id]
        managed.spec = replace(managed.spec, id=id_)
        self.managed_models[id_] = managed
        self.runners.rename(managed.all_runners, id_)
        if managed.error is None:
            managed.served.unavailable_reason = absent(managed.spec)

    def update_spec(self, managed: ManagedModel, spec: ModelSpec) -> None:
        """Something else is said of it. Its processes stay as they are."""
        managed.spec = spec
        managed.served.apply_policy(self._policy_for(managed, managed.sized))
        self.reconcile_soon()

    async def load(self, managed: ManagedModel) -> None:
        """Until it serves. Raises why it cannot."""
        if self.stopping:
            raise _stopping()
        if managed.removed:
            raise ModelUnknown(f"{managed.spec.id} is served no more.", remedy="Name another one.")
        if managed.phase is Phase.RESIDENT:
            return
        claim: asyncio.Future[None] = self._loop.create_future()
        self.claim(managed, claim)
        try:
            await claim
        finally:
            if claim in managed.load_waiters:  # whoever asked gave up
                managed.load_waiters.remove(claim)
                self.reconcile_soon()

    def claim(self, managed: ManagedModel, claim: asyncio.Future[None]) -> None:
        """Have it loaded for whoever waits for ``claim``."""
        self.clear_failure(managed)
        if not managed.load_waiters:
            managed.load_waiters_since_s = monotonic()
        managed.load_waiters.append(claim)
        self.want(managed)

    async def unload(self, managed: ManagedModel) -> None:
        """Until its memory is free. What is in flight has a drain's time; who waits has it loaded again."""
        self.clear_failure(managed)
        managed.reload_after, managed.pending_demand = False, None
        managed.unloaded = True
        managed.resolve_load_waiters(
            Conflict(
                f"{managed.spec.id} was unloaded meanwhile.", remedy="Load it again if it is to be served."
            )
        )
        self.reconcile_soon()  # it may still be downloaded, for nobody
        if managed.phase is not Phase.ABSENT:
            await asyncio.shield(self.begin_unload(managed, "asked"))

    def clear_failure(self, managed: ManagedModel) -> None:
        """Let it be tried again."""
        if managed.phase is Phase.FAILED:
            self.runners.drop(managed, managed.runners)
            managed.runners = []
            managed.error = None
            # What it was made from may be gone, and can perhaps be downloaded again.
            managed.stop_sizing()
            managed.sized = None
            managed.served.unavailable_reason = absent(managed.spec)

    def make_runners(self, managed: ManagedModel, sized: SizedModel) -> list[InstanceRunner]:
        """Of what was sized, with the limits that hold now; at rest."""
        assert self._tasks is not None
        return self.runners.make(
            managed,
            sized,
            self._policy_for(managed, sized),
            self._tasks,
            share=lambda: share_of(sized.spec, self.remaining_for(managed)),
            when_measured=lambda: self._on_measured(managed),
        )

    def _policy_for(self, managed: ManagedModel, sized: SizedModel | None) -> Policy:
        return policy_for(managed.spec, self.options.policy, None if sized is None else sized.spec)

    def remaining_for(self, managed: ManagedModel) -> Mapping[str, int]:
        """What the others leave of the budget, and what ran of it before. Called in the threads that plan,
        too.
        """
        others = (each.needs for each in tuple(self.active) if each is not managed and each.holds_memory)
        return remaining(self.options.budget, (*others, managed.old_needs))

    async def size(self, managed: ManagedModel, spec: ModelSpec) -> SizedModel:
        """See what it takes, and fetch it before if it is not here. Raises what these raise."""
        return await self._sizer.size(managed, spec)

    def begin_sizing(self, managed: ManagedModel, what: str) -> asyncio.Task[SizedModel | LlamasupError]:
        """As it is now: what it was before is of no use any more. Cancelled once nobody wants to know."""
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
        """It has its size then, or cannot be loaded for now."""
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
        """A task that ends with the pool."""
        assert self._tasks is not None
        return self._tasks.create_task(work, name=name)

    # --- what happens -----------------------------------------------------------------------------------

    def _on_wanted(self, managed: ManagedModel) -> None:
        """A request waits for it; or would, and may not: then it is loaded for when it comes again."""
        if not managed.load_waiters and not len(managed.served.queue):
            self._record_demand(managed, managed.served.unavailable_reason)
        self.want(managed)

    def _on_unserved(self, managed: ManagedModel, why: Unavailable | None) -> None:
        """A request waits for it no more, unserved. Who was told when it will be here may come then."""
        if why is not None and why.cause == "downloading":
            self._record_demand(managed, why)
        self.reconcile_soon()

    def _record_demand(self, managed: ManagedModel, told: Unavailable | None) -> None:
        now_s = monotonic()
        since_s = now_s if managed.pending_demand is None else managed.pending_demand.since_s
        again_s = now_s if told is None else now_s + (told.retry_after_s or 0.0)
        managed.pending_demand = PendingDemand(since_s, again_s + DEMAND_TTL_S)

    def want(self, managed: ManagedModel) -> None:
        """Somebody waits for it, or has a wish."""
        managed.unloaded = False
        if not managed.removed:
            self.active[managed] = None
            self.reconcile_soon()

    def _on_idle(self, managed: ManagedModel) -> None:
        """Its last request is over."""
        managed.count_use()
        if managed.cordoned or any(each.wanted and not each.serves for each in self.active):
            self.reconcile_soon()
        elif managed.spec.stay.ttl_s < float("inf"):
            self.timer.schedule(monotonic() + managed.spec.stay.ttl_s)

    def _on_event(self, event: PublishedEvent) -> None:
        managed = self.managed_models.get(event.model) if isinstance(event, StateChanged) else None
        if managed is None or not isinstance(event, StateChanged):
            return
        # Of its name: it may be what was served under it before.
        states = {runner.instance.state for runner in managed.runners}
        if states - {State.STOPPED}:
            managed.starting = False
        if event.state is State.READY and State.READY in states:
            managed.resident_since_s = monotonic()
        self.reconcile_soon()

    def fail(self, managed: ManagedModel, error: LlamasupError, why: Unavailable | None = None) -> None:
        """It cannot be loaded for now: those who wait for it hear why (as its server said it, if it had one),
        and nobody else notices (S17).
        """
        managed.error, managed.pending_demand = error, None
        managed.retry_at_s = monotonic() + _retry_after_s(error)
        managed.served.fail(as_unavailable(error, managed.spec, why), managed.retry_at_s)
        for runner in managed.runners:
            if not runner.instance.is_settled:
                runner.post(StopRequested())  # none of them tries by itself in memory that is not its own
        managed.resolve_load_waiters(error)
        self.timer.schedule(managed.retry_at_s)

    def _on_measured(self, managed: ManagedModel) -> None:
        """A load has taught what the model really takes."""
        if not (managed.sizing or managed.swapping or managed.is_outdated or self.stopping):
            self.size_soon(managed, "measure")

    # --- deciding ---------------------------------------------------------------------------------------

    def reconcile_soon(self) -> None:
        """In the loop's next round: many requests may come in this one."""
        if not self._reconcile_scheduled:
            self._reconcile_scheduled = True
            self._loop.call_soon(self._reconcile)

    def _reconcile(self) -> None:
        self._reconcile_scheduled = False
        if self._tasks is not None and not self.stopping:
            reconcile(self)

    def begin_unload(self, managed: ManagedModel, reason: str, for_id: str = "") -> asyncio.Task[None]:
        """End its servers; from now on none of them gets a request. Done when their memory is free."""
        if managed.unloading is None:
            self.bus.publish(ModelUnloading(managed.spec.id, reason, for_id))
            if managed.rolling_out:
                managed.stop_sizing()  # what it was to be next is looked at when it is loaded again
            managed.cordoned, managed.leaving = False, True
            managed.served.pause(being_unloaded(managed.spec, for_id))
            managed.unloading = self.start(self._unload(managed), f"{managed.spec.id}/leave")
        return managed.unloading

    async def _unload(self, managed: ManagedModel) -> None:
        try:
            async with memory_released(managed.sized):
                await stop_all(managed.all_runners)
        finally:
            managed.leaving = managed.starting = False
            managed.unloading = None
            if not (self.stopping or managed.removed):
                managed.served.resume()
            self.reconcile_soon()


def _stopping() -> Stopping:
    return Stopping("llamasup is stopping.", remedy="Start it again.")


def _retry_after_s(error: LlamasupError) -> float:
    return RETRY_AFTER_MEMORY_S if lacks_memory(error) else RETRY_AFTER_FAILURE_S


_DOES_NOT_FIT_REMEDY = (
    "Make it smaller (ctx_size, parallel), pin fewer, or allow more (memory, max_loaded, groups)."
)


def reconcile(pool: Pool) -> None:
    now_s = monotonic()
    for managed in tuple(pool.active):
        if not managed.removed:
            _observe(pool, managed, now_s)
    models = {each.key: each.snapshot() for each in pool.active if each.sized is not None}
    for action in decide(Snapshot(now_s, models, pool.options.budget, pool.options.residency)):
        _apply(pool, action)


def _observe(pool: Pool, managed: ManagedModel, now_s: float) -> None:
    """What follows from how it is, whatever else is loaded."""
    _expire_demand(pool, managed, now_s)
    if managed.serves:
        _mark_serving(managed)
    if managed.phase is Phase.FAILED:
        if managed.error is None:
            runner = next(each for each in managed.runners if each.instance.state is State.FAILED)
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
    """Whoever waits for no more than that has it; what was wrong with it is over."""
    managed.pending_demand = None
    if managed.error is not None:
        managed.error = None
        managed.served.unavailable_reason = absent(managed.spec)
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
            refused = DoesNotFit(f"{id_} does not fit: {reason}.", remedy=_DOES_NOT_FIT_REMEDY)
            pool.fail(pool.managed_models[id_], refused)
            pool.bus.publish(LoadFailed(id_, refused))
        case WakeAt(at_s):
            pool.timer.schedule(at_s)
        case _ as unreachable:
            assert_never(unreachable)


def _start_runners(pool: Pool, managed: ManagedModel) -> None:
    if not managed.runners:
        assert managed.sized is not None  # nothing is loaded that was not sized
        managed.runners = pool.make_runners(managed, managed.sized)
    managed.starting = True
    for runner in managed.runners:
        runner.post(StartRequested())
