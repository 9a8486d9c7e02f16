"""Switches of the model behind a name, with a real llama-server: no request is lost, whatever the result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import llamasup
from llamasup.core.config.config_keys import Config, Memory
from llamasup.core.settings.model import ModelEntry
from llamasup.core.settings.units import Size
from tests.api.in_loop import in_loop
from tests.kit.models import truncated_decoder
from tests.kit.patience import PATIENCE_S
from tests.kit.tiny import tiny_decoder

pytestmark = pytest.mark.one_runtime

SHORT = {"prompt": "Once upon", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "Once upon", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
REQUESTS = 20


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    path = tmp_path / "other.gguf"
    path.write_bytes(tiny_decoder())
    return path


@asynccontextmanager
async def serving(model: Path, runtime: str, **options: Any) -> AsyncIterator[llamasup.AsyncServer]:
    options_used = {"ctx_size": 512, "parallel": 2, **options}
    async with llamasup.serve(model, name="chat", runtime=runtime, **options_used) as server:
        yield server


async def memory_for_one(model: Path, runtime: str) -> Config:
    """A config with memory for one instance of the model, but not for two."""
    async with serving(model, runtime) as server:
        needs_bytes = server.status()["models"][0]["needs_bytes"]["ram"]
    return Config(memory=Memory(ram=Size(bytes=int(needs_bytes * 1.5))))


def model_status(server: llamasup.AsyncServer) -> Any:
    (model,) = server.status()["models"]
    return model


async def statuses(server: llamasup.AsyncServer, body: dict[str, Any], count: int) -> list[int]:
    work = [server.client.post("/v1/completions", json={"model": "chat", **body}) for _ in range(count)]
    return [answer.status_code for answer in await asyncio.gather(*work)]


async def until_requests_wait(server: llamasup.AsyncServer) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not (model_status(server)["in_flight"] and model_status(server)["queued"]):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("room", ["for two", "for one"])
@in_loop
async def test_switch_loses_neither_running_nor_queued_requests(
    room: str, runtime: str, tiny_model: Path, other_model: Path
) -> None:
    """The new model is loaded while the old one serves, or after the old one is unloaded."""
    config = None if room == "for two" else await memory_for_one(tiny_model, runtime)
    async with serving(tiny_model, runtime, config=config) as server, asyncio.TaskGroup() as tasks:
        events = server.events()
        answers = tasks.create_task(statuses(server, LONG, REQUESTS))
        await until_requests_wait(server)
        await server.switch(other_model, ctx_size=1024, parallel=2)
        assert model_status(server)["ctx_size"] == 1024
        assert await answers == [200] * REQUESTS
        assert await statuses(server, SHORT, 1) == [200]
        await server.stop()
        unload_reasons = [event["reason"] async for event in events if event["event"] == "unload"]
    assert unload_reasons == ([] if room == "for two" else ["changed"])


@in_loop
async def test_switch_to_unusable_model_is_refused_and_changes_nothing(
    runtime: str, tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(truncated_decoder())
    config = await memory_for_one(tiny_model, runtime)
    refused: list[tuple[type[llamasup.LlamasupError], Any, llamasup.ModelArguments]] = [
        (llamasup.ModelInvalid, broken, {}),
        (llamasup.ModelMissing, tmp_path / "nothing.gguf", {}),
        (llamasup.DoesNotFit, other_model, {"ctx_size": 32768, "parallel": 16, "kv_type": "f16"}),
        (llamasup.UsageInvalid, other_model, {"ctx_size": -1}),
        (llamasup.UsageInvalid, other_model, {"aliases": ["a*b"]}),
    ]
    async with serving(tiny_model, runtime, config=config) as server:
        before = model_status(server)
        for error, model, options in refused:
            with pytest.raises(error):
                await server.switch(model, **options)
            after = model_status(server)
            assert (after["pid"], after["ctx_size"]) == (before["pid"], before["ctx_size"]), error
            assert await statuses(server, SHORT, 2) == [200, 200]
        assert (await server.reload())["unchanged"] == ["chat"]
        await server.switch(other_model, ctx_size=1024, parallel=1)  # a valid switch still works
        assert model_status(server)["ctx_size"] == 1024


@pytest.mark.parametrize("room", ["for two", "for one"])
@in_loop
async def test_old_model_serves_again_if_llama_server_fails_with_the_new_one(
    room: str, runtime: str, tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    config = None if room == "for two" else await memory_for_one(tiny_model, runtime)
    adapter = tmp_path / "adapter.gguf"
    adapter.write_bytes(b"GGUF, but no more than that")
    async with serving(tiny_model, runtime, config=config) as server, asyncio.TaskGroup() as tasks:
        answers = tasks.create_task(statuses(server, LONG, REQUESTS))
        await until_requests_wait(server)
        with pytest.raises((llamasup.ServerFailed, llamasup.GaveUp)):
            await server.switch(other_model, ctx_size=1024, extra=["--lora", str(adapter)])
        assert await answers == [200] * REQUESTS
        after = model_status(server)
        assert (after["state"], after["ctx_size"]) == ("ready", 512)
        assert await statuses(server, SHORT, 3) == [200] * 3


@in_loop
async def test_failed_switch_does_not_affect_later_switches(
    runtime: str, tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter.gguf"
    adapter.write_bytes(b"GGUF, but no more than that")
    async with serving(tiny_model, runtime) as server:
        pid = model_status(server)["pid"]
        with pytest.raises((llamasup.ServerFailed, llamasup.GaveUp)):
            await server.switch(other_model, ctx_size=1024, extra=["--lora", str(adapter)])
        await server.switch(tiny_model, ctx_size=512, parallel=2)  # which serves
        assert model_status(server)["pid"] == pid
        await server.unload()
        await server.switch(other_model, ctx_size=1024)
        assert await statuses(server, SHORT, 1) == [200]
        assert model_status(server)["ctx_size"] == 1024


@in_loop
async def test_two_models_with_one_file_share_one_process(
    runtime: str, tiny_model: Path, other_model: Path
) -> None:
    models = {"a": ModelEntry(path=str(tiny_model)), "b": ModelEntry(path=str(other_model), preload=True)}
    async with llamasup.serve(config=Config(models=models), runtime=runtime) as server:
        await server.switch(tiny_model, name="b")
        (both,) = server.status()["models"]
        assert (both["id"], both["aliases"], both["state"]) == ("a", ["b"], "ready")
        assert await statuses(server, {**SHORT, "model": "b"}, 1) == [200]
        await server.switch(other_model, name="b", ctx_size=1024)  # each model has its own process again
        assert [(model["id"], model["state"]) for model in server.status()["models"]] == [
            ("a", "ready"),
            ("b", "ready"),
        ]


@in_loop
async def test_switch_of_unloaded_model_does_not_load_it(
    runtime: str, tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    async with serving(tiny_model, runtime, preload=False) as server:
        await server.switch(other_model, ctx_size=1024)
        assert model_status(server)["state"] == "stopped"
        with pytest.raises(llamasup.ModelMissing):
            await server.switch(tmp_path / "nothing.gguf")
        assert await statuses(server, SHORT, 1) == [200]
        assert model_status(server)["ctx_size"] == 1024


@in_loop
async def test_model_can_be_switched_during_its_load(
    runtime: str, tiny_model: Path, other_model: Path
) -> None:
    async with serving(tiny_model, runtime, preload=False) as server, asyncio.TaskGroup() as tasks:
        events = server.events()
        answers = tasks.create_task(statuses(server, SHORT, 3))
        load = tasks.create_task(server.load())
        async for event in events:
            if event.get("state") == "starting":
                break
        await server.switch(other_model, ctx_size=1024)
        await load
        assert await answers == [200] * 3
        assert (model_status(server)["state"], model_status(server)["ctx_size"]) == ("ready", 1024)


@in_loop
async def test_concurrent_switches_run_one_after_the_other(
    runtime: str, tiny_model: Path, other_model: Path
) -> None:
    async with serving(tiny_model, runtime) as server, asyncio.TaskGroup() as tasks:
        answers = tasks.create_task(statuses(server, LONG, REQUESTS))
        await until_requests_wait(server)
        switches = [
            tasks.create_task(server.switch(other_model, ctx_size=size)) for size in (1024, 768, 1280)
        ]
        await asyncio.wait(switches)
        assert await answers == [200] * REQUESTS
        assert model_status(server)["ctx_size"] == 1280


@in_loop
async def test_cancelled_stream_ends_with_the_error_event_and_frees_its_slot(
    runtime: str, tiny_model: Path
) -> None:
    async with serving(tiny_model, runtime, parallel=1, ctx_size=32_768) as server:
        ask = {**LONG, "model": "chat", "max_tokens": 30_000, "stream": True}
        headers = {"X-Request-Id": "mine"}
        lines = []
        with pytest.raises(httpx.RemoteProtocolError):  # no last chunk: the answer is not complete
            async with server.client.stream("POST", "/v1/completions", json=ask, headers=headers) as answer:
                async for line in answer.aiter_lines():
                    lines.append(line)
                    if len(lines) == 1:
                        (live,) = (await server.requests())["live"]
                        assert (live["id"], live["model"], live["phase"]) == ("mine", "chat", "generating")
                        (cancelled,) = server.cancel("mine")["cancelled"]
                        assert cancelled["id"] == "mine"
        last = [line for line in lines if line.startswith("data: ")][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["cause"] == "cancelled"
        (ended,) = (await server.requests(ended=1))["ended"]
        assert (ended["request_id"], ended["outcome"]) == ("mine", "cancelled")
        assert await statuses(server, SHORT, 1) == [200]  # in the only slot
        assert model_status(server)["in_flight"] == 0


@in_loop
async def test_cancelled_switch_is_rolled_back(runtime: str, tiny_model: Path, other_model: Path) -> None:
    async with serving(tiny_model, runtime) as server, asyncio.TaskGroup() as tasks:
        answers = tasks.create_task(statuses(server, LONG, REQUESTS))
        await until_requests_wait(server)
        events = server.events()
        switch = tasks.create_task(server.switch(other_model, ctx_size=1024))
        async for event in events:
            if event.get("state") == "starting":
                break
        switch.cancel()
        assert await answers == [200] * REQUESTS
        async with asyncio.timeout(PATIENCE_S):
            while (model_status(server)["state"], model_status(server)["ctx_size"]) != ("ready", 512):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await statuses(server, SHORT, 1) == [200]


def test_synchronous_server_can_switch_models(runtime: str, tiny_model: Path, other_model: Path) -> None:
    with llamasup.serve(tiny_model, runtime=runtime, ctx_size=512) as server:
        server.switch(other_model, ctx_size=1024)
        assert server.status()["models"][0]["ctx_size"] == 1024
        assert server.client.post("/v1/completions", json=SHORT).status_code == 200
