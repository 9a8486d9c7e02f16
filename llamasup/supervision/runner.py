"""Runs one instance: feeds events to the table in ``core.lifecycle`` and carries out what it says.

The runner owns the tasks and the timer of all its generations, and answers for the one that there is now. It
decides nothing itself; what a child is and leaves is in ``generation``, what is asked of it in ``probing``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from llamasup.llama_server.client import Prober
from llamasup.llama_server.diagnosis import Diagnosis, Phase
from llamasup.models.redaction import redact_paths
from llamasup.queueing.endpoint import UNLIMITED, Endpoint, Lease, Unavailable
from llamasup.queueing.wait_estimate import LOAD_WEIGHT, retry_after_s, smoothed, until_loaded_s
from llamasup.queueing.wait_queue import RequestQueue
from llamasup.supervision import probes
from llamasup.supervision import states as core
from llamasup.supervision.events import Bus, ServerExited, StateChanged
from llamasup.supervision.generation import Generation, GenerationContext, begin
from llamasup.supervision.plan_protocol import AnyPlanMaker, ChildPlan
from llamasup.supervision.states import LIVE, Effect, Event, Instance, Policy, State
from llamasup.supervision.table import advance
from llamasup.system.process.exit import Exit

__all__ = ["NOT_RUNNING", "STOPPING", "InstanceRunner", "prober_of"]

STOPPING = Unavailable(503, "The server is stopping", cause="stopping")
NOT_RUNNING = Unavailable(503, "The model is not loaded", cause="stopped", remedy="load it: llamasup load")


def prober_of(plan: ChildPlan) -> Prober:
    """For asking a child that was started so."""
    return Prober(plan.address, plan.api_key)


class InstanceRunner:
    """Keeps one llama-server of a model, started as ``planner`` says.

    ``queue`` is its model's, may outlive it, and is told of every change. ``log_path`` is where the child's
    output goes, ``cwd`` the folder that it runs in (by default its work folder), ``log_passed_on`` who else
    hears it (``LogPump``). ``awaits_memory``: its owner has it start where memory is seen to be free; what
    does not fit then is no matter of waiting for its own (#97). All methods are for the event loop's thread.
    """

    def __init__(
        self,
        model: str,
        planner: AnyPlanMaker,
        *,
        aliases: tuple[str, ...] = (),
        policy: Policy,
        bus: Bus,
        queue: RequestQueue,
        work_folder: Path,
        log_path: Path | None,
        cwd: Path | None = None,
        prober: Callable[[ChildPlan], Prober] = prober_of,
        log_passed_on: Callable[[list[bytes]], None] | None = None,
        when_measured: Callable[[], None] | None = None,
        awaits_memory: bool = False,
        roll: Callable[[], float] = random.random,
    ) -> None:
        self.model = model
        self.aliases = aliases
        self.instance = Instance()
        self.policy = policy
        self.queue = queue
        self._bus = bus
        self._roll = roll
        self._around = GenerationContext(
            model=model,
            planner=planner,
            prober=prober,
            bus=bus,
            work_folder=work_folder,
            cwd=cwd,
            log_path=log_path,
            log_passed_on=log_passed_on,
            when_measured=when_measured,
            endpoint=self._endpoint_of,
            post=self.post,
            policy=lambda: self.policy,
            phase=self._phase,
        )
        self.on_idle: Callable[[Endpoint], None] | None = None
        """Hears each time that the last request in flight has ended; to be set before it is started."""
        self._is_over = False
        # Unbounded, but each generation adds a handful of events and one per second while it starts.
        self._events: asyncio.Queue[tuple[Event, asyncio.Future[Instance] | None]] = asyncio.Queue()
        self._generation: Generation | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._never_served = True
        self._awaits_memory = awaits_memory
        self._fitted = False  # it served, and what it had then may still be on its way back
        self._held_s: float | None = None  # how long requests held a place in earlier generations
        self._load_began_s = 0.0
        self._load_s: float | None = None  # what a load takes; None: there was none yet
        self.last_exit: Exit | None = None
        """How the last child that ended unasked went; None if we ended it ourselves."""
        self._waiters: list[tuple[Callable[[Instance], bool], asyncio.Future[Instance]]] = []

    def rename(self, model: str) -> None:
        """All that is told of it from now on is told of this name; its log stays where it is."""
        self.model = model
        self._around = replace(self._around, model=model)
        if self._generation is not None:
            self._generation.rename(self._around)

    # --- what others ask ------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Tell the instance what happened, or what is wanted of it."""
        self._events.put_nowait((event, None))

    def take(self, event: Event) -> asyncio.Future[Instance]:
        """``post``, and done when it has heard of it: what it is then, or was at its end."""
        heard: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
        if self._is_over:
            heard.set_result(self.instance)
        else:
            self._events.put_nowait((event, heard))
        return heard

    async def reached(self, *states: State) -> Instance:
        """Wait until the instance is in one of ``states``."""
        return await self.until(lambda instance: instance.state in states)

    async def until(self, holds: Callable[[Instance], bool]) -> Instance:
        """Wait for an instance of which ``holds`` is true. It is asked again after every event."""
        if holds(self.instance):
            return self.instance
        waiter: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
        entry = (holds, waiter)
        self._waiters.append(entry)
        try:
            return await waiter
        finally:
            with suppress(ValueError):
                self._waiters.remove(entry)

    def lease(self, *, infers: bool = False) -> Lease | Unavailable:
        state = self.instance.state
        # LOADING is what it says itself, so it listens; before that nobody could answer in its place.
        if state is State.READY or (state is State.LOADING and self._is_bare):
            endpoint = self._open
            if endpoint is not None:
                return endpoint.lease_if_free(infers=infers)
        return self.unavailable()

    @property
    def _open(self) -> Endpoint | None:
        """Of the current child, until its end is seen: what it left is cleared away before that is told."""
        generation = self._generation
        if generation is None or generation.exit is not None or generation.endpoint.closed:
            return None
        return generation.endpoint

    @property
    def _is_bare(self) -> bool:
        """Whether clients are to see the first load as they would without us."""
        return self._never_served and not self.policy.waits_for_first_load

    @property
    def endpoint(self) -> Endpoint | None:
        """Of the generation that serves now."""
        return self._open if self.instance.state is State.READY else None

    @property
    def leaves(self) -> bool:
        """Whether nothing is to be hoped from it: it has no server and starts none, or its last one ends."""
        instance = self.instance
        ending = instance.state in {State.DRAINING, State.STOPPING}
        is_last = ending and instance.kill_reason is None and not instance.restart_pending
        return self._is_over or is_last or instance.is_settled

    def unavailable(self) -> Unavailable:
        """Why no request is served now, and whether one may wait for it (S9)."""
        instance = self.instance
        match instance.state:
            case _ if self._is_over:
                return STOPPING
            case State.STARTING | State.LOADING if self._is_bare:
                return Unavailable(503, "Loading model", cause="loading", retry_after_s=self._ready_in_s())
            case State.STARTING | State.LOADING | State.WARMING | State.READY:
                return Unavailable(
                    503, "Loading model", cause="loading", retry_after_s=self._ready_in_s(), queueable=True
                )
            case State.DRAINING | State.STOPPING if self.leaves:
                return STOPPING
            case State.DRAINING | State.STOPPING:
                return Unavailable(
                    503,
                    "The server is restarting",
                    cause="restarting",
                    retry_after_s=retry_after_s(self._load_s or 0.0),
                    queueable=True,
                )
            case State.STOPPED:
                return NOT_RUNNING
            case State.BACKOFF | State.FAILED:
                last, start_in_s = instance.last, self._next_start_in_s()
                return Unavailable(
                    503,
                    (last and redact_paths(last.message, ())) or "llama-server ended",
                    cause=last.cause if last else "",
                    remedy=redact_paths(last.remedy, ()) if last else "",
                    retry_after_s=retry_after_s(start_in_s + (self._load_s or 0.0)),
                    # Not in vain: a start that comes later than the request may wait is none for it.
                    queueable=instance.state is State.BACKOFF
                    and start_in_s <= self.policy.wait_timeout_s
                    and not self._is_bare,
                )
            case _ as unreachable:
                assert_never(unreachable)

    def _next_start_in_s(self) -> float:
        if self.instance.next_start_s is not None:
            return max(1.0, self.instance.next_start_s - asyncio.get_running_loop().time())
        return self.policy.restart.longest_delay_s

    def _ready_in_s(self) -> float:
        """Of a start that has begun."""
        elapsed_s = asyncio.get_running_loop().time() - self._load_began_s
        return retry_after_s(until_loaded_s(self._load_s, elapsed_s))

    def allow(self, policy: Policy) -> None:
        """What is allowed from now on, the current child included."""
        self.policy = policy
        if self._generation is not None:
            self._generation.endpoint.max_concurrent = _max_concurrent(policy, self._generation.plan)

    @property
    def load_s(self) -> float | None:
        """What a load takes, smoothed; None: there was none yet."""
        return self._load_s

    @property
    def log_path(self) -> Path | None:
        """Where the output of its children goes."""
        return self._around.log_path

    @property
    def pid(self) -> int | None:
        generation = self._generation
        return generation.child.pid if generation and self.instance.alive else None

    @property
    def plan(self) -> ChildPlan | None:
        return self._generation.plan if self._generation else None

    def prober(self) -> Prober | None:
        """For asking the current child itself."""
        return self._generation.prober() if self._generation else None

    @property
    def answered(self) -> int:
        """Responses of the current generation."""
        return self._generation.endpoint.answered if self._generation else 0

    @property
    def in_flight(self) -> int:
        return self._generation.endpoint.in_flight if self._generation else 0

    @property
    def busy(self) -> int:
        """Places that are taken."""
        return self._generation.endpoint.busy if self._generation else 0

    # --- the task ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve events until cancelled. However it ends, no child is left."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    event, heard = await self._events.get()
                    self._step(event)
                    if heard is not None and not heard.done():
                        heard.set_result(self.instance)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._is_over = True
            while not self._events.empty():
                _, heard = self._events.get_nowait()
                if heard is not None and not heard.done():
                    heard.set_result(self.instance)
            self.queue.changed()
            if self._generation is not None and self.instance.state in LIVE:
                await self._generation.kill()

    def _step(self, event: Event) -> None:
        before = self.instance
        if isinstance(event, core.Healthy | core.WarmupSucceeded) and self._has_ended(event.generation):
            return  # it said so before it died; its end is on the way
        now_s = asyncio.get_running_loop().time()
        self.instance, effects = advance(before, event, self.policy, now_s=now_s, roll=self._roll())
        self.queue.changed()  # before an endpoint closes: what that breaks off may have to wait as well
        for effect in effects:
            self._perform(effect)
        after = self.instance
        if (after.state, after.generation) != (before.state, before.generation):
            if after.state is State.STARTING:
                self._load_began_s = now_s
                if self._awaits_memory and before.is_settled:
                    self._fitted = False
            elif after.state is State.READY:
                self._never_served, self._fitted = False, True
                self._load_s = smoothed(self._load_s, now_s - self._load_began_s, LOAD_WEIGHT)
                self._current.endpoint.begin_serving()
                self._current.start(probes.learn)
                self._current.start(probes.ask_window)
            self._bus.publish(StateChanged(self.model, after.state, after.generation))
        for holds, waiter in self._waiters:
            if not waiter.done() and holds(after):
                waiter.set_result(after)

    def _has_ended(self, number: int) -> bool:
        generation = self._generation
        return generation is not None and generation.number == number and generation.exit is not None

    def _perform(self, effect: Effect) -> None:
        match effect:
            case core.Spawn(generation):
                self._begin(generation)
            case core.Probe():
                self._current.start(probes.probe)
                self._current.start(probes.watch_progress)
            case core.WarmUp():
                self._current.start(probes.warm_up)
            case core.RestoreSlots():
                self._current.move_slots(probes.restore_slots)
            case core.SaveSlots():
                self._current.move_slots(probes.save_slots)
            case core.Watch():
                self._current.start(probes.check_liveness)
            case core.AwaitIdle(generation):
                self._current.endpoint.once_idle(lambda: self.post(core.Drained(generation)))
            case core.CloseEndpoint(_, reason):
                if self._generation is not None:
                    self._generation.close(reason)
            case core.Terminate():
                if self._generation is not None:
                    self._generation.child.terminate()
            case core.Kill():
                if self._generation is not None:
                    self._generation.child.kill_group()
            case core.WakeAt(timer_id, at_s):
                if self._timer is not None:
                    self._timer.cancel()
                loop = asyncio.get_running_loop()
                self._timer = loop.call_at(at_s, self.post, core.TimerFired(timer_id))
            case core.Report(generation, diagnosis, restart_in_s, by_us):
                self.last_exit = self._generation.exit if self._generation and not by_us else None
                self._bus.publish(
                    ServerExited(self.model, generation, self.last_exit, diagnosis, restart_in_s)
                )
            case _ as unreachable:
                assert_never(unreachable)

    # --- generations --------------------------------------------------------------------------------------

    @property
    def _current(self) -> Generation:
        assert self._generation is not None
        return self._generation

    def _begin(self, number: int) -> None:
        if self._generation is not None:
            self._held_s = self._generation.endpoint.held_s
        self._generation = None
        assert self._tasks is not None
        self._tasks.create_task(self._spawn(number, self._tasks), name=f"{self.model}/{number}/spawn")

    async def _spawn(self, number: int, tasks: asyncio.TaskGroup) -> None:
        begun = await begin(
            number,
            self._around,
            tasks,
            wanted=lambda: self.instance.state is State.STARTING,
            first=not self._fitted,
        )
        if isinstance(begun, Diagnosis):
            self.post(core.SpawnFailed(number, begun))
        else:
            begun.rename(self._around)  # which may have happened meanwhile
            self._generation = begun

    def _endpoint_of(self, number: int, plan: ChildPlan) -> Endpoint:
        return Endpoint(
            self.model,
            number,
            plan.address,
            plan.api_key,
            max_concurrent=_max_concurrent(self.policy, plan),
            held_s=self._held_s,
            on_permit_free=self.queue.permit_freed,
            on_idle=self.on_idle,
        )

    def _phase(self) -> Phase:
        match self.instance.state:
            case State.READY:
                return "ready"
            case State.DRAINING | State.STOPPING:
                return "stopping"
            case _:
                return "starting"


def _max_concurrent(policy: Policy, plan: ChildPlan) -> int:
    permits = policy.permits(plan.parallel)
    return UNLIMITED if permits is None else permits
