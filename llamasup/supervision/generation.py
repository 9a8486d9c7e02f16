"""One generation of an instance: a child and everything that lives and dies with it.

It starts the child, hears its log, sees its end and clears away what it leaves. What it finds out it tells as
events of ``core.instance``. What follows from them, and when a child is to start or to end, it never decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from llamasup.errors import BrokenRuntime, DoesNotFit, LlamasupError
from llamasup.http.address import Address, UnixAddress
from llamasup.llama_server.client import Prober
from llamasup.llama_server.diagnosis import Diagnosis, Phase, diagnose
from llamasup.llama_server.start_log import TELLING, Ready, SizeTold, StartupFailure, Warned, read_line
from llamasup.queueing.endpoint import Endpoint
from llamasup.supervision import states as core
from llamasup.supervision.events import Bus, ServerWarned
from llamasup.supervision.plan_protocol import AnyPlanMaker, ChildPlan
from llamasup.supervision.states import Event, Policy
from llamasup.system.hardware.usage import oom_kills
from llamasup.system.process.exit import Exit
from llamasup.system.process.output_pump import LogPump
from llamasup.system.process.spawn import Child, spawn

__all__ = ["PUMP_TIMEOUT_S", "Generation", "GenerationContext", "begin"]

PUMP_TIMEOUT_S: Final = 1.0
_REAP_TIMEOUT_S: Final = 5.0
_MAX_SIZE_LINES: Final = 400


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """What an instance gives to each of its generations.

    ``post`` takes the events. ``policy`` and ``phase`` are asked anew each time: both change while a child
    lives. ``endpoint`` makes the one of a generation. ``when_measured`` hears that ``planner`` has learned.
    """

    model: str
    planner: AnyPlanMaker
    prober: Callable[[ChildPlan], Prober]
    bus: Bus
    work_folder: Path
    cwd: Path | None
    log_path: Path | None
    log_passed_on: Callable[[list[bytes]], None] | None
    when_measured: Callable[[], None] | None
    endpoint: Callable[[int, ChildPlan], Endpoint]
    post: Callable[[Event], None]
    policy: Callable[[], Policy]
    phase: Callable[[], Phase]


class Generation:
    """The child number ``number`` of an instance, with its log, its endpoint and its tasks (in ``group``).

    ``kills`` is how many the kernel had killed for want of memory when the child began.
    """

    def __init__(
        self,
        number: int,
        plan: ChildPlan,
        child: Child,
        context: GenerationContext,
        group: asyncio.TaskGroup,
        *,
        kills: int,
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
        self.exit: Exit | None = None
        """Known as soon as its end is seen: what it leaves is cleared away before that is told."""
        self.log_ready = asyncio.Event()
        """Its log said that it listens."""
        self.size_lines: list[str] = []
        """What the child said about its memory while it started."""
        self.warm_up_s = 0.0
        """What its first token took."""
        self._group = group
        self._kills = kills
        self._tasks: list[asyncio.Task[None]] = []
        self._slots: asyncio.Task[None] | None = None  # has what they hold saved or restored

    def watch(self) -> None:
        """From now on its log is heard and its end is seen."""
        self.pump.watch(TELLING, self._hear)
        self._group.create_task(self._reap(), name=f"{self.context.model}/{self.number}/reap")
        self.post(core.Spawned(self.number, self.child.pid, keeps_slots=self.plan.slots is not None))

    def rename(self, context: GenerationContext) -> None:
        """Its model has another name, and ``around`` says which."""
        self.context = context
        self.endpoint.model = context.model

    def post(self, event: Event) -> None:
        self.context.post(event)

    def prober(self) -> Prober:
        """For asking the child itself."""
        return self.context.prober(self.plan)

    def warn(self, message: str, remedy: str = "") -> None:
        """Tell people of something that it can live with."""
        self.context.bus.publish(ServerWarned(self.context.model, self.number, message, remedy))

    # --- what it does

    def start(self, work: Callable[[Generation], Coroutine[None, None, None]]) -> asyncio.Task[None]:
        """A task that ends with the child, at the latest."""
        name = f"{self.context.model}/{self.number}/{work.__name__}"
        task = self._group.create_task(work(self), name=name)
        self._tasks.append(task)
        return task

    def move_slots(self, work: Callable[[Generation], Coroutine[None, None, None]]) -> None:
        """``start`` what has them saved or restored, in place of what did."""
        self.cancel_slot_transfer()
        self._slots = self.start(work)

    def cancel_slot_transfer(self) -> None:
        """Wait no longer for them: it would not end while it is asked for something (b11434)."""
        if self._slots is not None:
            self._slots.cancel()

    def close(self, reason: str) -> None:
        """End what is in flight with ``reason``, and what moves its slots."""
        self.endpoint.close(reason)
        self.cancel_slot_transfer()

    # --- what is heard of it

    def _hear(self, line: str) -> None:
        match read_line(line):
            case Ready():
                self.log_ready.set()
            case StartupFailure(diagnosis) if self.plan.checked:
                self.post(core.StartupFailureLogged(self.number, self._adjusted(diagnosis)))
            case Warned(message, remedy):
                self.warn(message, remedy)
            case SizeTold() if len(self.size_lines) < _MAX_SIZE_LINES:
                self.size_lines.append(line)
            case _:
                pass

    def _adjusted(self, diagnosis: Diagnosis) -> Diagnosis:
        """With what the next start does differently, if a smaller plan may help (S5)."""
        return replace(diagnosis, adjustment=self.context.planner.step_down(self.plan, diagnosis))

    # --- its end

    async def _reap(self) -> None:
        exit_ = await self.child.wait()
        self.exit = exit_
        phase = self.context.phase()
        if self._slots is not None:
            # Its connection has gone as well, and what it says of that belongs before the end.
            await asyncio.wait([self._slots], timeout=PUMP_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await self.clean_up()
        diagnosis = diagnose(
            exit_,
            self.pump.tail(),
            phase=phase,
            asked=phase == "stopping",
            oom_killed=oom_kills() > self._kills,
        )
        if phase == "starting":
            diagnosis = self._adjusted(diagnosis)
        self.post(core.Exited(self.number, diagnosis))

    async def clean_up(self) -> None:
        """What a child leaves that is ours: its pipe and its socket; and what it started and left alone."""
        await asyncio.to_thread(self.child.end_descendants)
        await self.pump.aclose(PUMP_TIMEOUT_S)
        _remove_socket(self.plan.address)

    async def kill(self) -> None:
        """The way out when the instance itself is cancelled: no drain, no politeness, but nothing left."""
        self.endpoint.close("the supervisor is ending")
        self.child.kill_group()
        await _shielded(self.child.wait(), _REAP_TIMEOUT_S)
        await _shielded(self.clean_up(), PUMP_TIMEOUT_S)


async def _shielded(work: Awaitable[object], timeout_s: float) -> None:
    """Finish ``work`` although we are being cancelled, but not for ever."""
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
    wanted: Callable[[], bool],
    first: bool,
) -> Generation | Diagnosis:
    """Plan it and spawn its child: a generation that lives, or why there is none.

    The plan in a thread, since devices may have to be asked; the spawn in this one (PDEATHSIG), unless it is
    not ``wanted`` any more by then. ``first``: nothing has served yet.
    """
    try:
        plan: ChildPlan = await asyncio.to_thread(context.planner.plan, number)
        if not wanted():
            return _NOT_STARTED
        # A cleaner of temporary folders may have taken it; without it no child can start again.
        context.work_folder.mkdir(mode=0o700, exist_ok=True)
        _remove_socket(plan.address)
        kills = oom_kills()
        cwd = context.cwd or context.work_folder
        child = spawn(plan.argv, env=plan.env, cwd=cwd, run_folder=context.work_folder)
    except LlamasupError as error:
        return _as_diagnosis(error, first=first)
    except OSError as error:
        return _as_diagnosis(_spawn_error(error), first=True)
    try:
        generation = Generation(number, plan, child, context, group, kills=kills)
        generation.watch()
    except BaseException:
        # Nobody would know of it.
        child.kill_group()
        child.poll()
        raise
    return generation


_NOT_STARTED = Diagnosis("stopped", "llama-server was not started: the stop came first.", "", (), False, 0)


def _as_diagnosis(error: LlamasupError, *, first: bool) -> Diagnosis:
    """``first``: nothing served yet. What fitted before may fit again, once its memory is free (#97)."""
    deterministic = first or not isinstance(error, DoesNotFit)
    lines = (*error.details, *error.lines)
    return Diagnosis(error.cause, error.message, error.remedy, lines, deterministic, error.exit_code)


def _spawn_error(error: OSError) -> LlamasupError:
    return BrokenRuntime(
        f"llama-server could not be started: {error.strerror or error}",
        remedy="Check limits on processes and open files (ulimit -a).",
    )
