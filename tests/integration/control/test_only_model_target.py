"""Control of the model of ``run`` while it serves: a fake server, everything else real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from llamasup.core.control.interface import shown
from llamasup.core.models.spec import Changes
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.events import StateChanged
from llamasup.core.supervision.states import State
from llamasup.errors import Conflict, ModelUnknown, ServerFailed, Stopping
from tests.core.control.fake import PATIENCE_S, AsyncControlClient
from tests.e2e.service import Serving, serving
from tests.kit.fake_server import install

SETTINGS = Settings(alias="tiny,small")


@asynccontextmanager
async def controlled(
    model: Path, runtime: Path, *faults: str
) -> AsyncIterator[tuple[Serving, AsyncControlClient]]:
    server = install(runtime / "llama-server", *faults)
    async with serving(model, runtime=str(server), settings=SETTINGS) as it:
        await it.reaches(State.READY, 1)
        plan = it.runner.plan
        assert plan is not None
        path = str(Path(plan.env["XDG_CONFIG_HOME"]) / "control.sock")
        async with AsyncControlClient(path) as control:
            yield it, control


@asynccontextmanager
async def streaming(it: Serving, tokens: int) -> AsyncIterator[AsyncIterator[str]]:
    """A request that is in flight for certain: its first token is here. Gives the lines to come."""
    body = {"prompt": "Once", "n_predict": tokens, "stream": True}
    async with it.client.stream("POST", "/completion", json=body) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        yield lines


def run(visit: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await visit()

    asyncio.run(bounded())


def test_model_is_unloaded_and_loaded_while_its_address_stays(tiny_model: Path, tmp_path: Path) -> None:
    async def visit() -> None:
        async with controlled(tiny_model, tmp_path) as (it, control):
            requests: list[str] = []
            it.service.on_asked = lambda what, _model: requests.append(what)
            pid = it.pid
            unloaded = await control.unload("small")
            assert (unloaded["id"], unloaded["state"], unloaded["pid"]) == ("tiny", "stopped", None)
            assert unloaded["last_exit"] is None  # it was asked to end
            assert not psutil.pid_exists(pid)
            refused = await it.complete()
            assert refused.status_code == 503
            assert refused.json()["error"]["cause"] == "stopped"
            assert refused.json()["error"]["remedy"] == "Load it: llamasup load"
            assert (await it.client.get("/livez")).status_code == 200
            assert (await it.client.get("/readyz")).status_code == 503
            await control.unload("tiny")  # nothing to do, and nothing is done
            assert (await control.reload())["unchanged"] == ["tiny"]

            loaded = await control.load("tiny")
            assert (loaded["state"], loaded["generation"]) == ("ready", 2)
            assert (await it.complete()).status_code == 200
            again = await control.load("tiny")
            assert {**again, "memory": loaded["memory"]} == loaded
            assert again["memory"]["ram_bytes"] > 0  # its size can change between two requests
            assert requests == ["unload", "load"]

    run(visit)


def test_requests_wait_during_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    async def visit() -> None:
        async with controlled(tiny_model, tmp_path, "load_s=0.2") as (it, control):
            restarting = asyncio.ensure_future(control.restart("tiny"))  # noqa: TID251 - awaited below
            await it.reaches(State.STARTING, 2)
            assert (await it.complete()).status_code == 200
            assert (await restarting)["generation"] == 2
            assert await control.reload() == shown(Changes(changed=("tiny",)))
            assert it.runner.instance.generation == 3

    run(visit)


def test_unknown_name_suggests_the_nearest_and_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    async def visit() -> None:
        async with controlled(tiny_model, tmp_path) as (it, control):
            for change in (control.load, control.unload, control.restart):
                with pytest.raises(ModelUnknown, match="tinny") as raised:
                    await change("tinny")
                assert raised.value.remedy == "The nearest is 'tiny'."
            with pytest.raises(ModelUnknown) as raised:
                await control.unload("zzz")
            assert raised.value.remedy == "Served here: tiny, small."
            assert it.runner.instance.generation == 1

    run(visit)


def test_later_of_two_contradicting_requests_wins(tiny_model: Path, tmp_path: Path) -> None:
    """An unloading that waits for a request in flight, and a load before it is over."""
    go = tmp_path / "go"

    async def visit() -> None:
        async with (
            controlled(tiny_model, tmp_path, "stall_after=1", f"until={go}") as (it, control),
            streaming(it, 20) as answer,
        ):
            it.service.on_asked = lambda what, _model: go.touch() if what == "load" else None
            unloading = asyncio.ensure_future(control.unload("tiny"))  # noqa: TID251 - awaited below
            await it.reaches(State.DRAINING, 1)
            loaded = await control.load("tiny")
            assert loaded["generation"] == 2
            with pytest.raises(Conflict, match="loaded again"):
                await unloading
            assert "data: [DONE]" in [line async for line in answer]

    run(visit)


def test_load_overtaken_by_an_unload_is_a_conflict(tiny_model: Path, tmp_path: Path) -> None:
    (go := tmp_path / "go").touch()

    async def visit() -> None:
        async with controlled(tiny_model, tmp_path, "load_s=600", f"until={go}") as (it, control):
            await control.unload("tiny")
            go.unlink()
            loading = asyncio.ensure_future(control.load("tiny"))  # noqa: TID251 - awaited below
            await it.wait_for_event(
                StateChanged, lambda event: (event.state, event.generation) == (State.LOADING, 2)
            )
            await control.unload("tiny")
            with pytest.raises(Conflict, match="was unloaded while it was loading"):
                await loading

    run(visit)


def test_failed_restart_reports_its_error_before_the_service_ends(tiny_model: Path, tmp_path: Path) -> None:
    async def visit() -> None:
        with pytest.raises(ExceptionGroup) as ended:
            async with controlled(tiny_model, tmp_path) as (it, control):
                (tmp_path / "llama-server").write_text(
                    "#!/bin/sh\necho 'error: invalid argument: --x'; exit 1"
                )
                with pytest.raises(ServerFailed) as told:
                    await control.restart("tiny")
                await it.wait_for_event(StateChanged, lambda notice: notice.state is State.FAILED)
        (failure,) = ended.value.exceptions
        assert isinstance(failure, ServerFailed)
        assert (failure.message, failure.cause) == (told.value.message, told.value.cause)

    run(visit)


def test_stop_is_graceful_unless_now_is_requested(tiny_model: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"

    async def visit() -> None:
        async with controlled(tiny_model, tmp_path, "stall_after=1", f"until={go}") as (it, control):
            requests: list[str] = []
            it.service.on_asked = lambda what, _model: requests.append(what)
            async with streaming(it, 10) as answer:
                assert (await control.shutdown())["in_flight"] == 1
                await control.shutdown()
                for refused in (control.load, control.unload, control.restart):
                    with pytest.raises(Stopping):
                        await refused("tiny")
                with pytest.raises(Stopping):
                    await control.reload()
                go.touch()
                assert "data: [DONE]" in [line async for line in answer]
            assert requests == ["stop"]
            await it.reaches(State.STOPPED, 1)

    run(visit)


def test_immediate_stop_aborts_requests_in_flight(tiny_model: Path, tmp_path: Path) -> None:
    async def visit() -> None:
        async with controlled(tiny_model, tmp_path, "stall_after=1") as (it, control):
            async with streaming(it, 1000) as answer:
                await control.shutdown(now=True)
                with pytest.raises(httpx.RemoteProtocolError):  # cut off, not ended
                    assert "data: [DONE]" not in [line async for line in answer]
            await it.reaches(State.STOPPED, 1)

    run(visit)


def test_unloaded_model_stops_too(tiny_model: Path, tmp_path: Path) -> None:
    async def visit() -> None:
        async with controlled(tiny_model, tmp_path) as (_, control):
            await control.unload("tiny")
            events = control.events()
            assert (await anext(events))["state"] == "stopped"
            await control.shutdown()
            assert [each["event"] async for each in events] == ["stopped"]

    run(visit)


def test_only_serve_changes_its_build(tiny_model: Path, tmp_path: Path) -> None:
    async def visit() -> None:
        async with controlled(tiny_model, tmp_path) as (_, control):
            for runtime in ("", "/new/llama-server"):
                with pytest.raises(Conflict, match="Only `llamasup serve` changes its build"):
                    await control.upgrade(runtime)

    run(visit)
