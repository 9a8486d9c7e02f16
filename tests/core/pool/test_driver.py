"""What the driver of a model reports about its processes, with runners that the test moves."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import pytest
from msgspec.structs import replace

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.memory.shares import MemoryBudget
from llamasup.core.pool.driver import DriverContext, ProcessDriver
from llamasup.core.pool.estimate import SizedModel
from llamasup.core.pool.model_states import Processes, ProcessesStatus
from llamasup.core.pool.model_steps import Step
from llamasup.core.pool.processes import Crashes
from llamasup.core.supervision.not_serving import NOT_RUNNING
from llamasup.core.supervision.states import Instance, Policy, State
from tests.kit.async_tests import async_test

SPEC = ModelSpec("a", "/a.gguf", replicas=2)
SIZED = SizedModel(SPEC, None, {}, SPEC, cast("Any", None))
FAILED = Instance(State.FAILED, last=Diagnosis("crash", "It crashed.", "", (), True, 70))


class Runner:
    """The part of an ``InstanceRunner`` that the driver uses."""

    def __init__(self, state: Instance) -> None:
        self.instance = state
        self.taken: asyncio.Future[Instance] | None = None

    def submit(self, _event: object) -> asyncio.Future[Instance]:
        self.taken = asyncio.get_running_loop().create_future()
        return self.taken

    def unavailable(self) -> object:
        return NOT_RUNNING

    async def takes_its_start(self) -> None:
        assert self.taken is not None
        self.instance = replace(self.instance, state=State.STARTING)
        self.taken.set_result(self.instance)
        await asyncio.sleep(0)  # its callback


class Driven:
    """A driver over two runners, and the steps that it posts."""

    def __init__(self, *before: Instance) -> None:
        self.runners = [Runner(instance) for instance in before]
        self.steps: list[Step] = []
        context = DriverContext(
            cast("Any", None),
            cast("Any", self),
            cast("Any", None),
            Crashes(),
            cast("Any", dict),
            cast("Any", None),
        )
        self.driver = ProcessDriver(
            context,
            cast("Any", None),
            spec=lambda: SPEC,
            policy=lambda _: Policy(),
            share=lambda _: MemoryBudget({}),
            post=self.steps.append,
        )

    def make(self, *_arguments: object, **_options: object) -> list[Runner]:
        return self.runners

    def reported(self) -> list[Processes | None]:
        """The reports since the last call; None for a refused build."""
        self.driver.report()
        steps, self.steps[:] = list(self.steps), []
        return [step.keywords.get("seen") for step in steps if isinstance(step, partial)]


@pytest.mark.parametrize("before", [Instance(), FAILED])
@async_test
async def test_nothing_is_reported_before_every_replica_has_taken_its_start(before: Instance) -> None:
    """Until then it still seems stopped, or failed as in the load before."""
    processes = Driven(before, before)
    processes.driver.start(1, SIZED, withheld=True)
    assert processes.reported() == []
    await processes.runners[0].takes_its_start()
    assert processes.reported() == []
    await processes.runners[1].takes_its_start()
    assert processes.reported() == [Processes(1), Processes(1)]


@async_test
async def test_one_replica_that_serves_is_enough() -> None:
    processes = Driven(Instance(), Instance())
    processes.driver.start(1, SIZED, withheld=False)
    for runner in processes.runners:
        await runner.takes_its_start()
    processes.steps.clear()
    first, second = processes.runners
    first.instance = replace(first.instance, state=State.READY)
    assert processes.reported() == [Processes(1, ProcessesStatus.SERVING, complete=False)]
    second.instance = FAILED
    assert processes.reported() == [Processes(1, ProcessesStatus.SERVING, complete=True)]


@async_test
async def test_failure_is_reported_once_no_replica_serves_or_starts() -> None:
    processes = Driven(Instance(), Instance())
    processes.driver.start(1, SIZED, withheld=False)
    for runner in processes.runners:
        await runner.takes_its_start()
    processes.runners[0].instance = FAILED
    assert processes.reported()[-1] == Processes(1)
    processes.runners[1].instance = FAILED
    (report,) = processes.reported()
    assert report is not None
    assert (report.status, report.settled) == (ProcessesStatus.FAILED, True)


@async_test
async def test_one_failed_replica_refuses_the_build_that_is_withheld() -> None:
    processes = Driven(Instance(), Instance())
    processes.driver.start(1, SIZED, withheld=True)
    for runner in processes.runners:
        await runner.takes_its_start()
    first, second = processes.runners
    first.instance = replace(first.instance, state=State.READY)
    second.instance = FAILED
    assert processes.reported()[-1] is None
    first.instance = FAILED
    (report,) = processes.reported()
    assert report is not None
    assert (report.status, report.settled) == (ProcessesStatus.FAILED, True)
