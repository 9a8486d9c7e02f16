"""The life of a server in an event loop: its start, its methods, and every kind of end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import llamasup
from llamasup.core.config.config_keys import Auth, Config, Http, Memory
from llamasup.core.settings.model import ModelEntry
from llamasup.core.settings.units import Size
from llamasup.features.usage.settings import Usage
from tests.api.in_loop import in_loop
from tests.kit.children import NewChildren
from tests.kit.patience import PATIENCE_S

TEXT = {"prompt": "Hi", "max_tokens": 8}
SMALL = Config(memory=Memory(ram=Size(bytes=1 << 20)))


@pytest.fixture(autouse=True)
def no_leftovers(new_children: NewChildren) -> Iterator[None]:
    """Check that no child, no task and no open file is left."""
    yield
    gc.collect()
    assert new_children() == []


@contextlib.asynccontextmanager
async def serving(runtime: str, model: Path, **options: Any) -> AsyncIterator[llamasup.AsyncServer]:
    async with llamasup.serve(model, runtime=runtime, **options) as server:
        yield server
    await wait_for_other_tasks()


async def wait_for_other_tasks() -> None:
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def wait_for_load(events: llamasup.AsyncEvents) -> None:
    async for event in events:
        if event.get("state") in ("starting", "loading"):
            return


async def wait_for_requests(server: llamasup.AsyncServer, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while server.status()["models"][0]["in_flight"] < count:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.01)


@in_loop
async def test_server_serves_and_reports_its_models(fake: str, tiny_model: Path) -> None:
    async with serving(fake, tiny_model) as server:
        answer = await server.client.post("/v1/completions", json=TEXT)
        assert answer.status_code == 200
        (model,) = server.status()["models"]
        assert (model["id"], model["state"]) == ("tiny", "ready")
        assert server.why()["sentences"][0].startswith("tiny was loaded ")
        assert server.why("tiny")["model"] == "tiny"
        with pytest.raises(llamasup.ModelUnknown):
            server.why("tinny")
        assert repr(server) == f"<llamasup.AsyncServer at {server.url}>"
    assert repr(server) == f"<llamasup.AsyncServer at {server.url} (ended)>"


@in_loop
async def test_model_without_preload_is_loaded_by_its_first_request(fake: str, tiny_model: Path) -> None:
    async with serving(fake, tiny_model, preload=False, name="small", aliases=["tiny"]) as server:
        assert server.status()["models"][0]["state"] == "stopped"
        answer = await server.client.post("/v1/completions", json={"model": "tiny", **TEXT})
        assert answer.status_code == 200
        assert server.status()["models"][0]["id"] == "small"


@in_loop
async def test_usage_counts_the_requests_of_each_model(fake: str, tiny_model: Path) -> None:
    async with serving(fake, tiny_model) as server:
        assert (await server.usage())["rows"] == []
        await server.client.post("/v1/completions", json=TEXT)
        (row,) = (await server.usage(by="model,day", since="1d"))["rows"]
        assert (row["model"], row["requests"], row["errors"], row["tokens_completion"]) == ("tiny", 1, 0, 8)
        with pytest.raises(llamasup.UsageInvalid):
            await server.usage(by="week")
    with pytest.raises(llamasup.NotRunning):
        await server.usage()


@in_loop
async def test_requests_are_listed(fake: str, tiny_model: Path) -> None:
    async with serving(fake, tiny_model) as server:
        assert await server.requests(ended=200) == {"live": [], "ended": [], "ended_total": 0}
        await server.client.post("/v1/completions", json=TEXT, headers={"X-Request-Id": "mine"})
        (ended,) = (await server.requests(ended=1))["ended"]
        assert (ended["request_id"], ended["outcome"], ended["tokens_completion"]) == ("mine", "ok", 8)
        assert (await server.requests())["ended"] == []
        for number in (-1, 201):
            with pytest.raises(llamasup.UsageInvalid, match=f"ended={number}"):
                await server.requests(ended=number)
        with pytest.raises(llamasup.RequestUnknown):
            server.cancel("mine")
    with pytest.raises(llamasup.NotRunning):
        await server.requests()
    with pytest.raises(llamasup.NotRunning):
        server.cancel("mine")


@in_loop
async def test_usage_can_be_switched_off(fake: str, tiny_model: Path, own_folders: Path) -> None:
    config = Config(features={"usage": Usage(enabled=False)})
    async with llamasup.serve(tiny_model, runtime=fake, config=config) as server:
        await server.client.post("/v1/completions", json=TEXT)
        usage = await server.usage()
        assert usage["rows"] == []
        assert "does not count" in usage["problem"]
    assert not (own_folders / "state" / "llamasup" / "usage.sqlite").exists()


@in_loop
async def test_server_can_listen_on_a_unix_socket(fake: str, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "llm.sock"
    async with serving(fake, tiny_model, host=str(path)) as server:
        assert server.url == "http://localhost"
        assert (await server.client.get("/health")).status_code == 200
        assert path.is_socket()
    assert not path.exists()


@in_loop
async def test_api_key_is_required_and_sent_by_the_client(fake: str, tiny_model: Path) -> None:
    async with serving(fake, tiny_model, api_key="s3cret") as server:
        assert (await server.client.get("/v1/models")).status_code == 200
        async with httpx.AsyncClient(trust_env=False) as stranger:
            assert (await stranger.get(f"{server.url}/v1/models")).status_code == 401
        assert "s3cret" not in repr(server)


@pytest.mark.parametrize("where", ["a file", "the environment"])
@in_loop
async def test_client_has_its_own_key_if_keys_come_from_elsewhere(
    where: str, fake: str, tiny_model: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"environ": {**os.environ, "LLAMASUP_API_KEY": "s3cret"}}
    if where == "a file":
        keys = tmp_path / "keys"
        keys.touch(0o600)
        keys.write_text("s3cret name=alice\n")
        options = {"config": {"auth": {"api_key_file": keys}}}
    async with serving(fake, tiny_model, **options) as server:
        assert (await server.client.post("/v1/completions", json=TEXT)).status_code == 200
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as other:
            assert (await other.get("/v1/models")).status_code == 401
            theirs = {"authorization": "Bearer s3cret"}
            assert (await other.get("/v1/models", headers=theirs)).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@in_loop
async def test_url_is_reachable_if_the_server_listens_on_every_address(
    host: str, fake: str, tiny_model: Path
) -> None:
    async with serving(fake, tiny_model, host=host, api_key="k") as server:
        assert (await server.client.get("/v1/models")).status_code == 200


@in_loop
async def test_address_errors_name_the_arguments_of_the_call(fake: str) -> None:
    with pytest.raises(llamasup.UnsafeBind) as caught:
        async with llamasup.serve("demo", runtime=fake, host="0.0.0.0"):
            pytest.fail("it serves")
    assert caught.value.message == "host='0.0.0.0' can be reached from other machines, and no API key is set."
    assert "api_key" in caught.value.remedy
    assert "--" not in caught.value.remedy


@in_loop
async def test_client_trusts_only_the_certificate_of_the_server(
    fake: str, tiny_model: Path, certificate: tuple[str, str]
) -> None:
    chain, key = map(Path, certificate)
    config = Config(http=Http(tls_cert=chain, tls_key=key))
    async with serving(fake, tiny_model, config=config) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert (await server.client.get("/health")).status_code == 200
        async with httpx.AsyncClient(verify=ssl.create_default_context(), trust_env=False) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(server.url)


@in_loop
async def test_calls_without_a_name_use_the_only_or_the_default_model(fake: str, tiny_model: Path) -> None:
    two = {name: ModelEntry(path=str(tiny_model), ctx_size=size) for name, size in (("a", 512), ("b", 1024))}
    async with llamasup.serve(config=Config(models=two, default_model="b"), runtime=fake) as server:
        await server.load()
        assert {model["id"]: model["state"] for model in server.status()["models"]} == {
            "a": "stopped",
            "b": "ready",
        }
        await server.restart()
        await server.unload()
        assert server.status()["models"][1]["state"] == "stopped"
    async with llamasup.serve(config=Config(models=two), runtime=fake) as server:
        for request in (server.load, server.unload, server.restart):
            with pytest.raises(llamasup.UsageInvalid, match="Several models are served"):
                await request()
        with pytest.raises(llamasup.UsageInvalid, match="Several models are served"):
            await server.switch("demo")
        with pytest.raises(llamasup.ModelUnknown) as caught:
            await server.load("c")
        assert "a" in caught.value.remedy


# --- failed starts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "/nowhere/x.gguf"}, llamasup.ModelMissing),
        ({"model": __file__}, llamasup.ModelInvalid),
        ({"model": "demo", "runtime": "/nowhere/llama-server"}, llamasup.RuntimeMissing),
        ({"model": "demo", "name": "no name"}, llamasup.ConfigInvalid),
        ({"model": "demo", "name": "all*"}, llamasup.ConfigInvalid),
        ({"model": "demo", "port": 70_000}, llamasup.UsageInvalid),
        ({"models_dir": "/nowhere/models"}, llamasup.ModelMissing),
        ({"models_dir": __file__}, llamasup.ModelMissing),
        ({"model": "demo", "host": "http://localhost"}, llamasup.UsageInvalid),
        ({"model": "demo", "host": "0.0.0.0"}, llamasup.UnsafeBind),
        ({"model": "demo", "host": "192.0.2.1", "api_key": "k"}, llamasup.PortNotAllowed),
        ({"model": "demo", "config": SMALL}, llamasup.DoesNotFit),
        ({"model": "demo", "ctx_size": 1 << 30}, llamasup.UsageInvalid),
        ({"model": "demo", "extra": ["--no-such-flag"]}, llamasup.LlamasupError),
        ({"config": "/nowhere/config.yaml"}, llamasup.ConfigInvalid),
        ({"config": Config(auth=Auth(api_key_file=Path("/nowhere/keys")))}, llamasup.ConfigInvalid),
    ],
)
@in_loop
async def test_start_errors_are_raised_with_their_class(
    options: dict[str, Any], error: type[llamasup.LlamasupError], fake: str
) -> None:
    with pytest.raises(error) as caught:
        async with llamasup.serve(**{"runtime": fake, **options}):
            pytest.fail("it serves")
    assert caught.value.message
    await wait_for_other_tasks()


@in_loop
async def test_error_for_a_port_in_use_names_the_port(fake: str, tiny_model: Path) -> None:
    async with serving(fake, tiny_model) as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(llamasup.PortInUse, match=str(port)):
            async with llamasup.serve(tiny_model, runtime=fake, port=port):
                pytest.fail("both serve")
        assert (await first.client.get("/health")).status_code == 200


@in_loop
async def test_exit_during_the_load_is_raised_with_the_last_log_lines(
    fake_server: Callable[..., str], tiny_model: Path
) -> None:
    with pytest.raises(llamasup.ServerFailed) as caught:
        async with llamasup.serve(tiny_model, runtime=fake_server("out_of_memory=device")):
            pytest.fail("it serves")
    assert caught.value.lines
    await wait_for_other_tasks()


@in_loop
async def test_cancellation_during_the_load_leaves_nothing_behind(
    fake_server: Callable[..., str], tiny_model: Path
) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0), llamasup.serve(tiny_model, runtime=fake_server("load_s=1000")):
            pytest.fail("it serves")
    await wait_for_other_tasks()


@in_loop
async def test_cancellation_at_once_leaves_nothing_behind(fake: str, tiny_model: Path) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), llamasup.serve(tiny_model, runtime=fake):
            pytest.fail("it serves")
    await wait_for_other_tasks()


@in_loop
async def test_server_cannot_be_entered_twice_but_can_be_started_again(fake: str, tiny_model: Path) -> None:
    serving = llamasup.serve(tiny_model, runtime=fake)
    async with serving as first:
        with pytest.raises(llamasup.UsageInvalid, match="already"):
            async with serving:
                pytest.fail("it serves twice")
        with pytest.raises(llamasup.UsageInvalid, match="already"):
            serving.start()
        assert (await first.client.get("/health")).status_code == 200
        await first.switch("demo")
    async with serving as second:
        assert second is not first
        assert second.status()["models"][0]["id"] == "tiny"
    with serving as third:
        assert third.status()["models"][0]["state"] == "ready"


# --- ends --------------------------------------------------------------------------------------------


async def finish_during_drain(server: llamasup.AsyncServer, go: Path) -> None:
    """Let the requests in flight continue (``until=``) once the server drains."""
    async for event in server.events():
        if event.get("state") == "draining":
            go.touch()  # noqa: ASYNC240 - one file


@in_loop
async def test_leaving_the_block_lets_requests_in_flight_finish(
    fake_server: Callable[..., str], tiny_model: Path, tmp_path: Path
) -> None:
    runtime = fake_server("token_s=600", f"until={tmp_path / 'go'}")
    async with asyncio.TaskGroup() as tasks:
        async with llamasup.serve(tiny_model, runtime=runtime, warm_up=False) as server:
            answers = [tasks.create_task(server.client.post("/v1/completions", json=TEXT)) for _ in range(3)]
            await wait_for_requests(server, 3)
            tasks.create_task(finish_during_drain(server, tmp_path / "go"))
            await asyncio.sleep(0)
        assert all(answer.done() for answer in answers)
    assert [answer.result().status_code for answer in answers] == [200] * 3


@in_loop
async def test_exception_in_the_block_does_not_wait_for_requests(
    fake_server: Callable[..., str], tiny_model: Path
) -> None:
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(ZeroDivisionError):
            async with llamasup.serve(tiny_model, runtime=fake_server("stall_after=2")) as server:
                answer = tasks.create_task(server.client.post("/v1/completions", json=TEXT))
                await wait_for_requests(server, 1)
                raise ZeroDivisionError
    assert answer.result().status_code in (502, 503)


@in_loop
async def test_cancellation_during_a_graceful_stop_stops_at_once(
    fake_server: Callable[..., str], tiny_model: Path
) -> None:
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                async with llamasup.serve(tiny_model, runtime=fake_server("stall_after=2")) as server:
                    events = server.events()
                    asking = server.client.post("/v1/completions", json=TEXT)
                    tasks.create_task(suppressed(asking))
                    await wait_for_requests(server, 1)
                    tasks.create_task(reschedule_when_draining(events, limit))
    with pytest.raises(llamasup.NotRunning):
        server.status()


async def suppressed(asking: Any) -> None:
    with contextlib.suppress(httpx.HTTPError):
        await asking


async def reschedule_when_draining(events: llamasup.AsyncEvents, limit: asyncio.Timeout) -> None:
    async for event in events:
        if event.get("state") == "draining":
            limit.reschedule(0)
            return


@in_loop
async def test_stop_can_be_repeated_concurrently_and_stays_graceful(
    fake_server: Callable[..., str], tiny_model: Path, tmp_path: Path
) -> None:
    runtime = fake_server("token_s=600", f"until={tmp_path / 'go'}")
    async with llamasup.serve(tiny_model, runtime=runtime, warm_up=False) as server:
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(server.client.post("/v1/completions", json=TEXT))
            await wait_for_requests(server, 1)
            tasks.create_task(finish_during_drain(server, tmp_path / "go"))
            await asyncio.sleep(0)
            for _ in range(3):
                tasks.create_task(server.stop())
        assert answer.result().status_code == 200
        await server.stop()
    await server.stop()
    await wait_for_other_tasks()


@in_loop
async def test_stop_now_ends_a_graceful_stop_that_waits_for_requests(
    fake_server: Callable[..., str], tiny_model: Path
) -> None:
    runtime = fake_server("stall_after=2")
    async with llamasup.serve(tiny_model, runtime=runtime) as server, asyncio.TaskGroup() as tasks:
        tasks.create_task(suppressed(server.client.post("/v1/completions", json=TEXT)))
        await wait_for_requests(server, 1)
        events = server.events()
        tasks.create_task(server.stop())
        async for event in events:
            if event.get("state") == "draining":
                break
        await server.stop(now=True)


@in_loop
async def test_calls_after_the_end_raise_not_running(fake: str, tiny_model: Path) -> None:
    async with llamasup.serve(tiny_model, runtime=fake) as server:
        await server.stop()
        requests: list[Callable[[], Any]] = [
            server.status,
            server.events,
            lambda: server.client,
        ]
        for request in requests:
            with pytest.raises(llamasup.NotRunning, match="has stopped"):
                request()
        for work in (
            server.load("tiny"),
            server.unload("tiny"),
            server.restart("tiny"),
            server.reload(),
            server.switch("demo"),
        ):
            with pytest.raises(llamasup.NotRunning, match="has stopped"):
                await work


@in_loop
async def test_calls_during_the_stop_are_refused_and_waiting_calls_end(
    fake_server: Callable[..., str], tiny_model: Path
) -> None:
    runtime = fake_server("load_s=1000")
    async with llamasup.serve(tiny_model, runtime=runtime, preload=False) as server:
        events = server.events()
        async with asyncio.TaskGroup() as tasks:
            load = tasks.create_task(outcome(server.load()))
            await wait_for_load(events)
            restart = tasks.create_task(outcome(server.restart()))
            await asyncio.sleep(0)
            await server.stop()
        assert isinstance(load.result(), llamasup.Stopping)
        assert isinstance(restart.result(), llamasup.Stopping)


@pytest.mark.parametrize("now", [True, False])
@in_loop
async def test_changes_of_a_model_during_the_stop_are_not_reported_as_done(
    now: bool, fake_server: Callable[..., str], tiny_model: Path
) -> None:
    runtime = fake_server("load_s=1.0")
    requests: list[Callable[[llamasup.AsyncServer], Any]] = [
        lambda server: server.switch(tiny_model, ctx_size=2048),
        lambda server: server.restart(),
    ]
    for request in requests:
        async with serving(runtime, tiny_model) as server, asyncio.TaskGroup() as tasks:
            events = server.events()
            answer = tasks.create_task(outcome(request(server)))
            await wait_for_load(events)
            await server.stop(now=now)
        assert isinstance(answer.result(), llamasup.Stopping)


async def outcome(work: Any) -> Any:
    try:
        return await work
    except llamasup.LlamasupError as error:
        return error


@in_loop
async def test_events_end_with_the_server(fake: str, tiny_model: Path) -> None:
    async with llamasup.serve(tiny_model, runtime=fake) as server:
        one, other = server.events(), server.events()
        await server.restart()
        await server.stop()
    reported = [event async for event in one]
    assert [event["state"] for event in reported if event["event"] == "state"][-1] == "stopped"
    assert "ready" in [event.get("state") for event in reported]
    assert reported[-1] == {"event": "stopped", "protocol": 1}
    assert [event async for event in other] == reported


@in_loop
async def test_unloaded_model_stays_unloaded_after_switches(fake: str, tiny_model: Path) -> None:
    async with serving(fake, tiny_model) as server:
        await server.unload()
        events = server.events()
        for options in ({"ttl_s": 600.0}, {"ctx_size": 2048}, {"ctx_size": 1024}):
            await server.switch(tiny_model, **options)
            await asyncio.sleep(0.1)  # nothing is to happen, so that nothing tells when it would have
        assert (await server.reload())["unchanged"]
        await server.stop()
        assert [event async for event in events if event["event"] == "state"] == []


@in_loop
async def test_failed_switch_is_rolled_back_even_if_cancelled(
    fake: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await asyncio.to_thread(shutil.copy, tiny_model, tmp_path / "other.gguf")
    async with serving(fake, tiny_model) as server, asyncio.TaskGroup() as tasks:
        hosted = server._hosted
        reload, putting_back, reloads = hosted.reload, asyncio.Event(), 0

        async def slow() -> Any:
            nonlocal reloads
            reloads += 1
            if reloads == 2:  # a folder that takes long to read
                putting_back.set()
                await asyncio.sleep(PATIENCE_S)
            return await reload()

        async def fails(model: str) -> None:
            raise llamasup.ServerFailed(model, cause="unknown", exit_code=75)

        monkeypatch.setattr(hosted, "reload", slow)
        monkeypatch.setattr(hosted, "settled", fails)
        switch = tasks.create_task(server.switch(other))
        await putting_back.wait()
        assert hosted.registry.specs["tiny"].source == str(other)
        switch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await switch
        async with asyncio.timeout(PATIENCE_S):
            while hosted.registry.specs["tiny"].source != str(tiny_model):  # noqa: ASYNC110 - nobody tells it
                await asyncio.sleep(0.01)


@in_loop
async def test_server_stopped_from_outside_has_ended(fake: str, tiny_model: Path) -> None:
    async with llamasup.serve(tiny_model, runtime=fake) as server:
        events = server.events()
        server._hosted.control_target.shutdown()  # as llamasup stop does it
        assert [event["event"] async for event in events][-1] == "stopped"
        with pytest.raises(llamasup.NotRunning):
            server.status()
        with pytest.raises(llamasup.NotRunning):
            server.why()


def test_server_left_open_at_the_end_of_the_loop_leaves_nothing_behind(fake: str, tiny_model: Path) -> None:
    async def main() -> llamasup.AsyncServer:
        return await llamasup.serve(tiny_model, runtime=fake).__aenter__()

    server = asyncio.run(main(), debug=True)
    with pytest.raises(llamasup.NotRunning):
        server.status()


def test_calls_from_another_event_loop_are_refused(fake: str, tiny_model: Path) -> None:
    async def elsewhere(server: llamasup.AsyncServer) -> None:
        for work in (server.load(), server.stop(), server.switch("demo"), server.reload()):
            with pytest.raises(llamasup.UsageInvalid, match="another event loop"):
                await work

    async def main() -> None:
        async with llamasup.serve(tiny_model, runtime=fake) as server:
            await asyncio.to_thread(lambda: asyncio.run(elsewhere(server)))
            assert server.status()["models"][0]["state"] == "ready"

    asyncio.run(main())


def test_server_can_be_left_in_another_task_than_it_was_entered(fake: str, tiny_model: Path) -> None:
    """As fixtures of asynchronous tests do."""

    async def main() -> None:
        serving = llamasup.serve(tiny_model, runtime=fake)
        async with asyncio.TaskGroup() as tasks:
            server = await tasks.create_task(serving.__aenter__())
            assert (await server.client.get("/health")).status_code == 200
            await tasks.create_task(serving.__aexit__(None, None, None))
        await wait_for_other_tasks()

    asyncio.run(main())
