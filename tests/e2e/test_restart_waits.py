"""Requests around a restart that is asked for: those in flight finish, later ones wait for the next child.

A service of this very process, since nothing outside one can ask for a restart yet but a service manager.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx

from llamasup.core.supervision.events import Bus, PublishedEvent, Ready
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import State
from llamasup.service.hosting import Service
from llamasup.service.options import RunOptions
from tests.e2e.driver import PATIENCE_S

CHAT = {"messages": [{"role": "user", "content": "x"}]}
Visit = Callable[[Service, InstanceRunner, httpx.AsyncClient], Coroutine[Any, Any, None]]


def serve(options: RunOptions, visit: Visit) -> None:
    async def both() -> None:
        bus = Bus()
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def listen(notice: PublishedEvent) -> None:
            if isinstance(notice, Ready):
                url.set_result(notice.address.url)

        bus.listen(listen)
        service = Service(options, bus)
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(service.run())
            async with httpx.AsyncClient(base_url=await url, timeout=PATIENCE_S) as client:
                assert service.runner is not None
                await visit(service, service.runner, client)
            service.ask_stop()
            await running

    asyncio.run(both())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - a count inside the service, which tells nobody of it
        await asyncio.sleep(0.001)


def post(tasks: asyncio.TaskGroup, client: httpx.AsyncClient, **body: object) -> asyncio.Task[httpx.Response]:
    return tasks.create_task(client.post("/v1/chat/completions", json={**CHAT, **body}))


def test_restart_finishes_requests_in_flight_and_queues_the_others(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    async def visit(service: Service, runner: InstanceRunner, client: httpx.AsyncClient) -> None:
        async with asyncio.TaskGroup() as tasks:
            early = post(tasks, client, max_tokens=8)
            await until(lambda: runner.in_flight == 1)
            service.ask_reload()
            await runner.reached(State.DRAINING)
            late = [post(tasks, client, max_tokens=1) for _ in range(4)]
            await until(lambda: len(runner.queue) == 4)
            assert runner.instance.state is State.DRAINING
            assert (await client.get("/props")).status_code == 503
            (tmp_path / "go").touch()
            assert (await early).json()["choices"][0]["message"]["content"].endswith("w7")
        assert [answer.result().status_code for answer in late] == [200] * 4
        assert (runner.instance.generation, runner.last_exit) == (2, None)

    runtime = fake_server("token_s=600", f"until={tmp_path / 'go'}")
    serve(RunOptions(str(tiny_model), runtime=runtime, port=0, warm_up=False), visit)


def test_requests_cut_by_a_restart_are_sent_to_the_next_generation(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    """The time to drain is over, and no byte of an answer has come."""

    async def visit(service: Service, runner: InstanceRunner, client: httpx.AsyncClient) -> None:
        async with asyncio.TaskGroup() as tasks:
            slow = post(tasks, client)
            await until(lambda: runner.in_flight == 1)
            service.ask_reload()
        assert slow.result().status_code == 200
        assert runner.instance.generation == 2

    runtime = fake_server("prefill_s=60", f"once={tmp_path / 'once'}")
    options = RunOptions(
        str(tiny_model), runtime=runtime, port=0, warm_up=False, drain_timeout_s=0.1, stop_timeout_s=1.0
    )
    serve(options, visit)


def test_stop_refuses_requests_that_wait_for_a_restart_or_were_cut(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    async def visit(service: Service, runner: InstanceRunner, client: httpx.AsyncClient) -> None:
        async with asyncio.TaskGroup() as tasks:
            slow = post(tasks, client)
            await until(lambda: runner.in_flight == 1)
            service.ask_reload()
            await runner.reached(State.DRAINING)
            waits = post(tasks, client)
            await until(lambda: len(runner.queue) == 1)
            service.ask_stop()
            assert (await waits).json()["error"]["message"] == "The server is stopping"
            assert not slow.done()
            service.ask_stop()
        assert slow.result().status_code == 503
        assert slow.result().json()["error"]["cause"] == "stopping"

    serve(RunOptions(str(tiny_model), runtime=fake_server("prefill_s=60"), port=0, warm_up=False), visit)
