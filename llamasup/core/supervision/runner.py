"""Runs one instance: feeds events to ``state_machine.py`` and carries out the effects.

The runner owns the tasks and the timer of all generations of the instance, and gives access to the current
one. The child itself is in ``generation.py``, the requests to it are in ``probes.py``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.diagnosis import Diagnosis, Phase, may_be_of_a_request
from llamasup.core.models.redaction import redact_paths
from llamasup.core.queueing.endpoint import UNLIMITED, Endpoint, Lease, generation_ended
from llamasup.core.queueing.request_queue import RequestQueue
from llamasup.core.queueing.wait_estimate import LOAD_WEIGHT, smoothed
from llamasup.core.supervision import probes, states
from llamasup.core.supervision.events import Bus, ServerExited, StateChanged
from llamasup.core.supervision.generation import Generation, GenerationContext, begin
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.supervision.not_serving import STOPPING, is_last, unavailable
from llamasup.core.supervision.plan_protocol import ChildPlan, PlanMaker
from llamasup.core.supervision.state_machine import InvalidTransition, advance
from llamasup.core.supervision.states import LIVE, Effect, Event, History, Instance, Policy, State, violations
from llamasup.core.system.process.child import Exit
from llamasup.core.system.text import eta_text

if TYPE_CHECKING:
    from llamasup.core.llama_server.client import Prober

# Looking up a member of an Enum is a call of a Python function in Python 3.11.
_READY: Final = State.READY
_LOADING: Final = State.LOADING


def prober_of(plan: ChildPlan) -> Prober:
    """A client of the child that ``plan`` starts. Its import takes 40 ms, while the child loads its model."""
    from llamasup.core.llama_server.client import Prober

    return Prober(plan.address, plan.api_key)


class InstanceRunner:
    """Keeps one llama-server of a model running, with the plans of ``planner``.

    ``queue`` is the model's, may outlive the runner, and is notified of every change. ``log_path`` is the
    file for the child's output, which ``log_passed_on`` also gets. ``cwd`` is the child's folder (default:
    ``work_folder``). ``awaits_memory``: the owner starts it only once memory is free, so a plan that does not
    fit is not tried again later (#97). ``program``: its name in messages. ``on_crashed`` is called when a
    child that was ready has crashed. Call all methods in the event loop's thread.
    """

    def __init__(
        self,
        model: str,
        planner: PlanMaker,
        *,
        policy: Policy,
        bus: Bus,
        queue: RequestQueue,
        work_folder: Path,
        log_path: Path | None,
        cwd: Path | None = None,
        prober: Callable[[ChildPlan], Prober] = prober_of,
        log_passed_on: Callable[[list[bytes]], None] | None = None,
        on_measured: Callable[[], None] | None = None,
        on_crashed: Callable[[], None] | None = None,
        awaits_memory: bool = False,
        program: str = states.LLAMA_SERVER,
        roll: Callable[[], float] = random.random,
    ) -> None:
        self.model = model
        self.instance = Instance(program=program)
        self.policy = policy
        self.queue = queue
        self._bus = bus
        self._roll = roll
        self._context = GenerationContext(
            model=model,
            planner=planner,
            prober=prober,
            bus=bus,
            work_folder=work_folder,
            cwd=cwd,
            log_path=log_path,
            log_passed_on=log_passed_on,
            on_measured=on_measured,
            endpoint=self._endpoint_of,
            post=self.post,
            policy=lambda: self.policy,
            program=program,
            phase=self._phase,
            start_failure=lambda: None if self.instance.ready else self.instance.kill_reason,
        )
        self.on_idle: Callable[[Endpoint], None] | None = None
        """Called whenever the last running request has ended. Set it before the start."""
        self._on_crashed = on_crashed
        self._closed = False
        # Unbounded, but each generation adds a handful of events and one per second while it starts.
        self._events: asyncio.Queue[tuple[Event, asyncio.Future[Instance] | None]] = asyncio.Queue()
        self._generation: Generation | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._never_served = True
        self._awaits_memory = awaits_memory
        self._fitted = False  # a child served; the device may not have freed its memory yet
        self._held_s: float | None = None  # how long requests held a permit in earlier generations
        self._load_began_s = 0.0
        self.history = History()
        self.load_s: float | None = None
        """The smoothed time of a load; None before the first one."""
        self.last_exit: Exit | None = None
        """The exit of the last child that ended unexpectedly; None if llamasup ended it."""
        self._waiters: list[tuple[Callable[[Instance], bool], asyncio.Future[Instance]]] = []

    def __repr__(self) -> str:
        instance = self.instance
        return f"<{type(self).__name__} {self.model!r} {instance.state} generation {instance.generation}>"

    def rename(self, model: str) -> None:
        """Use this name in all later events; the log file stays the same."""
        self.model = model
        self._context = replace(self._context, model=model)
        if self._generation is not None:
            self._generation.rename(self._context)

    # --- interface ------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Queue an event: a fact about the child, or a request to the instance."""
        self._events.put_nowait((event, None))

    def submit(self, event: Event) -> asyncio.Future[Instance]:
        """``post`` an event. The future gets the instance after it, or the last one of an ended runner."""
        reply: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
        if self._closed:
            reply.set_result(self.instance)
        else:
            self._events.put_nowait((event, reply))
        return reply

    async def reached(self, *wanted: State) -> Instance:
        """Wait until the instance is in one of these states."""
        return await self.until(lambda instance: instance.state in wanted)

    async def until(self, holds: Callable[[Instance], bool]) -> Instance:
        """Wait until ``holds`` is true of the instance. It is checked after every event."""
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

    def lease(self, *, infers: bool = False) -> Lease | HttpError:
        generation, state = self._generation, self.instance.state
        # In LOADING the child listens; before that it could not answer.
        if (
            (state is _READY or (state is _LOADING and self._answers_while_loading))
            and generation is not None
            and generation.exit is None
            and not generation.endpoint.closed
        ):
            return generation.endpoint.lease_if_free(infers=infers)
        return self.unavailable()

    @property
    def _answers_while_loading(self) -> bool:
        """Whether llama-server itself answers requests during its first load."""
        return self._never_served and not self.policy.waits_for_first_load

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint of the generation that serves now. None from the exit of its child on, which is before
        the ``Exited`` event.
        """
        generation, is_ready = self._generation, self.instance.state is State.READY
        if not is_ready or generation is None or generation.exit is not None or generation.endpoint.closed:
            return None
        return generation.endpoint

    @property
    def is_ending(self) -> bool:
        """Whether no server will follow: none runs and no start is due, or the last one is ending."""
        return self._closed or is_last(self.instance)

    def unavailable(self) -> HttpError:
        """The reason why no request is served now, and whether a request may wait (S9)."""
        if self._closed:
            return STOPPING
        return unavailable(
            self.instance,
            load=self._load_progress(),
            start_in_s=self._next_start_in_s(),
            load_s=self.load_s,
            wait_timeout_s=self.policy.wait_timeout_s,
            answers_while_loading=self._answers_while_loading,
        )

    def _next_start_in_s(self) -> float:
        if self.instance.next_start_s is not None:
            return max(1.0, self.instance.next_start_s - asyncio.get_running_loop().time())
        return self.policy.restart.longest_delay_s

    @property
    def load(self) -> LoadProgress | None:
        """The progress of its start, or the time until the next one ends; None if it does not start."""
        match self.instance.state:
            case State.STARTING | State.LOADING | State.WARMING:
                return self._load_progress()
            case State.BACKOFF:
                start_in_s = self._next_start_in_s()
                eta_s = None if self.load_s is None else round(start_in_s + self.load_s, 1)
                reason = f"{self.instance.program} ended, and starts again in {eta_text(start_in_s)}"
                return LoadProgress(None, eta_s, self._load_elapsed_s, reason)
            case _:
                return None

    @property
    def _load_elapsed_s(self) -> float:
        return asyncio.get_running_loop().time() - self._load_began_s

    def _load_progress(self) -> LoadProgress:
        """The progress of the current start."""
        generation = self._generation  # None until the child is spawned
        if generation is None:
            return LoadProgress(None, None, self._load_elapsed_s)
        return replace(generation.load.progress, elapsed_s=self._load_elapsed_s)

    def set_policy(self, policy: Policy) -> None:
        """Apply a new policy, also to the current child."""
        self.policy = policy
        if self._generation is not None:
            self._generation.endpoint.max_concurrent = _max_concurrent(policy, self._generation.plan)

    @property
    def log_path(self) -> Path | None:
        return self._context.log_path

    @property
    def log_tail(self) -> Sequence[str]:
        """The last lines of the current generation's log."""
        return self._generation.pump.tail() if self._generation else ()

    @property
    def pid(self) -> int | None:
        generation = self._generation
        return generation.child.pid if generation and self.instance.alive else None

    @property
    def plan(self) -> ChildPlan | None:
        return self._generation.plan if self._generation else None

    def prober(self) -> Prober | None:
        """A client of the current child."""
        return self._generation.prober() if self._generation else None

    @property
    def answered(self) -> int:
        """The number of responses of the current generation."""
        return self._generation.endpoint.answered if self._generation else 0

    @property
    def in_flight(self) -> int:
        return self._generation.endpoint.in_flight if self._generation else 0

    @property
    def busy(self) -> int:
        """The number of permits in use."""
        return self._generation.endpoint.taken if self._generation else 0

    # --- the task ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Handle events until cancelled. No child is left behind at the end."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    event, reply = await self._events.get()
                    self._step(event)
                    if reply is not None and not reply.done():
                        reply.set_result(self.instance)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._closed = True
            while not self._events.empty():
                _, reply = self._events.get_nowait()
                if reply is not None and not reply.done():
                    reply.set_result(self.instance)
            self.queue.changed()
            if self._generation is not None and self.instance.state in LIVE:
                await self._generation.kill()

    def _step(self, event: Event) -> None:
        before = self.instance
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        try:
            self.instance, effects = advance(
                before,
                event,
                self.policy,
                now_s=now_s,
                roll=self._roll(),
                child_exited=self._generation is not None and self._generation.exit is not None,
            )
        except InvalidTransition as error:
            error.add_note(f"The last events of {self.model!r}:\n{self.history}")
            raise
        self.history.add(datetime.now(UTC), event, self.instance.state, self.instance.generation)
        if loop.get_debug() and (broken := list(violations(self.instance))):
            raise AssertionError(f"{self!r}: {'; '.join(broken)}\n{self.history}")
        self.queue.changed()  # before an endpoint closes: the requests that this ends may queue again
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
                self.load_s = smoothed(self.load_s, now_s - self._load_began_s, LOAD_WEIGHT)
                self._current.load.end()
                self._current.endpoint.begin_serving()
                self._current.start(probes.record_load)
                self._current.start(probes.query_context_window)
            self._bus.publish(StateChanged(self.model, after.state, after.generation))
        has_crashed = after.crashes[-1:] > before.crashes[-1:]
        if has_crashed and before.ready and self._on_crashed is not None:
            self._on_crashed()
        for holds, waiter in self._waiters:
            if not waiter.done() and holds(after):
                waiter.set_result(after)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case states.Spawn(generation):
                self._begin(generation)
            case states.Probe():
                self._current.start(probes.probe)
                self._current.start(probes.watch_progress)
            case states.WarmUp():
                self._current.start(probes.warm_up)
            case states.RestoreSlots():
                self._current.start_slot_transfer(probes.restore_slots)
            case states.SaveSlots():
                self._current.start_slot_transfer(probes.save_slots)
            case states.Watch():
                self._current.start(probes.check_liveness)
            case states.AwaitIdle(generation):
                self._current.endpoint.once_idle(lambda: self.post(states.Drained(generation)))
            case states.CloseEndpoint(_, reason, diagnosis):
                if self._generation is not None:
                    self._generation.kill_reason = diagnosis
                    crashed = diagnosis is not None and may_be_of_a_request(diagnosis)
                    self._generation.close(_ended(reason, diagnosis), crashed=crashed)
            case states.Terminate():
                if self._generation is not None:
                    self._generation.terminate()
            case states.Kill():
                if self._generation is not None:
                    self._generation.child.kill_group()
            case states.WakeAt(timer_id, at_s):
                if self._timer is not None:
                    self._timer.cancel()
                loop = asyncio.get_running_loop()
                self._timer = loop.call_at(at_s, self.post, states.TimerFired(timer_id))
            case states.Report(generation, diagnosis, restart_in_s, by_us):
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
            self._context,
            tasks,
            is_wanted=lambda: self.instance.state is State.STARTING,
            first=not self._fitted,
        )
        if isinstance(begun, Diagnosis):
            self.post(states.SpawnFailed(number, begun))
        else:
            begun.rename(self._context)  # in case the model was renamed meanwhile
            self._generation = begun

    def _endpoint_of(self, number: int, plan: ChildPlan) -> Endpoint:
        return Endpoint(
            self.model,
            number,
            plan.address,
            plan.api_key,
            max_concurrent=_max_concurrent(self.policy, plan),
            held_s=self._held_s,
            share=plan.shared_ctx_size // (plan.parallel or 1),
            program=self.instance.program,
            on_permit_free=self.queue.permit_freed,
            on_idle=self.on_idle,
            on_explained=lambda: self.post(states.CrashExplained(number)),
        )

    def _phase(self) -> Phase:
        match self.instance.state:
            case State.READY:
                return "ready"
            case State.DRAINING | State.STOPPING:
                return "stopping"
            case _:
                return "starting"


def _ended(reason: str, diagnosis: Diagnosis | None) -> HttpError:
    """The error for the clients of running requests."""
    if diagnosis is None:
        return generation_ended(reason)
    message, remedy = redact_paths(diagnosis.message, ()), redact_paths(diagnosis.remedy, ())
    return generation_ended(message or reason, diagnosis.cause, remedy)


def _max_concurrent(policy: Policy, plan: ChildPlan) -> int:
    permits = policy.permits(plan.parallel)
    return UNLIMITED if permits is None else permits
