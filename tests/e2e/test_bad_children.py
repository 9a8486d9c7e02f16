"""Servers that do what no server should (issue 4, "Bad input"): real children, and what becomes of each.

Elsewhere: one that ignores SIGTERM (test_stop.py), forks and exits (test_hostile_machine.py), dies as soon as
it is ready for ever (test_hangs.py), and floods of a gigabyte (test_log_flood.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.events import StateChanged
from llamasup.core.supervision.states import State
from tests.e2e.driver import llamasup
from tests.e2e.service import serving

FakeServer = Callable[..., str]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_server_that_closes_its_output_keeps_serving_and_its_exit_is_seen(
    tiny_model: Path, fake_server: FakeServer
) -> None:
    async def test() -> None:
        async with serving(tiny_model, runtime=fake_server("close_output")) as service:
            await service.reaches(State.READY, 1)
            assert (await service.complete()).status_code == 200
            os.kill(service.pid, signal.SIGKILL)
            assert (await service.exit_of(1)).diagnosis.cause == "killed"
            await service.reaches(State.READY, 2)
            assert (await service.complete()).status_code == 200

    run(test)


@pytest.mark.parametrize("fault", ["health=garbage", "health=never", "health=500", "bind=no_accept"])
def test_server_that_never_reports_ready_is_a_hung_start(
    fault: str, tiny_model: Path, fake_server: FakeServer, tmp_path: Path
) -> None:
    """A later generation, which works, answers the requests that arrived meanwhile. On a busy machine, the
    next one may take longer than the limit, too.
    """
    server = fake_server(fault, f"once={tmp_path / 'once'}")

    async def test() -> None:
        context = serving(tiny_model, runtime=server, stall_timeout_s=3.0)
        async with context as service, asyncio.TaskGroup() as tasks:
            await service.reaches(State.STARTING, 1)
            asked = tasks.create_task(service.complete())
            exited = await service.exit_of(1)
            assert (exited.diagnosis.cause, exited.exit) == ("hung_start", None)
            await service.wait_for_event(StateChanged, lambda event: event.state is State.READY)
            assert (await asked).status_code == 200

    run(test)


@pytest.mark.parametrize("phase", ["start", "load"])
def test_server_that_exits_with_0_before_serving_is_a_crash_loop(
    phase: str, tiny_model: Path, fake_server: FakeServer
) -> None:
    policy = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.02, most_crashes=2, half_open_s=1000.0)

    async def test() -> None:
        async with serving(tiny_model, runtime=fake_server(f"exit={phase}:0"), restart=policy) as service:
            await service.reaches(State.FAILED, 3)
            for generation in (1, 2, 3):
                exited = await service.exit_of(generation)
                assert exited.diagnosis.cause == "exited"
                assert exited.exit is not None
                assert exited.exit.code == 0
                assert "again" not in exited.diagnosis.remedy  # the last one is not started again
            assert (await service.complete()).status_code == 503

    run(test)


@pytest.mark.parametrize("faults", [("log_forever",), ("log_invalid_utf8", "log_line_bytes=10000000")])
def test_server_with_arbitrary_output_serves_and_stops(
    faults: tuple[str, ...], tiny_model: Path, fake_server: FakeServer
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server(*faults)) as running:
        running.wait_for("ready")
        assert running.stop() == 0
