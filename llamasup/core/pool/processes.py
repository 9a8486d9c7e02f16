"""Creates and drops the runners of models, each with its share of the memory, and counts their crashes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.memory.shares import MemoryBudget
from llamasup.core.planning.planner import Planner
from llamasup.core.pool.estimate import SizedModel
from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.supervision.events import Bus
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Policy

_MAX_CRASHES = 1000  # a loop of crashes ends long before


class Runners:
    """The runners of all models. ``folder`` is the run folder. ``log_path``: model name → file for the output
    of its server.
    """

    def __init__(
        self,
        bus: Bus,
        folder: Path,
        *,
        log_path: Callable[[str], Path | None],
        log_passed_on: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        self._bus = bus
        self._folder = folder
        self._log_path = log_path
        self._log_passed_on = log_passed_on
        self._made = 0
        self._tasks: dict[InstanceRunner, asyncio.Task[None]] = {}
        self._planners: dict[InstanceRunner, Planner] = {}

    def make(
        self,
        spec: ModelSpec,
        served: ReplicaSet,
        sized: SizedModel,
        policy: Policy,
        tasks: asyncio.TaskGroup,
        *,
        share: Callable[[], MemoryBudget],
        on_measured: Callable[[], None],
        on_crashed: Callable[[], None],
        withheld: bool = False,
    ) -> list[InstanceRunner]:
        """One stopped runner for each replica of ``sized``. Planner threads call ``share``. ``withheld``:
        they get requests only after ``served.add``.
        """
        starter = sized.starter
        made: list[InstanceRunner] = []
        for number in range(sized.spec.replicas):
            self._made += 1
            prefix = f"{self._made}-"
            planner = starter.planner(spec.id, number, self._folder, prefix, share)
            runner = InstanceRunner(
                spec.id,
                planner,
                policy=policy,
                bus=self._bus,
                queue=served.queue,
                work_folder=self._folder,
                # No model name contains ~, but another model may be named tiny.1.
                log_path=self._log_path(spec.id if number == 0 else f"{spec.id}~{number}"),
                log_passed_on=self._log_passed_on,
                on_measured=on_measured,
                on_crashed=on_crashed,
                cwd=starter.cwd,
                prober=starter.prober,
                awaits_memory=starter.awaits_memory,
                program=starter.program,
            )
            served.attach(runner) if withheld else served.add(runner)
            self._tasks[runner] = tasks.create_task(runner.run(), name=f"{spec.id}/{self._made}/run")
            if isinstance(planner, Planner):
                self._planners[runner] = planner
            made.append(runner)
        return made

    def rename(self, runners: Sequence[InstanceRunner], model: str) -> None:
        """Running processes keep their old name; the next ones start with the new name."""
        for runner in runners:
            runner.rename(model)
            if runner in self._planners:
                self._planners[runner].rename(model)

    def drop(self, served: ReplicaSet, runners: Sequence[InstanceRunner]) -> None:
        """Forget stopped runners. May be repeated."""
        for runner in tuple(runners):
            served.remove(runner)
            self._planners.pop(runner, None)
            if (task := self._tasks.pop(runner, None)) is not None:
                task.cancel()


class Crashes:
    """The crashes of servers that were ready: a start that fails may fail with every build."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, str]] = deque(maxlen=_MAX_CRASHES)
        self._added = asyncio.Event()

    def count(self, build: str, since_s: float, until_s: float = float("inf")) -> int:
        """The number of crashes of ``build``, as ``ModelSpec.runtime`` names it. Times are monotonic."""
        return sum(since_s <= at_s < until_s for at_s, crashed in self._last if crashed == build)

    def add(self, build: str, at_s: float) -> None:
        self._last.append((at_s, build))
        self._added.set()
        self._added = asyncio.Event()

    async def another(self) -> None:
        await self._added.wait()
