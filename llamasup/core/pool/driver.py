"""Carries out the effects of a model outside the pool: sizings and processes. Steps take their results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.hub.remote_file import Progress
from llamasup.core.llama_server.inspect import await_freed, devices_now
from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.memory.shares import RAM, MemoryBudget
from llamasup.core.pool.answers import downloading
from llamasup.core.pool.effects import (
    Admit,
    CancelSizing,
    Drop,
    Effect,
    Prove,
    Size,
    Start,
    Stop,
    Withdraw,
)
from llamasup.core.pool.estimate import SizedModel, Sizer
from llamasup.core.pool.model_states import Estimate, Processes, ProcessesStatus
from llamasup.core.pool.model_steps import Step, measure, note_download, take_size
from llamasup.core.pool.processes import Crashes, Runners
from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.pool.rollout_steps import disprove, observe, prove
from llamasup.core.supervision.events import Bus, Downloading
from llamasup.core.supervision.not_serving import failure_of
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import (
    LIVE,
    Instance,
    KillRequested,
    Policy,
    StartRequested,
    State,
    StopRequested,
)
from llamasup.errors import LlamasupError

_log = logging.getLogger(__name__)


class Driver(Protocol):
    """Does what a model needs outside the pool. The comments name the steps that take the results."""

    def size(self, ticket: int, spec: ModelSpec) -> None: ...  # take_size, note_download
    def cancel_sizing(self, ticket: int) -> None: ...  # also of one that has ended
    def start(self, id_: int, sized: Estimate, *, withheld: bool) -> None: ...  # observe
    def prove(self, id_: int, old_id: int) -> None: ...  # prove, disprove
    def admit(self, id_: int, sized: Estimate) -> None: ...
    def withdraw(self, id_: int) -> None: ...
    def stop(self, id_: int, sized: Estimate | None, *, now: bool) -> None: ...  # observe
    def drop(self, id_: int) -> None: ...


def carry_out(effect: Effect, driver: Driver) -> bool:
    """False if the effect is not one for the driver, but for the pool."""
    match effect:
        case Size(ticket, spec):
            driver.size(ticket, spec)
        case CancelSizing(ticket):
            driver.cancel_sizing(ticket)
        case Start(id_, sized, withheld):
            driver.start(id_, sized, withheld=withheld)
        case Prove(id_, old_id):
            driver.prove(id_, old_id)
        case Admit(id_, sized):
            driver.admit(id_, sized)
        case Withdraw(id_):
            driver.withdraw(id_)
        case Stop(id_, sized, now):
            driver.stop(id_, sized, now=now)
        case Drop(id_):
            driver.drop(id_)
        case _:
            return False
    return True


Proof = Callable[[InstanceRunner, InstanceRunner], Awaitable[LlamasupError | None]]
"""(new process, old process) → why the build of the new one is refused, or None."""


async def unjudged(new: InstanceRunner, old: InstanceRunner) -> LlamasupError | None:
    raise NotImplementedError(f"{new.model!r} has an unproven build, and nothing judges it")


class DriverContext(Struct, frozen=True):
    """The objects that the drivers of all models share. ``tasks`` returns the task group of the running pool,
    ``proof`` the proof of a build.
    """

    sizer: Sizer
    runners: Runners
    bus: Bus
    crashes: Crashes
    tasks: Callable[[], asyncio.TaskGroup]
    proof: Callable[[], Proof]


class ProcessDriver:
    """The driver of one model. ``spec``, ``policy`` and ``share`` return what counts at the time; planner
    threads call ``share``. ``post`` takes the steps.
    """

    def __init__(
        self,
        context: DriverContext,
        served: ReplicaSet,
        *,
        spec: Callable[[], ModelSpec],
        policy: Callable[[SizedModel], Policy],
        share: Callable[[SizedModel], MemoryBudget],
        post: Callable[[Step], None],
    ) -> None:
        self._context = context
        self._served = served
        self._spec = spec
        self._policy = policy
        self._share = share
        self._post = post
        self._sizings: dict[int, asyncio.Task[None]] = {}
        self._runners: dict[int, list[InstanceRunner]] = {}
        self._untaken: dict[int, int] = {}  # starts that the runners have not taken yet
        self._stops: dict[int, asyncio.Task[None]] = {}
        self._withheld: set[int] = set()
        self._proofs: dict[int, asyncio.Task[None]] = {}  # by the id of the new processes

    # --- sizings

    def size(self, ticket: int, spec: ModelSpec) -> None:
        work = self._size(ticket, spec)
        task = self._sizings[ticket] = self._context.tasks().create_task(work, name=f"{spec.id}/size")
        task.add_done_callback(lambda _: self._sizings.pop(ticket, None))

    async def _size(self, ticket: int, spec: ModelSpec) -> None:
        found: SizedModel | LlamasupError
        try:
            found = await self.sized(spec, ticket)
        except LlamasupError as error:
            found = error
        self._sizings.pop(ticket, None)  # what follows must not cancel this task
        self._post(partial(take_size, ticket=ticket, found=found))

    async def sized(self, spec: ModelSpec, ticket: int = 0) -> SizedModel:
        """Download the model if it is missing, and estimate its memory."""

        def on_progress(progress: Progress) -> None:
            done, total, speed = progress.done_bytes, progress.total_bytes, progress.bytes_per_s
            answer = downloading(self._spec(), done, total, speed)
            self._post(partial(note_download, ticket=ticket, answer=answer))
            self._context.bus.publish(Downloading(self._spec().id, done, total, speed))

        return await self._context.sizer.size(spec, on_progress)

    def cancel_sizing(self, ticket: int) -> None:
        if (task := self._sizings.get(ticket)) is not None:
            task.cancel()

    # --- processes

    def runners_of(self, id_: int) -> list[InstanceRunner]:
        return self._runners.get(id_, [])

    @property
    def all_runners(self) -> tuple[InstanceRunner, ...]:
        return tuple(runner for runners in self._runners.values() for runner in runners)

    def start(self, id_: int, sized: Estimate, *, withheld: bool) -> None:
        assert isinstance(sized, SizedModel)
        runners = self._runners.get(id_)
        if runners is None:
            runners = self._runners[id_] = self._context.runners.make(
                self._spec(),
                self._served,
                sized,
                _without_restart(self._policy(sized)) if withheld else self._policy(sized),
                self._context.tasks(),
                share=lambda: self._share(sized),
                on_measured=lambda: self._post(partial(measure, id_=id_)),
                on_crashed=lambda: self._context.crashes.add(sized.spec.runtime, monotonic()),
                withheld=withheld,
            )
        elif not withheld:
            self.admit(id_, sized)  # it may have been unloaded while it was withheld
        if withheld:
            self._withheld.add(id_)
        self._untaken[id_] = len(runners)
        for runner in runners:
            runner.submit(StartRequested()).add_done_callback(lambda _: self._taken(id_))

    def _taken(self, id_: int) -> None:
        if id_ in self._untaken:
            self._untaken[id_] -= 1
            self._report(id_)

    def report(self) -> None:
        """Post what the processes do now. Call it after each change of one."""
        for id_ in tuple(self._runners):
            self._report(id_)

    def _report(self, id_: int) -> None:
        """No replica counts before all have taken their start: it still seems stopped, or failed."""
        runners = self._runners.get(id_, ())
        if not runners or self._untaken.get(id_):
            return
        states = {runner.instance.state for runner in runners}
        settled = all(runner.instance.is_settled for runner in runners)
        failed = next((runner for runner in runners if runner.instance.state is State.FAILED), None)
        if id_ in self._withheld and failed is not None and not settled:
            # One failed replica is enough to refuse a build. The others have to be stopped.
            self._post(partial(disprove, id_=id_, error=failure_of(failed.instance)))
        elif State.READY in states:
            complete = all(is_ready_or_settled(runner.instance) for runner in runners)
            self._observe(Processes(id_, ProcessesStatus.SERVING, complete))
        elif states & LIVE or State.BACKOFF in states:
            self._observe(Processes(id_, ProcessesStatus.STARTING))
        elif failed is not None:
            error, answer = failure_of(failed.instance), failed.unavailable()
            self._observe(Processes(id_, ProcessesStatus.FAILED, error=error, answer=answer, settled=settled))

    def _observe(self, seen: Processes) -> None:
        self._post(partial(observe, seen=seen))

    def prove(self, id_: int, old_id: int) -> None:
        """Compare a serving process of each build: all replicas are started in the same way."""
        proof = self._prove(id_, _serving(self._runners[id_]), _serving(self._runners[old_id]))
        self._proofs[id_] = self._context.tasks().create_task(proof, name=f"{self._spec().id}/proof")

    async def _prove(self, id_: int, new: InstanceRunner, old: InstanceRunner) -> None:
        refused = await self._context.proof()(new, old)
        self._proofs.pop(id_, None)  # what follows must not cancel this task
        passed = partial(prove, id_=id_)
        self._post(passed if refused is None else partial(disprove, id_=id_, error=refused))

    def _end_proof(self, id_: int) -> None:
        """Its request would keep both servers from stopping."""
        if (proof := self._proofs.pop(id_, None)) is not None:
            proof.cancel()

    def admit(self, id_: int, sized: Estimate) -> None:
        assert isinstance(sized, SizedModel)
        self._withheld.discard(id_)
        for runner in self._runners[id_]:
            runner.set_policy(self._policy(sized))
            self._served.add(runner)

    def withdraw(self, id_: int) -> None:
        for runner in self._runners[id_]:
            self._served.remove(runner)

    def stop(self, id_: int, sized: Estimate | None, *, now: bool) -> None:
        assert sized is None or isinstance(sized, SizedModel)
        self._end_proof(id_)
        runners = self._runners[id_]
        if now:
            for runner in runners:
                runner.post(KillRequested())
        if id_ not in self._stops:
            stopping = self._stop(id_, runners, sized)
            self._stops[id_] = self._context.tasks().create_task(stopping, name=f"{self._spec().id}/stop")

    async def _stop(self, id_: int, runners: Sequence[InstanceRunner], sized: SizedModel | None) -> None:
        try:
            async with memory_released(sized):
                for taken in [runner.submit(StopRequested()) for runner in runners]:
                    await taken
                for runner in runners:
                    await runner.until(is_settled)
        finally:
            del self._stops[id_]
        self._observe(Processes(id_, ProcessesStatus.STOPPED))

    def drop(self, id_: int) -> None:
        self._end_proof(id_)
        self._withheld.discard(id_)
        self._context.runners.drop(self._served, self._runners.pop(id_, ()))
        self._untaken.pop(id_, None)

    def drop_all(self) -> None:
        for id_ in tuple(self._runners):
            self.drop(id_)

    def rename(self, model: str) -> None:
        self._context.runners.rename(self.all_runners, model)


def _serving(runners: Sequence[InstanceRunner]) -> InstanceRunner:
    return next((runner for runner in runners if runner.instance.state is State.READY), runners[0])


def _without_restart(policy: Policy) -> Policy:
    """One crash is enough to refuse a build."""
    return replace(policy, restart=replace(policy.restart, most_crashes=0, half_open_s=None))


@asynccontextmanager
async def memory_released(sized: SizedModel | None) -> AsyncIterator[None]:
    """Wrap the stop of a model: returns when the devices report its memory free, which a driver may delay."""
    if sized is None or sized.launch is None or not set(sized.needs) - {RAM}:
        yield
        return
    runtime, environ = sized.launch.runtime, sized.launch.environ
    try:
        before = await asyncio.to_thread(devices_now, runtime, environ)
    except LlamasupError as error:
        _log.warning("cannot read the free device memory: %s", error)
        yield
        return
    yield
    if not await asyncio.to_thread(await_freed, runtime, environ, before, sized.needs):
        _log.warning("model %r has stopped, but its device memory is not free yet", sized.launch.model_id)


def is_settled(instance: Instance) -> bool:
    return instance.is_settled


def is_ready_or_settled(instance: Instance) -> bool:
    """True also for a failed instance that retries by itself in some minutes."""
    return instance.state in {State.READY, State.FAILED} or instance.is_settled
