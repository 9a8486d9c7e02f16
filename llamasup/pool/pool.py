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
    making_room,
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
from llamasup.pool.unload import end, is_settled, memory_released
from llamasup.queueing.endpoint import Unavailable
from llamasup.supervision.events import Bus, LoadFailed, ModelUnloading, PublishedEvent, StateChanged
from llamasup.supervision.failure import failure_of, lacks_memory
from llamasup.supervision.runner import STOPPING, InstanceRunner
from llamasup.supervision.states import KillRequested, Policy, StartRequested, State, StopRequested
from llamasup.system.timers import DeadlineTimer

__all__ = ["WISH_S", "Pool", "reconcile"]


T = TypeVar("T")

# A model that could not be loaded is tried again for the first request that comes after so long. Memory that
# somebody else has taken may soon be free; a broken file is mended by people, who can say so (`load`).
RETRY_AFTER_MEMORY_S = 10.0
RETRY_AFTER_FAILURE_S = 300.0
WISH_S = 60.0
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
        self.when_sized: Callable[[ManagedModel], None] | None = None
        """Hears of each model of which it is known by now what it is."""
        # Wanted, or with a process: all that the policy has to see. Those that are served no more, too.
        self.active: dict[ManagedModel, None] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._loop = asyncio.get_running_loop()
        self._deciding = False
        self.alarm = DeadlineTimer(self.decide_soon)
        bus.listen(self._notice)

    # --- life -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. However it ends, no child is left."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self.running.set()
                self.decide_soon()
                await self._loop.create_future()
        finally:
            self.stopping = True
            self.alarm.stop()
            for managed in self._all():
                managed.served.shut(STOPPING)

    def ask_stop(self, *, now: bool = False) -> None:
        """End all servers: kindly, or at once. No model is started any more."""
        self.stopping = True
        self.alarm.stop()
        for managed in self._all():
            managed.served.shut(STOPPING)
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

    def use(self, options: PoolOptions) -> None:
        """From now on. What is loaded in memory that there is no longer goes as soon as it is idle."""
        before, self.options = self.options, options
        if options.budget != before.budget:
            for managed in self.managed_models.values():
                self.forget_failure(managed)
                if managed.phase is Phase.ABSENT:
                    managed.sized = None  # in another budget another plan may fit
        if options.policy != before.policy:
            for managed in self._all():
                managed.served.allow(self._policy_for(managed, managed.sized))
        self.decide_soon()

    # --- models -----------------------------------------------------------------------------------------

    def add(self, spec: ModelSpec) -> ManagedModel:
        """A model that can be loaded from now on."""
        served = ReplicaSet(
            policy=policy_for(spec, self.options.policy),
            when_wanted=lambda: self._asked_for(managed),
            when_left=lambda why: self._left(managed, why),
            once_idle=lambda: self._idle(managed),
        )
        managed = ManagedModel(spec, served)
        served.absent = absent(spec)
        self.managed_models[spec.id] = managed
        return managed

    def forget(self, managed: ManagedModel) -> None:
        """It has no process any more, and gets none."""
        self.runners.drop(managed, managed.all_runners)
        managed.runners = []
        self.active.pop(managed, None)
        if self.managed_models.get(managed.spec.id) is managed:
            del self.managed_models[managed.spec.id]
        self.decide_soon()

    def rename(self, managed: ManagedModel, id_: str) -> None:
        """The same model under another id, which is free: its processes and those who wait stay with it."""
        del self.managed_models[managed.spec.id]
        managed.spec = replace(managed.spec, id=id_)
        self.managed_models[id_] = managed
        self.runners.rename(managed.all_runners, id_)
        if managed.error is None:
            managed.served.absent = absent(managed.spec)

    def retouch(self, managed: ManagedModel, spec: ModelSpec) -> None:
        """Something else is said of it. Its processes stay as they are."""
        managed.spec = spec
        managed.served.allow(self._policy_for(managed, managed.sized))
        self.decide_soon()

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
                self.decide_soon()

    def claim(self, managed: ManagedModel, claim: asyncio.Future[None]) -> None:
        """Have it loaded for whoever waits for ``claim``."""
        self.forget_failure(managed)
        if not managed.load_waiters:
            managed.load_waiters_since_s = monotonic()
        managed.load_waiters.append(claim)
        self.want(managed)

    async def unload(self, managed: ManagedModel) -> None:
        """Until its memory is free. What is in flight has a drain's time; who waits has it loaded again."""
        self.forget_failure(managed)
        managed.reload_after, managed.wish = False, None
        managed.unloaded = True
        managed.resolve_load_waiters(
            Conflict(
                f"{managed.spec.id} was unloaded meanwhile.", remedy="Load it again if it is to be served."
            )
        )
        self.decide_soon()  # it may still be downloaded, for nobody
        if managed.phase is not Phase.ABSENT:
            await asyncio.shield(self.leave(managed, "asked"))

    def forget_failure(self, managed: ManagedModel) -> None:
        """Let it be tried again."""
        if managed.phase is Phase.FAILED:
            self.runners.drop(managed, managed.runners)
            managed.runners = []
            managed.error = None
            # What it was made from may be gone, and can perhaps be downloaded again.
            managed.stop_sizing()
            managed.sized = None
            managed.served.absent = absent(managed.spec)

    def make_runners(self, managed: ManagedModel, sized: SizedModel) -> list[InstanceRunner]:
        """Of what was sized, with the limits that hold now; at rest."""
        assert self._tasks is not None
        return self.runners.make(
            managed,
            sized,
            self._policy_for(managed, sized),
            self._tasks,
            share=lambda: share_of(sized.spec, self.left_for(managed)),
            on_measured=lambda: self._measured(managed),
        )

    def _policy_for(self, managed: ManagedModel, sized: SizedModel | None) -> Policy:
        return policy_for(managed.spec, self.options.policy, None if sized is None else sized.spec)

    def left_for(self, managed: ManagedModel) -> Mapping[str, int]:
        """What the others leave of the budget, and what ran of it before. Called in the threads that plan,
        too.
        """
        others = (each.needs for each in tuple(self.active) if each is not managed and each.holds)
        return remaining(self.options.budget, (*others, managed.outgoing_needs))

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
            self.decide_soon()

        task.add_done_callback(over)
        return task

    def size_soon(self, managed: ManagedModel, what: str) -> None:
        """It has its size then, or cannot be loaded for now."""
        spec = managed.spec

        def over(task: asyncio.Task[SizedModel | LlamasupError]) -> None:
            outcome = None if task.cancelled() or managed.removed else task.result()
            if isinstance(outcome, SizedModel) and outcome.is_of(managed.spec):
                managed.sized = outcome
                if self.when_sized is not None:
                    self.when_sized(managed)
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

    def _asked_for(self, managed: ManagedModel) -> None:
        """A request waits for it; or would, and may not: then it is loaded for when it comes again."""
        if not managed.load_waiters and not len(managed.served.room):
            self._wish(managed, managed.served.absent)
        self.want(managed)

    def _left(self, managed: ManagedModel, why: Unavailable | None) -> None:
        """A request waits for it no more, unserved. Who was told when it will be here may come then."""
        if why is not None and why.cause == "downloading":
            self._wish(managed, why)
        self.decide_soon()

    def _wish(self, managed: ManagedModel, told: Unavailable | None) -> None:
        now_s = monotonic()
        since_s = now_s if managed.wish is None else managed.wish.since_s
        again_s = now_s if told is None else now_s + (told.retry_after_s or 0.0)
        managed.wish = PendingDemand(since_s, again_s + WISH_S)

    def want(self, managed: ManagedModel) -> None:
        """Somebody waits for it, or has a wish."""
        managed.unloaded = False
        if not managed.removed:
            self.active[managed] = None
            self.decide_soon()

    def _idle(self, managed: ManagedModel) -> None:
        """Its last request is over."""
        managed.count_use()
        if managed.yielding or any(each.wanted and not each.serves for each in self.active):
            self.decide_soon()
        elif managed.spec.stay.ttl_s < float("inf"):
            self.alarm.schedule(monotonic() + managed.spec.stay.ttl_s)

    def _notice(self, notice: PublishedEvent) -> None:
        managed = self.managed_models.get(notice.model) if isinstance(notice, StateChanged) else None
        if managed is None or not isinstance(notice, StateChanged):
            return
        # Of its name: it may be what was served under it before.
        states = {runner.instance.state for runner in managed.runners}
        if states - {State.STOPPED}:
            managed.starting = False
        if notice.state is State.READY and State.READY in states:
            managed.resident_since_s = monotonic()
        self.decide_soon()

    def fail(self, managed: ManagedModel, error: LlamasupError, why: Unavailable | None = None) -> None:
        """It cannot be loaded for now: those who wait for it hear why (as its server said it, if it had one),
        and nobody else notices (S17).
        """
        managed.error, managed.wish = error, None
        managed.retry_at_s = monotonic() + _retry_after_s(error)
        managed.served.fail(as_unavailable(error, managed.spec, why), managed.retry_at_s)
        for runner in managed.runners:
            if not runner.instance.is_settled:
                runner.post(StopRequested())  # none of them tries by itself in memory that is not its own
        managed.resolve_load_waiters(error)
        self.alarm.schedule(managed.retry_at_s)

    def _measured(self, managed: ManagedModel) -> None:
        """A load has taught what the model really takes."""
        if not (managed.sizing or managed.swapping or managed.is_outdated or self.stopping):
            self.size_soon(managed, "measure")

    # --- deciding ---------------------------------------------------------------------------------------

    def decide_soon(self) -> None:
        """In the loop's next round: many requests may come in this one."""
        if not self._deciding:
            self._deciding = True
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._deciding = False
        if self._tasks is not None and not self.stopping:
            reconcile(self)

    def leave(self, managed: ManagedModel, reason: str, for_id: str = "") -> asyncio.Task[None]:
        """End its servers; from now on none of them gets a request. Done when their memory is free."""
        if managed.unloading is None:
            self.bus.publish(ModelUnloading(managed.spec.id, reason, for_id))
            if managed.rolling_out:
                managed.stop_sizing()  # what it was to be next is looked at when it is loaded again
            managed.yielding, managed.leaving = False, True
            managed.served.shut(making_room(managed.spec, for_id))
            managed.unloading = self.start(self._see_off(managed), f"{managed.spec.id}/leave")
        return managed.unloading

    async def _see_off(self, managed: ManagedModel) -> None:
        try:
            async with memory_released(managed.sized):
                await end(managed.all_runners)
        finally:
            managed.leaving = managed.starting = False
            managed.unloading = None
            if not (self.stopping or managed.removed):
                managed.served.open()
            self.decide_soon()


def _stopping() -> Stopping:
    return Stopping("llamasup is stopping.", remedy="Start it again.")


def _retry_after_s(error: LlamasupError) -> float:
    return RETRY_AFTER_MEMORY_S if lacks_memory(error) else RETRY_AFTER_FAILURE_S


_REFUSED = "Make it smaller (ctx_size, parallel), pin fewer, or allow more (memory, max_loaded, groups)."


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
    _look_at_wish(pool, managed, now_s)
    if managed.serves:
        _serves(managed)
    if managed.phase is Phase.FAILED:
        if managed.error is None:
            runner = next(each for each in managed.runners if each.instance.state is State.FAILED)
            pool.fail(managed, failure_of(runner.instance), runner.unavailable())
        if managed.retry_at_s > now_s:
            pool.alarm.schedule(managed.retry_at_s)
            return
        pool.forget_failure(managed)
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


def _look_at_wish(pool: Pool, managed: ManagedModel, now_s: float) -> None:
    if managed.wish is not None:
        if managed.wish.until_s <= now_s:
            managed.wish = None
        else:
            pool.alarm.schedule(managed.wish.until_s)


def _serves(managed: ManagedModel) -> None:
    """Whoever waits for no more than that has it; what was wrong with it is over."""
    managed.wish = None
    if managed.error is not None:
        managed.error = None
        managed.served.absent = absent(managed.spec)
    managed.resolve_load_waiters()


def _apply(pool: Pool, action: Action) -> None:
    match action:
        case Load(id_):
            _begin(pool, pool.managed_models[id_])
        case Evict(id_, reason, for_id):
            pool.leave(pool.managed_models[id_], reason, for_id)
        case Cordon(id_, for_id):
            managed = pool.managed_models[id_]
            managed.yielding = True
            managed.served.shut(making_room(managed.spec, for_id))
        case Uncordon(id_):
            managed = pool.managed_models[id_]
            managed.yielding = False
            managed.served.open()
            _serves(managed)
        case Reject(id_, reason):
            refused = DoesNotFit(f"{id_} does not fit: {reason}.", remedy=_REFUSED)
            pool.fail(pool.managed_models[id_], refused)
            pool.bus.publish(LoadFailed(id_, refused))
        case WakeAt(at_s):
            pool.alarm.schedule(at_s)
        case _ as unreachable:
            assert_never(unreachable)


def _begin(pool: Pool, managed: ManagedModel) -> None:
    if not managed.runners:
        assert managed.sized is not None  # nothing is loaded that was not sized
        managed.runners = pool.make_runners(managed, managed.sized)
    managed.starting = True
    for runner in managed.runners:
        runner.post(StartRequested())
