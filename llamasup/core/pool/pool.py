"""Loads and unloads many models in the available memory, as ``eviction_policy.decide`` orders.

The pool owns all models, and the only timer. It takes the steps of the models (``model_steps.py``), one after
the other, and carries out their effects (``effects.py``). After each step it passes a snapshot of all models
to the policy, whose actions are steps again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import unknown_model
from llamasup.core.models.spec import KeepResult, ModelSpec
from llamasup.core.pool import effects
from llamasup.core.pool import model_steps as steps
from llamasup.core.pool.driver import DriverContext, ProcessDriver, Proof, carry_out, is_settled, unjudged
from llamasup.core.pool.effects import Effect, effects_of
from llamasup.core.pool.estimate import Fetch, ModelSizer, SizedModel, Sizer, share_of
from llamasup.core.pool.eviction_policy import (
    Action,
    Grounds,
    Load,
    ModelSnapshot,
    Phase,
    Snapshot,
    WakeAt,
    decide_with_grounds,
)
from llamasup.core.pool.model import ManagedModel, policy_for
from llamasup.core.pool.model_states import Model, ModelState, free_for
from llamasup.core.pool.options import PoolOptions
from llamasup.core.pool.processes import Crashes, Runners
from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.pool.rollout_steps import disprove, memory_needed, swap, turn_of
from llamasup.core.pool.why import recording
from llamasup.core.pool.why.recording import Decision, Decisions, LoadedBy
from llamasup.core.supervision.events import Bus, PublishedEvent, StateChanged
from llamasup.core.supervision.not_serving import STOPPING
from llamasup.core.supervision.states import State
from llamasup.core.system.event_loops import DeadlineTimer
from llamasup.errors import Conflict, ModelUnknown, Stopping

if TYPE_CHECKING:
    from llamasup.core.pool.what_if import Consequences


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
        self.proof: Proof = unjudged
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
        # An effect may cause a step: steps queue, so that the effects of one come before those of the next.
        self._steps: deque[tuple[ManagedModel, steps.Step]] = deque()
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
            self._post(managed, partial(steps.stop, answer=STOPPING, error=_stopping(), now=now))

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
                self._post(managed, steps.change_budget)
            if options.policy != before.policy:
                managed.served.apply_policy(managed.policy(options.policy, managed.sized))
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
            policy=lambda sized: managed.policy(self.options.policy, sized),
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
        self._post(managed, partial(steps.remove, answer=error, error=unknown))

    def _transfer(self, managed: ManagedModel, successor: ManagedModel) -> None:
        is_wanted = managed.wanted
        load_waiters, managed.load_waiters = managed.load_waiters, []
        for waiter in load_waiters:
            self._add_load_waiter(successor, waiter, managed.loaded_by)
            waiter.add_done_callback(partial(self._give_up, successor))  # its caller knows the old model only
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
        self._post(managed, partial(steps.update_spec, spec=replace(managed.spec, id=id_)))
        self.managed_models[id_] = managed
        managed.driver.rename(id_)
        self.decisions.rename(old, id_)

    def update_spec(self, managed: ManagedModel, spec: ModelSpec) -> None:
        """Change the spec of a model without a change to its processes."""
        self._change_spec(managed, steps.update_spec, managed.as_built(spec))

    def roll_out(self, managed: ManagedModel, spec: ModelSpec) -> None:
        """Serve the model from its new file or with its new settings, without a failed request (S16)."""
        rolled_out = managed.model.rollout
        self._change_spec(managed, steps.change_spec, managed.as_built(spec))
        if managed.model.rollout is not None and managed.model.rollout is not rolled_out:
            self.decisions.add(recording.updated(datetime.now(UTC), managed.spec.id))

    def use_runtime(self, managed: ManagedModel, runtime: str, *, unproven: bool = False) -> None:
        """Serve the model with this build, like a change of its settings. ``unproven``: after its proof."""
        spec = replace(managed.spec, runtime=runtime, unproven=unproven)
        self._change_spec(managed, steps.change_spec, spec)

    def set_runtime(self, runtime: str) -> None:
        """Serve models that are added later with this build."""
        self.options = replace(self.options, runtime=runtime)

    def _change_spec(
        self, managed: ManagedModel, step: Callable[[Model, ModelSpec], Model], spec: ModelSpec
    ) -> None:
        self._post(managed, lambda model: step(model, spec))
        sized = managed.sized
        policy = policy_for(spec, self.options.policy, None if sized is None else sized.spec)
        managed.served.apply_policy(policy)

    async def load(self, managed: ManagedModel, by: LoadedBy = "command") -> None:
        """Wait until the model serves. Raises the error of the load."""
        if managed.serves and not self.stopping and not managed.removed:
            return
        waiter = self.begin_load(managed, by)
        try:
            await waiter
        finally:
            self._give_up(managed, waiter)

    def _give_up(self, managed: ManagedModel, waiter: asyncio.Future[None]) -> None:
        if waiter in managed.load_waiters:
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
        managed.add_load_waiter(waiter, by, monotonic())
        self._post(managed, steps.retry)
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
        self._post(managed, steps.unload)
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
        before_s = managed.kept_s
        result = managed.keep(ttl_s, own)
        if managed.kept_s != before_s:
            self.reconcile_soon()
        return result

    def remaining_for(self, managed: ManagedModel | None) -> Mapping[str, int]:
        """The budget less the other models and the old replicas of this one; None: a model that is not
        served. Planner threads also call it.
        """
        own = None if managed is None else managed.model
        return free_for(own, self._others(managed), self.options.budget)

    def _others(self, managed: ManagedModel | None) -> list[Model]:
        return [other.model for other in tuple(self.active) if other is not managed]

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
            managed.record_demand(managed.served.unavailable_reason, monotonic())
        self._want(managed)

    def _on_unserved(self, managed: ManagedModel, why: HttpError | None) -> None:
        """A request left the queue unserved. A client that saw a download may come again."""
        if why is not None and why.cause == "downloading":
            managed.record_demand(why, monotonic())
        self.reconcile_soon()

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
        self._note(recording.of_event(event, datetime.now(UTC), self._grounds))
        if not isinstance(event, StateChanged) or (managed := self.managed_models.get(event.model)) is None:
            return
        # The event has the model's name only: it may come from a removed model of this name.
        is_ready = any(runner.instance.state is State.READY for runner in managed.runners)
        if event.state is State.READY and is_ready:
            managed.resident_since_s = monotonic()
            if reductions := managed.reductions(event.generation):
                self._note(recording.reduced(datetime.now(UTC), managed.spec.id, reductions))
        managed.driver.report()
        self.reconcile_soon()

    def _post(self, managed: ManagedModel, step: steps.Step) -> None:
        """Take this step after those that are under way."""
        self._steps.append((managed, step))
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            while self._steps:
                self._advance(*self._steps.popleft())
        finally:
            self._is_dispatching = False

    def _advance(self, managed: ManagedModel, step: steps.Step) -> None:
        before = managed.model
        after = managed.model = step(before)
        if after is not before:
            self.reconcile_soon()
        if after.error is not None and after.error is not before.error:
            managed.note_failure(after.error, monotonic())
            self._timer.schedule(managed.retry_at_s)
        if after.rollout is not None and before.rollout is None:
            managed.rollout = self._loop.create_future()
        managed.tell_queue()
        for effect in effects_of(before, after):
            if not carry_out(effect, managed.driver):
                self._carry_out(managed, effect)
        if managed.phase is not Phase.UNLOADING:
            managed.resolve_unload_waiters()

    def _carry_out(self, managed: ManagedModel, effect: Effect) -> None:
        match effect:
            case effects.SizedUp() if self.on_sized is not None:
                self.on_sized(managed)
            case effects.EndLoads(error):
                managed.resolve_load_waiters(error)
            case effects.EndRollout(error):
                managed.end_rollout(error)
            case effects.Reload():
                self._reload(managed)
            case effects.Announce(event):
                self.bus.publish(event)
            case effects.Forget():
                self._forget(managed)

    def _reload(self, managed: ManagedModel) -> None:
        """The rollout ends with this load."""
        rollout = managed.rollout
        waiter: asyncio.Future[None] = self._loop.create_future()
        waiter.add_done_callback(lambda load: managed.end_reload(rollout, load, stops=self.stopping))
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
        for managed in [each for each in self.active if each.rolling_out]:
            fits = turn_of(managed.model, self._others(managed), self.options.budget)
            if fits is not None:
                self._post(managed, partial(swap, fits=fits))
        models = {managed.key: managed.snapshot() for managed in self.active if managed.sized is not None}
        decided = decide_with_grounds(Snapshot(now_s, models, self.options.budget, self.options.residency))
        self._grounds = decided.grounds
        for managed in tuple(self.active):
            current, needed = managed.model.current, memory_needed(managed.model, decided.grounds)
            if current is not None and needed is not None:
                self._post(managed, partial(disprove, id_=current.id, error=needed))
        for action in decided.actions:
            self._apply(action)
        for managed in self.active:
            if (waits := managed.note_wait(decided.grounds.get(managed.key))) is not None:
                self._note(recording.waiting(datetime.now(UTC), managed.spec.id, waits))

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
            self._post(managed, steps.retry)
        self._post(managed, steps.want if managed.wanted else steps.unwant)
        if managed.phase is Phase.ABSENT and not (managed.wanted or managed.sizing):
            del self.active[managed]

    def _apply(self, action: Action) -> None:
        if isinstance(action, WakeAt):
            self._timer.schedule(action.at_s)
            return
        managed = self.managed_models[action.id]
        by = managed.loaded_by if managed.load_waiters else "request"
        self._note(recording.of_action(action, datetime.now(UTC), by, self._grounds))
        if isinstance(action, Load):
            managed.kept_s = None
        self._post(managed, steps.step_of(action))

    # --- reasons ----------------------------------------------------------------------------------------
    def _note(self, decision: Decision | None) -> None:
        if decision is not None:
            self.decisions.add(decision)

    def note_restart(self, managed: ManagedModel) -> None:
        """A command restarts its processes."""
        self.decisions.add(recording.restarted(datetime.now(UTC), managed.spec.id))


def _stopping() -> Stopping:
    return Stopping("llamasup is stopping.", remedy="Start it again.")
