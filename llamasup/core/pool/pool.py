"""Loads and unloads many models in the available memory, as ``eviction_policy.decide`` orders.

The pool owns all models, and the only timer. Each model is a table (``model_table.py``): the pool passes it
events, one after the other, and carries out the effects. After each event it passes a snapshot of all models
to the policy, whose actions are events again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import unknown_model
from llamasup.core.models.spec import KeepResult, ModelSpec
from llamasup.core.planning.memory.shares import remaining
from llamasup.core.pool import model_states as states
from llamasup.core.pool.driver import DriverContext, ProcessDriver, Proof, carry_out, is_settled
from llamasup.core.pool.estimate import Fetch, ModelSizer, SizedModel, Sizer, share_of
from llamasup.core.pool.eviction_policy import (
    Action,
    Cordon,
    Evict,
    Grounds,
    Load,
    ModelSnapshot,
    Phase,
    Reject,
    Snapshot,
    Uncordon,
    WakeAt,
    decide_with_grounds,
)
from llamasup.core.pool.model import ManagedModel, PendingDemand, policy_for
from llamasup.core.pool.model_states import (
    Effect,
    Event,
    ModelState,
    RolloutStep,
    charged,
    is_proof_under_way,
)
from llamasup.core.pool.model_table import advance_model
from llamasup.core.pool.options import PoolOptions
from llamasup.core.pool.processes import Crashes, Runners
from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.pool.why import recording
from llamasup.core.pool.why.decision import Decisions
from llamasup.core.pool.why.recording import LoadedBy
from llamasup.core.supervision.events import Bus, PublishedEvent, StateChanged
from llamasup.core.supervision.not_serving import STOPPING, lacks_memory
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Policy, State
from llamasup.core.system.event_loops import DeadlineTimer
from llamasup.errors import BuildUnproven, Conflict, DoesNotFit, LlamasupError, ModelUnknown, Stopping

if TYPE_CHECKING:
    from llamasup.core.pool.what_if import Consequences

_log = logging.getLogger(__name__)

# A model that failed is loaded again for the first request after this time. Memory that another program uses
# may soon be free; a broken file is replaced by a user, who can run `llamasup load` then.
RETRY_AFTER_MEMORY_S = 10.0
RETRY_AFTER_FAILURE_S = 300.0
DEMAND_TTL_S = 60.0
"""How long after its Retry-After time the pool expects a refused client to come again."""


class Pool:
    """The models of one llamasup. Call all methods in the thread of the event loop."""

    def __init__(
        self,
        options: PoolOptions,
        runners: Runners,
        bus: Bus,
        fetch: Fetch | None = None,
        *,
        sizer: Sizer | None = None,
    ) -> None:
        """``fetch`` downloads a model; None: downloads are off. ``sizer``: None for estimates."""
        self.options = options
        self.bus = bus
        sizer = sizer or ModelSizer(fetch, lambda: self.options)
        self.proof: Proof = _unjudged
        """Compares an unproven build with the running one."""
        self.crashes = Crashes()
        self._context = DriverContext(sizer, runners, bus, self.crashes, self._running, lambda: self.proof)
        self.stopping = False
        self._ended = False  # all processes are being killed
        self.running = asyncio.Event()
        self.managed_models: dict[str, ManagedModel] = {}
        self.decisions = Decisions()
        self._grounds: Mapping[str, Grounds] = {}  # of the current decision of the policy
        self.on_sized: Callable[[ManagedModel], None] | None = None
        """Called after each successful sizing for a load."""
        # The models that the policy sees: requested, with processes, or removed and still stopping.
        self.active: dict[ManagedModel, None] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._loop = asyncio.get_running_loop()
        self._reconcile_scheduled = False
        # An effect may raise an event: events queue, so that each model changes only between two of them.
        self._events: deque[tuple[ManagedModel, Event]] = deque()
        self._is_dispatching = False
        self._timer = DeadlineTimer(self.reconcile_soon)
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
                try:
                    await self._loop.create_future()
                finally:
                    self.stopping = self._ended = True
        finally:
            self._timer.stop()
            for managed in self._all():
                managed.served.pause(STOPPING)

    def _running(self) -> asyncio.TaskGroup:
        assert self._tasks is not None
        return self._tasks

    def ask_stop(self, *, now: bool = False) -> None:
        """Stop all servers after their requests, or ``now``. No model is started any more."""
        if self._ended:
            return
        self.stopping = True
        self._timer.stop()
        for managed in tuple(self._all()):
            self._post(managed, states.StopRequested(STOPPING, _stopping(), now))

    async def ended(self) -> None:
        """Wait until all servers have stopped and none will restart."""
        for managed in () if self._ended else tuple(self._all()):
            for runner in managed.all_runners:
                await runner.until(is_settled)

    def _all(self) -> Iterable[ManagedModel]:
        return dict.fromkeys((*self.managed_models.values(), *self.active))

    def apply_options(self, options: PoolOptions) -> None:
        """Use these options from now on, except for the runtime, which only ``use_runtime`` changes. Models
        over a smaller budget are evicted when they are idle.
        """
        before, self.options = self.options, replace(options, runtime=self.options.runtime)
        for managed in tuple(self._all()):
            if options.budget != before.budget:
                self._post(managed, states.BudgetChanged())
            if options.policy != before.policy:
                managed.served.apply_policy(self._policy_for(managed, managed.sized))
        self.reconcile_soon()

    # --- models -----------------------------------------------------------------------------------------

    def add(self, spec: ModelSpec) -> ManagedModel:
        """Add a model that can be loaded."""
        policy = policy_for(spec, self.options.policy)
        if spec.stay.by_command:  # its requests change nothing
            served = ReplicaSet(policy=policy)
        else:
            served = ReplicaSet(
                policy=policy,
                on_wanted=lambda: self._on_wanted(managed),
                on_unserved=lambda why: self._on_unserved(managed, why),
                on_idle=lambda: self._on_idle(managed),
            )
        driver = ProcessDriver(
            self._context,
            served,
            spec=lambda: managed.spec,
            policy=lambda sized: self._policy_for(managed, sized),
            share=lambda sized: share_of(sized.spec, self.remaining_for(managed)),
            post=lambda event: self._post(managed, event),
        )
        managed = ManagedModel(replace(spec, runtime=self.options.runtime or ""), served, driver)
        managed.tell_queue()
        self.managed_models[spec.id] = managed
        return managed

    def remove(self, managed: ManagedModel, successor: ManagedModel | None = None) -> None:
        """Requests in flight may finish; queued ones move to ``successor``, or are rejected."""
        if successor is not None:
            self._transfer(managed, successor)
        error = unknown_model(managed.spec.id)
        unknown = ModelUnknown(f"{error.message}.", remedy=error.remedy)
        self._post(managed, states.RemoveRequested(error, unknown))

    def _transfer(self, managed: ManagedModel, successor: ManagedModel) -> None:
        def over(waiter: asyncio.Future[None]) -> None:
            """A caller that gives up removes its waiter from the old model only."""
            if waiter in successor.load_waiters:
                successor.load_waiters.remove(waiter)
                self.reconcile_soon()

        is_wanted = managed.wanted
        load_waiters, managed.load_waiters = managed.load_waiters, []
        for waiter in load_waiters:
            self._add_load_waiter(successor, waiter, managed.loaded_by)
            waiter.add_done_callback(over)
        successor.pending_demand = successor.pending_demand or managed.pending_demand
        managed.pending_demand = None
        managed.served.queue.transfer_to(successor.served.queue)
        if is_wanted:
            self._want(successor)

    def _forget(self, managed: ManagedModel) -> None:
        """Drop a removed model whose processes have ended."""
        managed.driver.drop_all()
        self.active.pop(managed, None)
        if self.managed_models.get(managed.spec.id) is managed:
            del self.managed_models[managed.spec.id]
        self.reconcile_soon()

    def rename(self, managed: ManagedModel, id_: str) -> None:
        """Give the model an unused id. It keeps its processes and its queue."""
        old = managed.spec.id
        del self.managed_models[old]
        self._post(managed, states.SpecUpdated(replace(managed.spec, id=id_)))
        self.managed_models[id_] = managed
        managed.driver.rename(id_)
        self.decisions.rename(old, id_)

    def update_spec(self, managed: ManagedModel, spec: ModelSpec) -> None:
        """Change the spec of a model without a change to its processes."""
        self._change_spec(managed, states.SpecUpdated(_as_built(spec, managed)))

    def roll_out(self, managed: ManagedModel, spec: ModelSpec) -> None:
        """Serve the model from its new file or with its new settings, without a failed request (S16)."""
        rolled_out = managed.model.rollout
        self._change_spec(managed, states.SpecChanged(_as_built(spec, managed)))
        if managed.model.rollout is not None and managed.model.rollout is not rolled_out:
            self.decisions.add(recording.updated(datetime.now(UTC), managed.spec.id))

    def use_runtime(self, managed: ManagedModel, runtime: str, *, unproven: bool = False) -> None:
        """Serve the model with this build, like a change of its settings. ``unproven``: after its proof."""
        spec = replace(managed.spec, runtime=runtime, unproven=unproven)
        self._change_spec(managed, states.SpecChanged(spec))

    def set_runtime(self, runtime: str) -> None:
        """Serve models that are added later with this build."""
        self.options = replace(self.options, runtime=runtime)

    def _change_spec(self, managed: ManagedModel, event: states.SpecUpdated | states.SpecChanged) -> None:
        self._post(managed, event)
        sized = managed.sized
        managed.served.apply_policy(
            policy_for(event.spec, self.options.policy, None if sized is None else sized.spec)
        )

    async def load(self, managed: ManagedModel, by: LoadedBy = "command") -> None:
        """Wait until the model serves. Raises the error of the load."""
        if managed.serves and not self.stopping and not managed.removed:
            return
        waiter = self.begin_load(managed, by)
        try:
            await waiter
        finally:
            if waiter in managed.load_waiters:  # the caller gave up
                managed.load_waiters.remove(waiter)
                self.reconcile_soon()

    def begin_load(self, managed: ManagedModel, by: LoadedBy = "command") -> asyncio.Future[None]:
        """Load the model. The result ends when it serves, or with the error."""
        if self.stopping:
            raise _stopping()
        if managed.removed:
            raise ModelUnknown(
                f"Model {managed.spec.id!r} is no longer served.",
                remedy="List the models with `llamasup ps --all`.",
            )
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._add_load_waiter(managed, waiter, by)
        return waiter

    def _add_load_waiter(self, managed: ManagedModel, waiter: asyncio.Future[None], by: LoadedBy) -> None:
        """Load the model, and end ``waiter`` with the outcome."""
        if not managed.load_waiters:
            managed.load_waiters_since_s = monotonic()
        managed.load_waiters.append(waiter)
        managed.loaded_by = by
        self._post(managed, states.RetryRequested())
        self._want(managed)

    async def unload(self, managed: ManagedModel) -> None:
        """Wait until its memory is free. Requests in flight get the drain time; queued ones load it again."""
        managed.pending_demand = None
        managed.unloaded = True
        managed.resolve_load_waiters(
            Conflict(
                f"{managed.spec.id!r} was unloaded while it was loading.",
                remedy=f"Run `llamasup load {managed.spec.id}`.",
            )
        )
        self._post(managed, states.UnloadRequested())
        if managed.phase is Phase.UNLOADING:
            waiter: asyncio.Future[None] = self._loop.create_future()
            managed.unload_waiters.append(waiter)
            await waiter

    def keep(self, managed: ManagedModel, ttl_s: float | None, *, own: int = 0) -> KeepResult:
        """Let the model stay loaded for ``ttl_s`` after its last request, until it is loaded again; None: for
        its own ttl.

        With 0 it is unloaded once it is idle, unless others use it: it has more requests than ``own``, or a
        ``load`` command waits for it.
        """
        stay = managed.spec.stay
        if stay.pin or stay.by_command:
            return "fixed"
        if ttl_s == 0 and managed.is_used(own):
            return "in_use"
        if managed.kept_s != ttl_s:
            managed.kept_s = ttl_s
            self.reconcile_soon()
        return "kept"

    def _policy_for(self, managed: ManagedModel, sized: SizedModel | None) -> Policy:
        return policy_for(managed.spec, self.options.policy, None if sized is None else sized.spec)

    def remaining_for(self, managed: ManagedModel | None) -> Mapping[str, int]:
        """The budget less the other models and the old replicas of this one; None: a model that is not
        served. Planner threads call it, too.
        """
        others = (charged(other.model) for other in tuple(self.active) if other is not managed)
        own: Mapping[str, int] = {} if managed is None else managed.old_needs
        return remaining(self.options.budget, (*others, own))

    def consequences_of(self, asked: ModelSnapshot, needs: Mapping[str, int]) -> Consequences:
        """Predict a request for the model, if it were absent and needed ``needs``. Changes nothing."""
        from llamasup.core.pool.what_if import consequences  # here, to keep the start short

        models = {other.key: other.snapshot() for other in self.active if other.sized is not None}
        models[asked.id] = asked
        snapshot = Snapshot(monotonic(), models, self.options.budget, self.options.residency)
        return consequences(snapshot, asked.id, needs)

    async def size(self, managed: ManagedModel, spec: ModelSpec) -> SizedModel:
        """Download the model if it is missing, and estimate its memory. Changes nothing."""
        return await managed.driver.sized(spec)

    # --- events -----------------------------------------------------------------------------------------
    def _on_wanted(self, managed: ManagedModel) -> None:
        """A request waits for the model, or was refused because it may not wait: load it in both cases."""
        if not managed.load_waiters and not len(managed.served.queue):
            self._record_demand(managed, managed.served.unavailable_reason)
        self._want(managed)

    def _on_unserved(self, managed: ManagedModel, why: HttpError | None) -> None:
        """A request left the queue unserved. A client that saw a download may come again."""
        if why is not None and why.cause == "downloading":
            self._record_demand(managed, why)
        self.reconcile_soon()

    def _record_demand(self, managed: ManagedModel, why: HttpError | None) -> None:
        now_s = monotonic()
        since_s = now_s if managed.pending_demand is None else managed.pending_demand.since_s
        again_s = now_s if why is None else now_s + (why.retry_after_s or 0.0)
        managed.pending_demand = PendingDemand(since_s, again_s + DEMAND_TTL_S)

    def _want(self, managed: ManagedModel) -> None:
        """Add the model to those that the policy sees, because of a request or a command."""
        managed.unloaded = False
        if managed.state is not ModelState.REMOVED:
            self.active[managed] = None
            self.reconcile_soon()

    def _on_idle(self, managed: ManagedModel) -> None:
        """The last request in flight has ended."""
        if managed.count_use() > 1 and managed.kept_s == 0:
            managed.kept_s = None  # another client used it meanwhile
        is_cordoned = managed.state is ModelState.CORDONED
        if is_cordoned or any(model.wanted and not model.serves for model in self.active):
            self.reconcile_soon()
        elif managed.ttl_s < float("inf"):
            self._timer.schedule(monotonic() + managed.ttl_s)

    def _on_event(self, event: PublishedEvent) -> None:
        if (decision := recording.of_event(event, datetime.now(UTC), self._grounds)) is not None:
            self.decisions.add(decision)
        if not isinstance(event, StateChanged) or (managed := self.managed_models.get(event.model)) is None:
            return
        # The event has the model's name only: it may come from a removed model of this name.
        if event.state is State.READY and any(
            runner.instance.state is State.READY for runner in managed.runners
        ):
            managed.resident_since_s = monotonic()
            self._note_reductions(managed, event.generation)
        managed.driver.report()
        self.reconcile_soon()

    def _post(self, managed: ManagedModel, event: Event) -> None:
        """Take this event after those that are under way."""
        self._events.append((managed, event))
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            while self._events:
                self._advance(*self._events.popleft())
        finally:
            self._is_dispatching = False

    def _advance(self, managed: ManagedModel, event: Event) -> None:
        before = managed.model
        managed.model, effects = advance_model(before, event)
        if managed.model is not before:
            self.reconcile_soon()
        error = managed.model.error
        if error is not None and error is not before.error:
            managed.pending_demand = None
            managed.retry_at_s = monotonic() + (
                RETRY_AFTER_MEMORY_S if lacks_memory(error) else RETRY_AFTER_FAILURE_S
            )
            self._timer.schedule(managed.retry_at_s)
        if managed.model.rollout is not None and before.rollout is None:
            managed.rollout = self._loop.create_future()
        managed.tell_queue()
        for effect in effects:
            if not carry_out(effect, managed.driver):
                self._carry_out(managed, effect)
        if managed.phase is not Phase.UNLOADING:
            managed.resolve_unload_waiters()

    def _carry_out(self, managed: ManagedModel, effect: Effect) -> None:
        match effect:
            case states.SizedUp():
                if self.on_sized is not None:
                    self.on_sized(managed)
            case states.EndLoads(error):
                managed.resolve_load_waiters(error)
            case states.EndRollout(error):
                self._end_rollout(managed, error)
            case states.Reload():
                self._reload(managed)
            case states.Announce(event):
                self.bus.publish(event)
            case states.Forget():
                self._forget(managed)

    def _end_rollout(self, managed: ManagedModel, error: LlamasupError | None) -> None:
        if error is not None:
            _log.error(
                "rollout of model %r failed, its old processes keep running: %s", managed.spec.id, error
            )
        if managed.rollout is not None and not managed.rollout.done():
            managed.rollout.set_result(error)

    def _reload(self, managed: ManagedModel) -> None:
        """The rollout ends with this load."""
        rollout = managed.rollout

        def over(waiter: asyncio.Future[None]) -> None:
            error = None if waiter.cancelled() else waiter.exception()
            failure = error if isinstance(error, LlamasupError) and not self.stopping else None
            if failure is not None:
                _log.warning(
                    "model %r was updated but could not be loaded again: %s", managed.spec.id, failure
                )
            if rollout is not None and not rollout.done():
                rollout.set_result(failure)

        waiter: asyncio.Future[None] = self._loop.create_future()
        waiter.add_done_callback(over)
        self._add_load_waiter(managed, waiter, "update")

    # --- reconciliation ---------------------------------------------------------------------------------
    def reconcile_soon(self) -> None:
        """Reconcile once in the next iteration of the loop, for all events of this one."""
        if not self._reconcile_scheduled:
            self._reconcile_scheduled = True
            self._loop.call_soon(self._reconcile)

    def _reconcile(self) -> None:
        """Observe the active models, ask the policy, and pass its actions on."""
        self._reconcile_scheduled = False
        if self._tasks is None or self.stopping:
            return
        now_s = monotonic()
        for managed in tuple(self.active):
            if managed.state is not ModelState.REMOVED:
                self._observe(managed, now_s)
        self._grant_swaps()
        models = {managed.key: managed.snapshot() for managed in self.active if managed.sized is not None}
        decided = decide_with_grounds(Snapshot(now_s, models, self.options.budget, self.options.residency))
        self._grounds = decided.grounds
        self._end_proofs(decided.grounds)
        for action in decided.actions:
            self._apply(action)
        for managed in self.active:
            self._note_wait(managed, decided.grounds.get(managed.key))

    def _observe(self, managed: ManagedModel, now_s: float) -> None:
        """Handle what does not depend on other models: expired demand, failures, sizings."""
        if managed.pending_demand is not None:
            if managed.pending_demand.until_s <= now_s or managed.serves:
                managed.pending_demand = None
            else:
                self._timer.schedule(managed.pending_demand.until_s)
        if managed.serves:
            managed.resolve_load_waiters()
        if managed.state is ModelState.FAILED:
            if managed.retry_at_s > now_s:
                self._timer.schedule(managed.retry_at_s)
                return
            self._post(managed, states.RetryRequested())
        self._post(managed, states.Wanted() if managed.wanted else states.Unwanted())
        if managed.phase is Phase.ABSENT and not (managed.wanted or managed.sizing):
            del self.active[managed]

    def _grant_swaps(self) -> None:
        """One model at a time: then two generations fit in the memory more often. The proof of a build takes
        minutes, so no other model waits for it.
        """
        for managed in tuple(self.active):
            rollout = managed.model.rollout
            if rollout is None or rollout.target is None:
                continue
            free: Mapping[str, int]
            if rollout.step is RolloutStep.FREED:
                free = self.remaining_for(managed)
            elif rollout.step is RolloutStep.WAITING and not any(
                other.state is ModelState.ROLLING_OUT and not is_proof_under_way(other.model)
                for other in self.active
            ):
                free = remaining(self.remaining_for(managed), [managed.needs])
            else:
                continue
            fits = all(free.get(device, 0) >= size for device, size in rollout.target.needs.items())
            self._post(managed, states.SwapGranted(fits))

    def _end_proofs(self, grounds: Mapping[str, Grounds]) -> None:
        """A model that is wanted needs the memory more than the proof of a build."""
        for managed in tuple(self.active):
            current, sized = managed.model.current, managed.sized
            if not is_proof_under_way(managed.model) or current is None or sized is None:
                continue
            for id_, why in grounds.items():
                lacks = any(kind == "memory" and name in sized.needs for kind, name in why.lack)
                if lacks and not why.idle_models_suffice:
                    purpose = f"for {id_!r}" if id_ else "to stay within the budget"
                    needed = BuildUnproven(
                        f"The memory of the proof with {managed.spec.id!r} was needed {purpose}.",
                        remedy="Try again when there are fewer requests.",
                    )
                    self._post(managed, states.Disproven(current.id, needed))

    def _apply(self, action: Action) -> None:
        match action:
            case Load(id_):
                managed = self.managed_models[id_]
                managed.kept_s = None
                by = managed.loaded_by if managed.load_waiters else "request"
                self.decisions.add(recording.loaded(datetime.now(UTC), id_, by))
                self._post(managed, states.LoadGranted())
            case Evict(id_, reason, for_id):
                self._post(self.managed_models[id_], states.UnloadRequested(reason, for_id))
            case Cordon(id_, for_id):
                grounds = self._grounds.get(for_id)
                self.decisions.add(recording.closed(datetime.now(UTC), id_, for_id, grounds))
                self._post(self.managed_models[id_], states.Cordoned(for_id))
            case Uncordon(id_):
                self.decisions.add(recording.opened(datetime.now(UTC), id_))
                self._post(self.managed_models[id_], states.Uncordoned())
            case Reject(id_, reason):
                refused = DoesNotFit(f"Model {id_!r} does not fit: {reason}.", remedy=_DOES_NOT_FIT_REMEDY)
                self._post(self.managed_models[id_], states.Refused(refused))
            case WakeAt(at_s):
                self._timer.schedule(at_s)
            case _ as unreachable:
                assert_never(unreachable)

    # --- reasons ----------------------------------------------------------------------------------------
    def note_restart(self, managed: ManagedModel) -> None:
        """A command restarts its processes."""
        self.decisions.add(recording.restarted(datetime.now(UTC), managed.spec.id))

    def _note_wait(self, managed: ManagedModel, grounds: Grounds | None) -> None:
        """Record a wait once for what it lacks; the amounts that are free change with each request."""
        before = managed.waits
        managed.waits = grounds if managed.state is ModelState.ABSENT else None
        if managed.waits is not None and (before is None or before.missing != managed.waits.missing):
            self.decisions.add(recording.waiting(datetime.now(UTC), managed.spec.id, managed.waits))

    def _note_reductions(self, managed: ManagedModel, generation: int) -> None:
        """Record what is smaller in the plan of a generation that serves."""
        for runner in managed.runners:
            if runner.instance.generation == generation and runner.plan is not None and runner.plan.reduced:
                self.decisions.add(recording.reduced(datetime.now(UTC), managed.spec.id, runner.plan.reduced))
                return


def _as_built(spec: ModelSpec, managed: ManagedModel) -> ModelSpec:
    """``spec`` with the build of the model, which no config decides."""
    return replace(spec, runtime=managed.spec.runtime, unproven=managed.spec.unproven)


async def _unjudged(new: InstanceRunner, old: InstanceRunner) -> LlamasupError | None:
    raise NotImplementedError(f"{new.model!r} has an unproven build, and nothing judges it")


def _stopping() -> Stopping:
    return Stopping("llamasup is stopping.", remedy="Start it again.")


_DOES_NOT_FIT_REMEDY = (
    "Reduce its size (ctx_size, parallel), pin fewer models, or raise a limit (memory, max_loaded, groups)."
)
