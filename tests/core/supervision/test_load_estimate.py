"""The progress of a start as the runner shows it: without a process, and before a start that is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.supervision.events import Bus
from llamasup.core.supervision.plan_protocol import PlanMaker
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Policy, State
from tests.kit.async_tests import async_test

Runner = Callable[..., InstanceRunner]


@pytest.fixture
def runner_in(tmp_path: Path) -> Runner:
    """A runner in a state, ``elapsed_s`` into a start or ``start_in_s`` before the next one."""

    def make(
        state: State, *, load_s: float | None, elapsed_s: float = 0.0, start_in_s: float = 0.0
    ) -> InstanceRunner:
        planner: PlanMaker = object()  # type: ignore[assignment]
        queue = ReplicaSet(policy=Policy()).queue
        runner = InstanceRunner(
            "tiny", planner, policy=Policy(), bus=Bus(), queue=queue, work_folder=tmp_path, log_path=None
        )
        now_s = asyncio.get_running_loop().time()
        runner.load_s = load_s
        runner._load_began_s = now_s - elapsed_s
        runner.instance = replace(
            runner.instance, state=state, restart_pending=True, next_start_s=now_s + start_in_s
        )
        return runner

    return make


@async_test
async def test_start_without_a_process_has_only_its_time(runner_in: Runner) -> None:
    load = runner_in(State.STARTING, load_s=None, elapsed_s=3.0).load
    assert load is not None
    assert (load.percent, load.eta_s, load.reason) == (None, None, None)
    assert load.elapsed_s == pytest.approx(3.0, abs=0.5)


@async_test
async def test_due_start_is_shown_with_its_reason(runner_in: Runner) -> None:
    load = runner_in(State.BACKOFF, load_s=30.0, elapsed_s=3.0, start_in_s=8.0).load
    assert load is not None
    assert load.eta_s == pytest.approx(38.0, abs=0.5)
    assert load.reason == "llama-server ended, and starts again in 8 s"
    load = runner_in(State.BACKOFF, load_s=None, start_in_s=8.0).load
    assert load is not None
    assert load.eta_s is None


@pytest.mark.parametrize("state", [State.STOPPED, State.READY, State.DRAINING, State.STOPPING, State.FAILED])
@async_test
async def test_server_that_does_not_start_has_no_load(state: State, runner_in: Runner) -> None:
    assert runner_in(state, load_s=30.0).load is None
