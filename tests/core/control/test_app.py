"""The control application on its private socket, and the models when it breaks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from llamasup.core.control.app import ControlServer
from llamasup.core.llama_server import client as probe
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.events import Bus, PublishedEvent, Ready, StateChanged, Stopped
from llamasup.core.supervision.states import State
from llamasup.service.hosting import Service
from llamasup.service.options import RunOptions
from tests.kit.fake_server import install


class Running:
    """A service of this very process, with the fake server."""

    def __init__(self, model: Path, runtime: Path) -> None:
        self.bus = Bus()
        self.notices: list[PublishedEvent] = []
        self.bus.listen(self.notices.append)
        self.service = Service(
            RunOptions(model=str(model), settings=Settings(alias="tiny,small"), runtime=str(runtime), port=0),
            self.bus,
        )

    async def until_ready(self) -> str:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def listen(notice: PublishedEvent) -> None:
            if isinstance(notice, Ready):
                ready.set_result(notice.address.url)

        self.bus.listen(listen)
        return await ready


def serve(running: Running, visit: Callable[[httpx.AsyncClient], object]) -> None:
    async def both() -> None:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(running.service.run())
            url = await running.until_ready()
            async with httpx.AsyncClient(base_url=url) as client:
                await visit(client)  # type: ignore[misc]
            running.service.ask_stop()
            await task

    asyncio.run(both())


@pytest.fixture
def running(tiny_model: Path, tmp_path: Path) -> Running:
    return Running(tiny_model, install(tmp_path / "llama-server"))


def test_status_over_the_private_socket_has_the_shape_of_the_contract(running: Running) -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        runner = running.service.runner
        assert runner is not None
        assert runner.plan is not None
        socket_path = str(Path(runner.plan.env["XDG_CONFIG_HOME"]) / "control.sock")
        transport = httpx.AsyncHTTPTransport(uds=socket_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as private:
            status = (await private.get("/llamasup/v1/status")).json()
        assert set(status) >= {"version", "pid", "url", "uptime_s", "models"}
        (model,) = status["models"]
        assert set(model) >= {
            *("id", "aliases", "state", "generation", "pid", "restarts", "in_flight", "queued"),
            *("slots", "ctx_size", "memory", "until", "last_exit"),
        }
        assert (model["id"], model["state"], model["generation"]) == ("tiny", "ready", 1)
        assert model["aliases"] == ["small"]
        assert model["pid"] == runner.pid
        assert model["memory"]["ram_bytes"] > 0
        assert model["last_exit"] is None
        # Over TCP it stays closed: nobody has a key for it.
        assert (await client.get("/llamasup/v1/status")).status_code == 403

    serve(running, visit)


def test_broken_control_application_does_not_end_the_models(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: ControlServer) -> None:
        raise ImportError("no starlette")

    monkeypatch.setattr(ControlServer, "_load", broken)

    async def visit(client: httpx.AsyncClient) -> None:
        for _ in range(2):
            assert (await client.get("/metrics")).status_code in (502, 503)
        answer = await client.post("/completion", json={"prompt": "x", "n_predict": 2})
        assert answer.status_code == 200

    serve(running, visit)
    states = [notice.state for notice in running.notices if isinstance(notice, StateChanged)]
    assert states[-4:] == [State.READY, State.DRAINING, State.STOPPING, State.STOPPED]
    assert isinstance(running.notices[-1], Stopped)
    assert "control application failed" in caplog.text


def test_hanging_server_only_omits_its_own_metrics(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "METRICS_TIMEOUT_S", 0.05)

    async def visit(client: httpx.AsyncClient) -> None:
        runner = running.service.runner
        assert runner is not None
        assert runner.pid is not None
        os.kill(runner.pid, signal.SIGSTOP)
        try:
            text = (await client.get("/metrics")).text
        finally:
            os.kill(runner.pid, signal.SIGCONT)
        assert 'llamasup_instance_state{model="tiny",state="ready"} 1.0' in text
        assert "llamacpp:" not in text

    serve(running, visit)


def test_scrape_does_not_count_as_a_request_to_the_model(running: Running) -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        for _ in range(2):
            answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'llamasup_requests_total{code="200",model="",route="/metrics"} 1.0' in answer.text
        assert 'llamasup_request_seconds_count{model="tiny"} 0.0' in answer.text

    serve(running, visit)
