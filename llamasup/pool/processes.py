"""Makes the processes of models, each with its share of the memory, and puts them away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from llamasup.planning.facts import named
from llamasup.planning.memory.shares import MemoryBudget
from llamasup.planning.planner import Planner
from llamasup.pool.model import ManagedModel, SizedModel, with_devices
from llamasup.supervision.events import Bus
from llamasup.supervision.runner import InstanceRunner
from llamasup.supervision.states import Policy

__all__ = ["Runners"]


class Runners:
    """``folder`` is that of this run. ``log_path`` says where the output of a model's server goes."""

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
        managed: ManagedModel,
        sized: SizedModel,
        policy: Policy,
        tasks: asyncio.TaskGroup,
        *,
        share: Callable[[], MemoryBudget],
        on_measured: Callable[[], None],
    ) -> list[InstanceRunner]:
        """One for each replica of what was sized, at rest. ``share`` is asked in the threads that plan."""
        made: list[InstanceRunner] = []
        spec = managed.spec
        for number in range(sized.spec.replicas):
            self._made += 1
            launch = named(with_devices(sized.launch, sized.spec, number), spec.id)
            planner = Planner(launch, self._folder, f"{self._made}-", share)
            runner = InstanceRunner(
                spec.id,
                planner,
                aliases=spec.aliases,
                policy=policy,
                bus=self._bus,
                queue=managed.served.room,
                work_folder=self._folder,
                # No model's name has a ~ in it: tiny.1 may be another one.
                log_path=self._log_path(spec.id if number == 0 else f"{spec.id}~{number}"),
                log_passed_on=self._log_passed_on,
                on_measured=on_measured,
                awaits_memory=True,
            )
            managed.served.add(runner)
            self._tasks[runner] = tasks.create_task(runner.run(), name=f"{spec.id}/{self._made}/run")
            self._planners[runner] = planner
            made.append(runner)
        return made

    def rename(self, runners: Sequence[InstanceRunner], model: str) -> None:
        """A process that runs goes on as it is; the next ones are started under the new name."""
        for runner in runners:
            runner.rename(model)
            self._planners[runner].rename(model)

    def drop(self, managed: ManagedModel, runners: Sequence[InstanceRunner]) -> None:
        """They are at rest, and will not be asked again. May be repeated."""
        for runner in tuple(runners):
            managed.served.remove(runner)
            self._planners.pop(runner, None)
            if (task := self._tasks.pop(runner, None)) is not None:
                task.cancel()
