"""One generation of an instance: a child with its log, its endpoint and its tasks.

``begin`` plans and spawns the child. ``Generation`` reads its log, waits for its exit, cleans up after it,
and posts the events of ``states.py``. The table decides when a child starts and ends.

``LoadWatch`` samples the load of the child: its memory, the bytes that it has read, and the stage that its
log shows. ``load_progress.py`` makes an estimate of the samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.http.address import Address, UnixAddress
from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.diagnosis import WORKER_LOST, Diagnosis, Phase, diagnose
from llamasup.core.llama_server.log_lines import (
    DRAFTED,
    RELEVANT,
    Drafted,
    Ready,
    SizeLogged,
    StageBegan,
    StartupFailure,
    Warned,
    read_drafted,
    read_line,
)
from llamasup.core.llama_server.rpc.in_use import USED
from llamasup.core.planning.measured.load_history import acceptance, is_low
from llamasup.core.planning.measured.load_times import LoadFacts, LoadTimes
from llamasup.core.queueing.endpoint import Endpoint, generation_ended
from llamasup.core.supervision import states
from llamasup.core.supervision.events import Bus, ServerWarned
from llamasup.core.supervision.load_progress import LoadEstimate, LoadProgress, Sample, Stage
from llamasup.core.supervision.plan_protocol import ChildPlan, EnginePlan, PlanMaker
from llamasup.core.supervision.states import Event, Policy
from llamasup.core.system.hardware.probe import LoadUsage, load_usage, oom_kills
from llamasup.core.system.process.child import Exit
from llamasup.core.system.process.output_pump import LogPump
from llamasup.core.system.process.spawn import Child, spawn
from llamasup.errors import BrokenRuntime, DoesNotFit, LlamasupError, WorkerMissing

if TYPE_CHECKING:
    from llamasup.core.llama_server.client import Prober

PUMP_TIMEOUT_S: Final = 1.0
_REAP_TIMEOUT_S: Final = 5.0
_MAX_SIZE_LINES: Final = 400
_LAST_LINES: Final = 4
_SEE_LOG: Final = "See its log (llamasup logs)."


class GenerationContext(Struct, frozen=True):
    """The parts of an instance that each of its generations uses.

    ``post`` takes the events. ``policy``, ``phase`` and ``start_failure`` are functions because they change
    during a generation. ``start_failure``: why llamasup kills the child before it was ready, if it does.
    ``program``: its name in messages. ``endpoint`` creates the endpoint of a generation. ``on_measured`` is
    called after a load was recorded.
    """

    model: str
    planner: PlanMaker
    prober: Callable[[ChildPlan], Prober]
    bus: Bus
    work_folder: Path
    cwd: Path | None
    log_path: Path | None
    log_passed_on: Callable[[list[bytes]], None] | None
    on_measured: Callable[[], None] | None
    endpoint: Callable[[int, ChildPlan], Endpoint]
    post: Callable[[Event], None]
    policy: Callable[[], Policy]
    program: str
    phase: Callable[[], Phase]
    start_failure: Callable[[], Diagnosis | None]


class Generation:
    """The child number ``number`` of an instance, with its log, its endpoint and its tasks (in ``group``).

    ``oom_kills_before``: the kernel's count of out-of-memory kills when the child started.
    """

    def __init__(
        self,
        number: int,
        plan: ChildPlan,
        child: Child,
        context: GenerationContext,
        group: asyncio.TaskGroup,
        *,
        oom_kills_before: int,
    ) -> None:
        self.number = number
        self.plan = plan
        self.child = child
        self.context = context
        self.pump = LogPump(
            child.output_fd,
            name=f"{context.model}/{number}/log",
            path=context.log_path,
            tee=context.log_passed_on,
        )
        self.endpoint = context.endpoint(number, plan)
        self.kill_reason: Diagnosis | None = None
        """Why llamasup kills the child; None if it does not, or the child is stopped on request."""
        self.exit: Exit | None = None
        """Set when the child is reaped, which is before the cleanup and the ``Exited`` event."""
        self.log_ready = asyncio.Event()
        """Set when the log says that the child listens."""
        self.size_lines: list[str] = []
        """Log lines about the child's memory, for ``read_sizes``."""
        self.warm_up_s = 0.0
        """The time of the first token."""
        self.load = LoadWatch(context.planner.load_facts(plan), child.pid, asyncio.get_running_loop().time)
        self.drafted = Drafted(0, 0)
        """The sum of all requests."""
        self._group = group
        self._oom_kills_before = oom_kills_before
        self._tasks: list[asyncio.Task[None]] = []
        self._slots: asyncio.Task[None] | None = None  # saves or restores slots
        self._stopping: asyncio.Task[None] | None = None  # runs the plan's own command to stop
        self._used: tuple[tuple[str, ...], str] = ((), "")  # the RPC workers, and the model as it was named

    def __repr__(self) -> str:
        state = f"process {self.child.pid}" if self.exit is None else f"ended ({self.exit})"
        return f"<Generation {self.number} of {self.context.model!r}: {state}>"

    def watch(self) -> None:
        """Start to read the log and to wait for the exit."""
        self._used = self.plan.workers, f"the model {self.context.model}"
        USED.add(*self._used)
        if not isinstance(self.plan, EnginePlan):
            self.pump.watch(RELEVANT, self._read_line)
        self._group.create_task(self._reap(), name=f"{self.context.model}/{self.number}/reap")
        self.post(states.Spawned(self.number, self.child.pid, keeps_slots=self.plan.slots is not None))
        for message, remedy in self.plan.warnings:
            self.warn(message, remedy)

    def rename(self, context: GenerationContext) -> None:
        """Take over the model's new name from ``context``."""
        self.context = context
        self.endpoint.model = context.model

    def post(self, event: Event) -> None:
        self.context.post(event)

    def prober(self) -> Prober:
        """A client of the child."""
        return self.context.prober(self.plan)

    def warn(self, message: str, remedy: str = "") -> None:
        """Publish a problem that does not end the child."""
        self.context.bus.publish(ServerWarned(self.context.model, self.number, message, remedy))

    # --- tasks

    def start(self, work: Callable[[Generation], Coroutine[None, None, None]]) -> asyncio.Task[None]:
        """Start a task that ends with the child at the latest."""
        name = f"{self.context.model}/{self.number}/{work.__name__}"
        task = self._group.create_task(work(self), name=name)
        self._tasks.append(task)
        return task

    def start_slot_transfer(self, work: Callable[[Generation], Coroutine[None, None, None]]) -> None:
        """``start`` a save or a restore, and cancel the one before it."""
        if self._slots is not None:
            self._slots.cancel()
        self._slots = self.start(work)

    def close(self, why: HttpError, *, crashed: bool) -> None:
        """Abort the running requests of clients and of llamasup: llama-server does not exit while it works on
        one (b11434).
        """
        self.endpoint.close(why, crashed=crashed)
        self._cancel_tasks()

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    # --- its log

    def _read_line(self, line: str) -> None:
        match read_line(line):
            case Ready():
                self.log_ready.set()
            case StartupFailure(diagnosis) if self.plan.checked:
                self.post(states.StartupFailureLogged(self.number, self._adjusted(diagnosis)))
            case Warned(message, remedy):
                self.warn(message, remedy)
            case SizeLogged() if len(self.size_lines) < _MAX_SIZE_LINES:
                self.size_lines.append(line)
            case StageBegan(stage):
                self.load.stage_began(stage)
            case _:
                pass

    def watch_drafts(self) -> None:
        """Read no more of the log than the counts of drafts: from now on, clients can write into it."""
        if not isinstance(self.plan, EnginePlan):
            self.pump.watch(DRAFTED, self._count_drafts)

    def _count_drafts(self, line: str) -> None:
        drafted = read_drafted(line)
        if drafted is None:
            return
        was_low = is_low(self.drafted.proposed, self.drafted.accepted)
        self.drafted += drafted
        if is_low(self.drafted.proposed, self.drafted.accepted) and not was_low:
            said = acceptance(self.drafted.proposed, self.drafted.accepted)
            self.warn(
                f"{said.capitalize()}.", "Leave the draft out, or use one that was made for this model."
            )

    def _adjusted(self, diagnosis: Diagnosis) -> Diagnosis:
        """Add what the next start changes, if a smaller plan may help (S5)."""
        return replace(diagnosis, adjustment=self.context.planner.step_down(self.plan, diagnosis))

    def named(self, diagnosis: Diagnosis, lines: Sequence[str] = ()) -> Diagnosis:
        """Let a diagnosis of llama-server speak of the program that runs; ``lines``: the end of its log."""
        program = self.context.program
        if program == states.LLAMA_SERVER:
            return diagnosis
        message = diagnosis.message.replace("llama-server", program).replace("/health", "its health check")
        return replace(diagnosis, message=message, remedy=_SEE_LOG, lines=tuple(lines[-_LAST_LINES:]))

    # --- its end

    def terminate(self) -> None:
        """Ask the child to stop, with the plan's own command if it has one, else with SIGTERM."""
        if not isinstance(self.plan, EnginePlan) or self.plan.stop is None:
            self.child.terminate()
        elif self._stopping is None:
            name = f"{self.context.model}/{self.number}/stop"
            self._stopping = self._group.create_task(self._stop_by_command(self.plan.stop), name=name)

    async def _stop_by_command(self, stop: Callable[[], str]) -> None:
        if problem := await asyncio.to_thread(stop):
            self.warn(
                f"Its stop command failed: {problem}.", "It gets SIGTERM. Correct `stop` in the config."
            )
            self.child.terminate()

    async def _reap(self) -> None:
        exit_ = await self.child.wait()
        self.exit = exit_
        explained = self.endpoint.is_explained
        phase, start_failure = self.context.phase(), self.context.start_failure()
        if self._slots is not None:
            # Its connection is also closed, and its warning belongs before the exit.
            await asyncio.wait([self._slots], timeout=PUMP_TIMEOUT_S)
        self._cancel_tasks()
        await self.clean_up()
        if self.drafted.proposed:
            await asyncio.to_thread(self.context.planner.drafted, self.plan, self.drafted)
        tail = self.pump.tail()
        diagnosis = start_failure or diagnose(
            exit_,
            tail if self.context.program == states.LLAMA_SERVER else (),
            phase=phase,
            requested=phase == "stopping",
            oom_killed=oom_kills() > self._oom_kills_before,
            build=self.plan.build,
        )
        diagnosis = self.named(diagnosis, tail if phase == "starting" else ())
        if self.plan.workers and (phase != "stopping" or self.kill_reason is not None):
            # They answer again once their llama-server has ended.
            seen = self.kill_reason or diagnosis
            diagnosis = await asyncio.to_thread(self.context.planner.name_lost, self.plan, seen)
        if (phase == "starting" or start_failure is not None) and diagnosis.cause != WORKER_LOST:
            diagnosis = self._adjusted(diagnosis)
        self.post(states.Exited(self.number, diagnosis, explained))

    async def clean_up(self) -> None:
        """Close the child's pipe, remove its socket, and kill the processes that it left behind."""
        USED.remove(*self._used)
        self._used = (), ""
        if isinstance(self.plan, EnginePlan) and self.plan.stop is not None:
            # The child may only be the client of what serves, such as `docker run`.
            if self._stopping is None or self._stopping.cancelled():
                await asyncio.to_thread(self.plan.stop)
            else:
                await asyncio.wait([self._stopping])
        await asyncio.to_thread(self.child.end_descendants)
        await self.pump.aclose(PUMP_TIMEOUT_S)
        _remove_socket(self.plan.address)

    async def kill(self) -> None:
        """Kill the child without a drain and clean up, because the instance is cancelled."""
        self.endpoint.close(generation_ended("llamasup is ending"))
        self.child.kill_group()
        await _shielded(self.child.wait(), _REAP_TIMEOUT_S)
        await _shielded(self.clean_up(), PUMP_TIMEOUT_S)


async def _shielded(work: Awaitable[object], timeout_s: float) -> None:
    """Finish ``work`` although this task is being cancelled, within ``timeout_s``."""
    future = asyncio.ensure_future(work)  # noqa: TID251 (owned right here)
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(future)


def _remove_socket(address: Address) -> None:
    """llama-server removes neither an old socket in its way nor, at its end, its own (b11434)."""
    if isinstance(address, UnixAddress):
        Path(address.path).unlink(missing_ok=True)


# --- its start ----------------------------------------------------------------------------------------


async def begin(
    number: int,
    context: GenerationContext,
    group: asyncio.TaskGroup,
    *,
    is_wanted: Callable[[], bool],
    first: bool,
) -> Generation | Diagnosis:
    """Plan and spawn a child. Returns the running generation, or why it was not started.

    The plan is made in a thread, since it may query devices. The spawn is in this thread (PDEATHSIG), and
    only if ``is_wanted`` still holds. ``first``: no child has served yet.
    """
    try:
        plan: ChildPlan = await asyncio.to_thread(context.planner.plan, number)
        if not is_wanted():
            return _NOT_STARTED
        # A cleaner of temporary folders may have removed it.
        context.work_folder.mkdir(mode=0o700, exist_ok=True)
        _remove_socket(plan.address)
        oom_kills_before = oom_kills()
        cwd = context.cwd or context.work_folder
        child = spawn(
            plan.argv,
            env=plan.env,
            cwd=cwd,
            run_folder=context.work_folder,
            nice=plan.nice,
            ignores_sigpipe=plan.ignores_sigpipe,
        )
    except LlamasupError as error:
        return _as_diagnosis(error, first=first)
    except OSError as error:
        return _as_diagnosis(_spawn_error(error), first=True)
    try:
        generation = Generation(number, plan, child, context, group, oom_kills_before=oom_kills_before)
        generation.watch()
    except BaseException:
        # Nothing else would end the child.
        child.kill_group()
        child.poll()
        raise
    return generation


_NOT_STARTED = Diagnosis("stopped", "llama-server was not started: a stop came first.", "", (), False, 0)


def _as_diagnosis(error: LlamasupError, *, first: bool) -> Diagnosis:
    """``first``: no child has served yet. A plan that has served fits again once memory is free (#97)."""
    waits = isinstance(error, WorkerMissing) or (isinstance(error, DoesNotFit) and not first)
    lines = (*error.details, *error.lines)
    return Diagnosis(error.cause, error.message, error.remedy, lines, not waits, error.exit_code)


def _spawn_error(error: OSError) -> LlamasupError:
    return BrokenRuntime(
        f"llama-server could not be started: {error.strerror or error}",
        remedy="Check the limits on processes and open files (ulimit -a).",
    )


_STAGES = {"weights": Stage.WEIGHTS, "warm_up": Stage.WARM_UP}


class LoadWatch:
    """The load of the process ``pid``, which has just been started. ``clock``: monotonic, in seconds.

    ``probes.watch_progress`` calls ``sample`` while the child starts; between two samples nothing is done.
    """

    def __init__(
        self,
        facts: LoadFacts,
        pid: int,
        clock: Callable[[], float],
        usage: Callable[[int], LoadUsage | None] = load_usage,
    ) -> None:
        self._estimate = LoadEstimate(facts)
        self._pid = pid
        self._clock = clock
        self._usage = usage
        self._began_s = clock()
        self._stage = Stage.BEGIN
        self.times: LoadTimes | None = None  # of its stages, once it has ended

    def __repr__(self) -> str:
        return f"<LoadWatch of process {self._pid}: {self.progress}>"

    def stage_began(self, stage: Literal["weights", "warm_up"]) -> None:
        """The log shows that ``stage`` begins."""
        if _STAGES[stage] > self._stage and self.times is None:
            self._stage = _STAGES[stage]
            self.sample()

    def sample(self) -> LoadUsage | None:
        """Look at the process; None if it has ended."""
        seen = self._usage(self._pid)
        if seen is not None and self.times is None:
            sample = Sample(
                self._clock() - self._began_s,
                seen.file_bytes,
                seen.anonymous_bytes,
                seen.read_bytes,
                seen.disk_bytes,
                seen.cpu_s,
                self._stage,
            )
            self._estimate = self._estimate.after(sample)
        return seen

    @property
    def progress(self) -> LoadProgress:
        """The progress at the last sample."""
        return self._estimate.progress(self._clock() - self._began_s)

    def end(self) -> None:
        """The child serves."""
        if self.times is None:
            self.times = self._estimate.times("", "", self._clock() - self._began_s)
