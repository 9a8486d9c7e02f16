"""Runs one instance: feeds events to the table in ``core.lifecycle`` and carries out what it says.

The runner owns every task, timer, pipe and socket of its children. It decides nothing itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from llamasup.core import instance as core
from llamasup.core.diagnosis import Diagnosis, Exit, Phase, diagnose
from llamasup.core.errors import LlamasupError
from llamasup.core.instance import LIVE, Effect, Event, Instance, Policy, State
from llamasup.core.lifecycle import advance
from llamasup.core.start_log import TELLING, Doom, Ready, SizeTold, Warned, read_line
from llamasup.core.wait_estimate import LOAD_WEIGHT, retry_after_s, smoothed, until_loaded_s
from llamasup.core.warmup import explain_failure, not_answered, warm_up_request, what_is_missing
from llamasup.effects.httpx_alone import httpx
from llamasup.effects.logs import LogPump
from llamasup.effects.oom_kills import oom_kills
from llamasup.effects.probe import Prober
from llamasup.effects.process import Child, spawn
from llamasup.runtime.endpoint import Endpoint, Lease, Unavailable
from llamasup.runtime.events import Bus, ServerExited, ServerWarned, StateChanged
from llamasup.runtime.generation import (
    NOT_STARTED,
    PUMP_TIMEOUT_S,
    Generation,
    as_diagnosis,
    clear_away,
    places_of,
    remove_socket,
    spawn_error,
)
from llamasup.runtime.plans import AnyPlanMaker, ChildPlan
from llamasup.runtime.waiting import WaitingRoom
from llamasup.runtime.watch import watch

__all__ = ["NOT_RUNNING", "STOPPING", "InstanceRunner", "prober_of"]

STOPPING = Unavailable(503, "The server is stopping", cause="stopping")
NOT_RUNNING = Unavailable(503, "The model is not loaded", cause="stopped", remedy="load it: llamasup load")

PROGRESS_INTERVAL_S = 1.0
REAP_TIMEOUT_S = 5.0
_MOST_SIZE_LINES = 400


def prober_of(plan: ChildPlan) -> Prober:
    """For asking a child that was started so."""
    return Prober(plan.address, plan.api_key)


class InstanceRunner:
    """Keeps one llama-server of a model, started as ``planner`` says.

    ``room`` is its model's, may outlive it, and is told of every change. ``log_path`` is where the child's
    output goes, ``cwd`` the folder that it runs in (by default its work folder), ``log_passed_on`` who else
    hears it (``LogPump``). All methods are for the event loop's thread.
    """

    def __init__(
        self,
        model: str,
        planner: AnyPlanMaker,
        *,
        aliases: tuple[str, ...] = (),
        policy: Policy,
        bus: Bus,
        room: WaitingRoom,
        work_folder: Path,
        log_path: Path | None,
        cwd: Path | None = None,
        prober: Callable[[ChildPlan], Prober] = prober_of,
        log_passed_on: Callable[[list[bytes]], None] | None = None,
        when_measured: Callable[[], None] | None = None,
        roll: Callable[[], float] = random.random,
    ) -> None:
        self.model = model
        self.aliases = aliases
        self.instance = Instance()
        self._planner = planner
        self.policy = policy
        self._bus = bus
        self._work_folder = work_folder
        self._log_path = log_path
        self._cwd = cwd
        self._prober = prober
        self._log_passed_on = log_passed_on
        self._when_measured = when_measured
        self._roll = roll
        self.room = room
        self.when_vacant: Callable[[Endpoint], None] | None = None
        """Hears each time that the last request in flight has ended; to be set before it is started."""
        self._is_over = False
        # Unbounded, but each generation adds a handful of events and one per second while it starts.
        self._events: asyncio.Queue[tuple[Event, asyncio.Future[Instance] | None]] = asyncio.Queue()
        self._generation: Generation | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._never_served = True
        self._held_s: float | None = None  # how long requests held a place in earlier generations
        self._load_began_s = 0.0
        self._load_s: float | None = None  # what a load takes; None: there was none yet
        self.last_exit: Exit | None = None
        """How the last child that ended unasked went; None if we ended it ourselves."""
        self._waiters: list[tuple[Callable[[Instance], bool], asyncio.Future[Instance]]] = []

    # --- what others ask ------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Tell the instance what happened, or what is wanted of it."""
        self._events.put_nowait((event, None))

    async def take(self, event: Event) -> Instance:
        """``post``, and wait until it has heard of it: what it is then, or was at its end."""
        if self._is_over:
            return self.instance
        heard: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
        self._events.put_nowait((event, heard))
        return await heard

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
        is_last = ending and instance.verdict is None and not instance.wanted
        return self._is_over or is_last or instance.at_rest

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
                    503, "Loading model", cause="loading", retry_after_s=self._ready_in_s(), may_wait=True
                )
            case State.DRAINING | State.STOPPING if self.leaves:
                return STOPPING
            case State.DRAINING | State.STOPPING:
                return Unavailable(
                    503,
                    "The server is restarting",
                    cause="restarting",
                    retry_after_s=retry_after_s(self._load_s or 0.0),
                    may_wait=True,
                )
            case State.STOPPED:
                return NOT_RUNNING
            case State.BACKOFF | State.FAILED:
                last, start_in_s = instance.last, self._next_start_in_s()
                return Unavailable(
                    503,
                    last.message if last else "llama-server ended",
                    cause=last.cause if last else "",
                    remedy=last.remedy if last else "",
                    retry_after_s=retry_after_s(start_in_s + (self._load_s or 0.0)),
                    # Not in vain: a start that comes later than the request may wait is none for it.
                    may_wait=instance.state is State.BACKOFF
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
            self._generation.endpoint.places = places_of(policy, self._generation.plan)

    @property
    def load_s(self) -> float | None:
        """What a load takes, smoothed; None: there was none yet."""
        return self._load_s

    @property
    def pid(self) -> int | None:
        generation = self._generation
        return generation.child.pid if generation and self.instance.alive else None

    @property
    def plan(self) -> ChildPlan | None:
        return self._generation.plan if self._generation else None

    def prober(self) -> Prober | None:
        """For asking the current child itself."""
        return self._prober(self._generation.plan) if self._generation else None

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
            self.room.changed()
            if self._generation is not None and self.instance.state in LIVE:
                await self._put_down(self._generation)

    def _step(self, event: Event) -> None:
        before = self.instance
        if isinstance(event, core.Healthy | core.Warmed) and self._has_ended(event.generation):
            return  # it said so before it died; its end is on the way
        now_s = asyncio.get_running_loop().time()
        self.instance, effects = advance(before, event, self.policy, now_s=now_s, roll=self._roll())
        self.room.changed()  # before an endpoint closes: what that breaks off may have to wait as well
        for effect in effects:
            self._perform(effect)
        after = self.instance
        if (after.state, after.generation) != (before.state, before.generation):
            if after.state is State.STARTING:
                self._load_began_s = now_s
            elif after.state is State.READY:
                self._never_served = False
                self._load_s = smoothed(self._load_s, now_s - self._load_began_s, LOAD_WEIGHT)
                self._current.endpoint.begin_serving()
                self._start_task(self._learn)
                self._start_task(self._ask_window)
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
                self._spawn(generation)
            case core.Probe():
                self._start_task(self._probe)
                self._start_task(self._watch_progress)
            case core.WarmUp():
                self._start_task(self._warm_up)
            case core.RestoreSlots():
                self._current.slots = self._start_task(self._restore_slots)
            case core.SaveSlots():
                self._current.let_slots_be()
                self._current.slots = self._start_task(self._save_slots)
            case core.Watch():
                self._start_task(self._watch)
            case core.AwaitIdle(generation):
                self._current.endpoint.when_idle(lambda: self.post(core.Idle(generation)))
            case core.CloseEndpoint(_, reason):
                if self._generation is not None:
                    self._generation.endpoint.close(reason)
                    self._generation.let_slots_be()
            case core.Terminate():
                if self._generation is not None:
                    self._generation.child.terminate()
            case core.Kill():
                if self._generation is not None:
                    self._generation.child.kill_group()
            case core.WakeAt(ticket, at_s):
                if self._timer is not None:
                    self._timer.cancel()
                loop = asyncio.get_running_loop()
                self._timer = loop.call_at(at_s, self.post, core.Woke(ticket))
            case core.Report(generation, diagnosis, restart_in_s, by_us):
                self.last_exit = self._generation.exit if self._generation and not by_us else None
                self._bus.publish(
                    ServerExited(self.model, generation, self.last_exit, diagnosis, restart_in_s)
                )
            case _ as unreachable:
                assert_never(unreachable)

    # --- effects ----------------------------------------------------------------------------------------

    @property
    def _current(self) -> Generation:
        assert self._generation is not None
        return self._generation

    def _spawn(self, number: int) -> None:
        if self._generation is not None:
            self._held_s = self._generation.endpoint.held_s
        self._generation = None
        assert self._tasks is not None
        self._tasks.create_task(self._plan_and_spawn(number), name=f"{self.model}/{number}/spawn")

    async def _plan_and_spawn(self, number: int) -> None:
        """The plan in a thread, since devices may have to be asked; the spawn in this one (PDEATHSIG)."""
        try:
            plan = await asyncio.to_thread(self._planner.plan, number)
            if self.instance.state is not State.STARTING:  # stopped meanwhile
                self.post(core.SpawnFailed(number, NOT_STARTED))
                return
            # A cleaner of temporary folders may have taken it; without it no child can start again.
            self._work_folder.mkdir(mode=0o700, exist_ok=True)
            remove_socket(plan.address)
            kills = oom_kills()
            cwd = self._cwd or self._work_folder
            child = spawn(plan.argv, env=plan.env, cwd=cwd, run_folder=self._work_folder)
        except LlamasupError as error:
            self.post(core.SpawnFailed(number, as_diagnosis(error, first=self._never_served)))
            return
        except OSError as error:
            self.post(core.SpawnFailed(number, as_diagnosis(spawn_error(error), first=True)))
            return
        try:
            self._adopt(number, plan, child, kills)
        except BaseException:
            # Nobody would know of it.
            child.kill_group()
            child.poll()
            raise

    def _adopt(self, number: int, plan: ChildPlan, child: Child, kills: int) -> None:
        pump = LogPump(
            child.output_fd,
            name=f"{self.model}/{number}/log",
            path=self._log_path,
            passed_on=self._log_passed_on,
        )
        endpoint = Endpoint(
            self.model,
            number,
            plan.address,
            plan.api_key,
            places=places_of(self.policy, plan),
            held_s=self._held_s,
            when_free=self.room.place_free,
            when_vacant=self.when_vacant,
        )
        self._generation = generation = Generation(number, plan, child, pump, endpoint, kills)
        pump.watch(TELLING, lambda line: self._heard(generation, line))
        assert self._tasks is not None
        self._tasks.create_task(self._reap(generation), name=f"{self.model}/{number}/reap")
        self.post(core.Spawned(number, child.pid, keeps_slots=plan.slots is not None))

    def _heard(self, generation: Generation, line: str) -> None:
        match read_line(line):
            case Ready():
                generation.heard.set()
            case Doom(diagnosis) if generation.plan.checked:
                self.post(core.Doomed(generation.number, self._adjusted(generation, diagnosis)))
            case Warned(message, remedy):
                self._bus.publish(ServerWarned(self.model, generation.number, message, remedy))
            case SizeTold() if len(generation.size_lines) < _MOST_SIZE_LINES:
                generation.size_lines.append(line)
            case _:
                pass

    def _adjusted(self, generation: Generation, diagnosis: Diagnosis) -> Diagnosis:
        """With what the next start does differently, if a smaller plan may help (S5)."""
        return replace(diagnosis, adjustment=self._planner.step_down(generation.plan, diagnosis))

    def _start_task(self, work: Callable[[Generation], Coroutine[None, None, None]]) -> asyncio.Task[None]:
        """A task that ends with its child, at the latest."""
        assert self._tasks is not None
        generation = self._current
        name = f"{self.model}/{generation.number}/{work.__name__.strip('_')}"
        task = self._tasks.create_task(work(generation), name=name)
        generation.tasks.append(task)
        return task

    async def _reap(self, generation: Generation) -> None:
        exit_ = await generation.child.wait()
        generation.exit = exit_
        phase = self._phase()
        if generation.slots is not None:
            # Its connection has gone as well, and what it says of that belongs before the end.
            await asyncio.wait([generation.slots], timeout=PUMP_TIMEOUT_S)
        for task in generation.tasks:
            task.cancel()
        await clear_away(generation)
        diagnosis = diagnose(
            exit_,
            generation.pump.tail(),
            phase=phase,
            asked=phase == "stopping",
            oom_killed=oom_kills() > generation.oom_kills,
        )
        if phase == "starting":
            diagnosis = self._adjusted(generation, diagnosis)
        self.post(core.Exited(generation.number, diagnosis))

    def _phase(self) -> Phase:
        match self.instance.state:
            case State.READY:
                return "ready"
            case State.DRAINING | State.STOPPING:
                return "stopping"
            case _:
                return "starting"

    async def _probe(self, generation: Generation) -> None:
        said = False

        def on_loading() -> None:
            nonlocal said
            if not said:
                said = True
                self.post(core.Loading(generation.number))

        async with self._prober(generation.plan) as prober:
            await prober.until_healthy(generation.heard, on_loading)
        generation.pump.unwatch()
        self.post(core.Healthy(generation.number))

    async def _watch_progress(self, generation: Generation) -> None:
        """Tell of every second in which the start moved: log output, memory, bytes read (S6)."""
        before: tuple[int, ...] = ()
        while self.instance.state in {State.STARTING, State.LOADING, State.WARMING}:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            from llamasup.effects.vitals import vitals

            seen = vitals(generation.child.pid)
            now = (generation.pump.bytes_seen, *((seen.rss_bytes, seen.read_bytes) if seen else ()))
            if now != before:
                before = now
                self.post(core.Progressed(generation.number))

    async def _warm_up(self, generation: Generation) -> None:
        request = warm_up_request(generation.plan.model_class)
        began_s = asyncio.get_running_loop().time()
        status: int | None = None
        try:
            async with self._prober(generation.plan) as prober:
                status, body = await prober.ask(request)
        except httpx.HTTPError as error:
            # Most likely it died of the request (#13085); then its exit says more than this.
            with suppress(TimeoutError):
                async with asyncio.timeout(PUMP_TIMEOUT_S):
                    await generation.child.wait()
                    return
            missing: str | None = not_answered(request, error)
        else:
            missing = what_is_missing(request, status, body)
            if status == 401 and not self.policy.knows_all_keys:
                missing = None
                message = "llama-server asks for a key that llamasup does not know: no first token was tried."
                self._bus.publish(ServerWarned(self.model, generation.number, message, ""))
        if missing is None:
            generation.warm_up_s = asyncio.get_running_loop().time() - began_s
            self.post(core.Warmed(generation.number))
        else:
            diagnosis = explain_failure(missing, generation.pump.tail(), status=status)
            self.post(core.WarmupFailed(generation.number, diagnosis))

    async def _restore_slots(self, generation: Generation) -> None:
        from llamasup.runtime.slot_keeping import restore_slots

        number, kept = generation.number, generation.plan.slots
        assert kept is not None
        async with self._prober(generation.plan) as prober:
            usable, problem = await restore_slots(
                prober, kept, most_bytes=self.policy.slots_disk_bytes, model=self.model
            )
        if problem is not None:
            then = "Those conversations are read anew." if usable else "It is started again without them."
            message = f"Saved slots could not be restored: {problem}. {then}"
            self._bus.publish(ServerWarned(self.model, number, message, ""))
        self.post(core.SlotsRestored(number) if usable else core.SlotsSpoilt(number))

    async def _save_slots(self, generation: Generation) -> None:
        from llamasup.runtime.slot_keeping import save_slots

        kept = generation.plan.slots
        assert kept is not None
        async with self._prober(generation.plan) as prober:
            problem = await save_slots(
                prober, kept, most_bytes=self.policy.slots_disk_bytes, model=self.model
            )
        if problem is not None:
            message = f"Not all slots could be saved: {problem}."
            self._bus.publish(ServerWarned(self.model, generation.number, message, ""))
        self.post(core.SlotsSaved(generation.number))

    async def _watch(self, generation: Generation) -> None:
        """Look after it while it serves (S7, S8)."""
        async with self._prober(generation.plan) as prober:
            verdict = await watch(
                prober,
                generation.endpoint,
                generation.child.pid,
                warm_up_request(generation.plan.model_class),
                self.policy.liveness,
                warm_up_s=generation.warm_up_s,
            )
        if verdict is not None:
            self.post(core.Hung(generation.number, verdict))

    async def _learn(self, generation: Generation) -> None:
        """Compare what the load took with what was planned, for the plans to come.

        One piece of work in a thread: a stop right after the start does not wait for it, nor does it undo it.
        """
        await asyncio.to_thread(self._learn_now, generation)
        if self._when_measured is not None:
            self._when_measured()

    async def _ask_window(self, generation: Generation) -> None:
        """The server pads and divides what it was told: what a slot holds, it knows best."""
        async with self._prober(generation.plan) as prober:
            generation.endpoint.window = await prober.window()

    def _learn_now(self, generation: Generation) -> None:
        from llamasup.effects.vitals import vitals

        seen = vitals(generation.child.pid)
        resident_bytes = None if seen is None else seen.rss_bytes
        self._planner.served(generation.plan, generation.size_lines, resident_bytes=resident_bytes)

    async def _put_down(self, generation: Generation) -> None:
        """The way out when the runner itself is cancelled: no drain, no politeness, but nothing left."""
        generation.endpoint.close("the supervisor is ending")
        generation.child.kill_group()
        await _shielded(generation.child.wait(), REAP_TIMEOUT_S)
        await _shielded(clear_away(generation), PUMP_TIMEOUT_S)


async def _shielded(work: Awaitable[object], timeout_s: float) -> None:
    """Finish ``work`` although we are being cancelled, but not for ever."""
    future = asyncio.ensure_future(work)  # noqa: TID251 (owned right here)
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(future)
