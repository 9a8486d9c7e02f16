"""The Retry-After of requests during a load: the time of earlier loads, less the elapsed time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.queueing.wait_estimate import LONGEST_S
from llamasup.core.supervision.events import Bus
from llamasup.core.supervision.plan_protocol import PlanMaker
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Policy, State
from tests.kit.async_tests import async_test

Ask = Callable[..., float]
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


@pytest.fixture
def retry_after(runner_in: Runner) -> Ask:
    def ask(state: State, **times: Any) -> float:
        async def estimate() -> float:
            retry_after_s = runner_in(state, **times).unavailable().retry_after_s
            assert isinstance(retry_after_s, float)
            return retry_after_s

        return asyncio.run(estimate())

    return ask


def test_retry_after_is_the_rest_of_a_running_load(retry_after: Ask) -> None:
    assert retry_after(State.LOADING, load_s=30.0, elapsed_s=10.0) == pytest.approx(20.0, abs=0.5)
    assert retry_after(State.WARMING, load_s=30.0, elapsed_s=29.9) == 1.0
    assert retry_after(State.STARTING, load_s=30.0, elapsed_s=90.0) == 1.0


def test_first_load_has_a_retry_after_of_one_second(retry_after: Ask) -> None:
    assert retry_after(State.LOADING, load_s=None, elapsed_s=10.0) == 1.0


def test_retry_after_includes_a_whole_load_that_is_due(retry_after: Ask) -> None:
    assert retry_after(State.DRAINING, load_s=30.0) == 30.0
    assert retry_after(State.BACKOFF, load_s=30.0, start_in_s=8.0) == pytest.approx(38.0, abs=0.5)
    assert retry_after(State.FAILED, load_s=None, start_in_s=300.0) == pytest.approx(300.0, abs=0.5)


def test_retry_after_is_at_most_ten_minutes(retry_after: Ask) -> None:
    assert retry_after(State.LOADING, load_s=3600.0) == LONGEST_S


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
