"""The detection of exits and the times of restarts, with real children."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvloop
from msgspec.structs import replace

from llamasup.core.llama_server import client
from llamasup.core.planning.measured import stores
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.events import Bus, PublishedEvent, ServerExited, StateChanged
from llamasup.core.supervision.generation import Generation
from llamasup.core.supervision.states import State, WarmupSucceeded
from llamasup.core.system.process.spawn import spawn
from llamasup.features.wrap.options import WrapOptions
from llamasup.features.wrap.planner import parse_command
from llamasup.service.hosting import Service
from tests.e2e.service import serving
from tests.kit.fake_server import install


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_exit_is_noticed_within_five_loop_turns(run: Callable[..., None]) -> None:
    """S1. ``waitid`` returns when the child is dead; then only turns of the loop count. A poll with a timer
    would not run within five turns."""

    async def test() -> None:
        child = spawn(("/bin/sleep", "1000"), env={"PATH": os.defpath}, cwd=Path("/"))
        try:
            async with asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(child.wait())
                await asyncio.sleep(0)
                os.kill(child.pid, signal.SIGKILL)
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - on purpose
                for _ in range(5):
                    await asyncio.sleep(0)
                noticed = waiting.done()
            assert noticed
            with pytest.raises(ChildProcessError):  # the child is reaped
                os.waitpid(child.pid, os.WNOHANG)  # noqa: ASYNC222 - does not wait
        finally:
            os.close(child.output_fd)

    run(test())


def test_restarts_wait_for_the_reported_and_growing_delay(tiny_model: Path, tmp_path: Path) -> None:
    """S2: no early start, and the reported delay is that of the policy within its jitter.

    The delay counts from the exit, which is before its event.
    """
    runtime = install(tmp_path / "llama-server", "exit=load:1")
    policy = RestartPolicy(first_delay_s=0.1, longest_delay_s=0.4, most_crashes=5, half_open_s=1000.0)
    at_s: dict[tuple[str, int], float] = {}
    due_s: dict[int, float] = {}

    async def test() -> list[ServerExited]:
        loop = asyncio.get_running_loop()
        async with serving(tiny_model, runtime=str(runtime), restart=policy) as server:

            def note(event: object) -> None:
                match event:
                    case ServerExited(generation=generation):
                        at_s["exit", generation] = loop.time()
                        due_s[generation] = server.runner.instance.next_start_s or 0.0
                    case StateChanged(state=State.STARTING, generation=generation):
                        at_s["start", generation] = loop.time()

            server.bus.listen(note)
            await server.reaches(State.FAILED, 6)
            return [event for event in server.notices if isinstance(event, ServerExited)]

    exits = asyncio.run(test())
    reported_s = [exited.restart_in_s or 0.0 for exited in exits]
    assert reported_s == pytest.approx([0.1, 0.2, 0.4, 0.4, 0.4, 1000.0], rel=0.2 + 1e-9)
    for number in range(1, 6):
        assert (
            at_s.get(("start", number), 0.0) <= due_s[number] - reported_s[number - 1] <= at_s["exit", number]
        )
        # The loop's clock may run a millisecond ahead of its timers.
        assert at_s["start", number + 1] >= due_s[number] - 0.002


def test_stop_waits_for_no_request_of_llamasup(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server does not exit while it works on one, here on the first question about its slots."""
    monkeypatch.setattr(client, "PROBE_TIMEOUT_S", 600.0)
    runtime = install(tmp_path / "llama-server", "list_slots_s=600")

    async def test() -> None:
        loop, asked = asyncio.get_running_loop(), asyncio.Event()

        def on_log(lines: list[bytes]) -> None:
            if any(b"GET /slots waits" in line for line in lines):
                loop.call_soon_threadsafe(asked.set)

        async with serving(tiny_model, runtime=str(runtime), stop_timeout_s=600.0) as server:
            server.service.on_log = on_log
            await server.reaches(State.READY, 1)
            await asked.wait()

    asyncio.run(test())


def test_load_is_recorded_although_a_stop_follows_at_once(tiny_model: Path, tmp_path: Path) -> None:
    """No thread is free from the moment that the server is ready until its tasks are cancelled."""
    runtime = install(tmp_path / "llama-server")

    async def test() -> None:
        loop, cancelled = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))

        def on_event(event: PublishedEvent) -> None:
            match event:
                case StateChanged(state=State.READY):
                    loop.run_in_executor(None, cancelled.wait)
                    server.service.ask_stop()
                case StateChanged(state=State.STOPPING | State.STOPPED):
                    cancelled.set()

        async with serving(tiny_model, runtime=str(runtime)) as server:
            server.bus.listen(on_event)
            await server.reaches(State.STOPPED, 1)

    asyncio.run(test())
    assert len(stores.load_history(tiny_model).served) == 1


@pytest.mark.extended
def test_only_a_start_without_progress_is_hung(tiny_model: Path, tmp_path: Path) -> None:
    """S6. Both servers load for twice the stall timeout, and one of them only spins."""
    hung = install(tmp_path / "hung-server", "load_s=8", "spin", f"once={tmp_path / 'hung'}")
    slow = install(tmp_path / "slow-server", "load_s=16")

    async def test() -> None:
        async with serving(tiny_model, runtime=str(hung), stall_timeout_s=4.0) as server:
            exited = await server.exit_of(1)
            assert exited.diagnosis.cause == "hung_start"
            assert exited.exit is None
        async with serving(tiny_model, runtime=str(slow), stall_timeout_s=8.0) as server:
            await server.reaches(State.READY, 1)

    asyncio.run(test())


def test_responses_while_loading_do_not_count_as_failures(
    tiny_model: Path, tmp_path: Path, free_tcp_port: int
) -> None:
    """``wrap`` forwards the 503 "Loading model" of llama-server, of which a polling client gets many."""
    go = tmp_path / "go"
    command = [str(install(tmp_path / "llama-server", "load_s=600", f"until={go}")), "-m", str(tiny_model)]

    async def test() -> None:
        bus = Bus()
        wrapping = parse_command([*command, "--port", str(free_tcp_port)], os.environ)
        service = Service(WrapOptions(wrapping), bus)
        loading, ready = asyncio.Event(), asyncio.Event()
        bus.listen(lambda event: loading.set() if getattr(event, "state", None) is State.LOADING else None)
        bus.listen(lambda event: ready.set() if getattr(event, "state", None) is State.READY else None)
        url = f"http://127.0.0.1:{free_tcp_port}/completion"
        async with asyncio.TaskGroup() as tasks, httpx.AsyncClient() as client:
            running = tasks.create_task(service.run())
            await loading.wait()
            for _ in range(4):
                assert (await client.post(url, json={"prompt": "x"})).status_code == 503
            go.touch()
            await ready.wait()
            assert service.runner is not None
            endpoint = service.runner.endpoint
            assert isinstance(endpoint, Endpoint)
            assert (endpoint.failures, endpoint.answered) == (0, 0)
            service.ask_stop()
            await running

    asyncio.run(test())


def delay_cleanup(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """The events "the child has exited" (set by the runner) and "go on" (set by the test)."""
    dead, go_on, clean_up = asyncio.Event(), asyncio.Event(), Generation.clean_up

    async def late(generation: Generation) -> None:
        dead.set()
        await go_on.wait()
        await clean_up(generation)

    monkeypatch.setattr(Generation, "clean_up", late)
    return dead, go_on


def test_requests_wait_and_readyz_fails_between_exit_and_cleanup(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that outlive a server may take seconds to end."""
    runtime = install(tmp_path / "llama-server")

    async def test() -> None:
        dead, go_on = delay_cleanup(monkeypatch)
        async with serving(tiny_model, runtime=str(runtime)) as server, asyncio.TaskGroup() as tasks:
            await server.reaches(State.READY, 1)
            os.kill(server.pid, signal.SIGKILL)
            await dead.wait()
            assert (await server.client.get("/readyz")).status_code == 503
            request = tasks.create_task(server.complete())
            while not len(server.runner.queue):  # noqa: ASYNC110 - the queue has no event
                await asyncio.sleep(0)
            assert server.runner.in_flight == 0
            go_on.set()
            assert (await request).status_code == 200

    asyncio.run(test())


def test_warm_up_result_after_the_exit_is_ignored(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token came before the exit, but the runner notices the exit first, during the cleanup."""
    runtime = install(tmp_path / "llama-server")
    ready: list[int] = []

    async def test() -> None:
        async with serving(tiny_model, runtime=str(runtime)) as server:
            await server.reaches(State.READY, 1)
            dead, go_on = delay_cleanup(monkeypatch)
            os.kill(server.pid, signal.SIGKILL)
            await dead.wait()
            runner = server.runner
            runner.instance = replace(runner.instance, state=State.WARMING)
            runner.post(WarmupSucceeded(1))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            ready.append(runner.instance.state is State.READY)
            runner.instance = replace(runner.instance, state=State.READY)
            go_on.set()
            await server.reaches(State.READY, 2)

    asyncio.run(test())
    assert ready == [False]
