"""The ``openai`` client at the address of Ray Serve: requests that use no front, on a real Ray cluster."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.extended.fleet.rig import MODEL, Outcome, Rig, actor_and_llamasup, load_of
from tests.kit.fake_server import install
from tests.kit.paths import ROOT
from tests.kit.patience import PATIENCE_S, eventually

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
KEY = "sk-of-a-client-of-the-fleet"
SAY = [{"role": "user", "content": "Tell me a story"}]


def fresh(rig: Rig, *, fleet: Mapping[str, Any] | None = None, **more: Any) -> None:
    """A fleet with an ingress, and one key for its clients."""
    keys = rig.folder / "keys"
    keys.touch(0o600)
    keys.write_text(f"{KEY} name=client\n")
    rig.fresh(fleet={"ingress": True, **(fleet or {})}, auth={"api_key_file": keys.name}, **more)


def at_serve(rig: Rig, key: str = KEY) -> Any:
    return rig.client(rig.serve_port, key)


async def stream_of(client: Any, tokens: int, note: str = "") -> Any:
    return await client.chat.completions.create(
        model=MODEL, messages=SAY, max_tokens=tokens, stream=True, extra_body={"note": note}
    )


def test_client_of_ray_serve_is_served_from_no_replica_on(rig: Rig) -> None:
    import openai

    fresh(rig)

    async def play() -> None:
        assert not rig.llama_servers()
        async with at_serve(rig) as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
            stream = await stream_of(client, 20)
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason
            large = {"note": "x" * 6_000_000}  # more than a message of gRPC may have by default
            answer = await client.completions.create(
                model="gpt-tiny", prompt="Once", max_tokens=4, extra_body=large
            )
            assert answer.usage.completion_tokens == 4
            with pytest.raises(openai.NotFoundError, match="'nope' does not exist"):
                await client.chat.completions.create(model="nope", messages=SAY)
        async with at_serve(rig, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError, match="Invalid API Key"):
                await stranger.models.list()
        assert len(rig.llama_servers()) == 1
        await rig.until(lambda: not rig.llama_servers(), "the end of the idle replica")

    asyncio.run(play())


def test_requests_at_ray_serve_start_replicas_by_their_load(rig: Rig, tmp_path: Path) -> None:
    end = tmp_path / "end"
    slow = install(tmp_path / "llama-server", "token_s=0.05", f"until={end}")
    fresh(rig, runtime=str(slow), fleet={"min_replicas": 1})

    async def play() -> None:
        outcome = Outcome()
        async with at_serve(rig) as client, asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(rig.ask(client, outcome, tokens=2000))
            await rig.until(lambda: rig.running() == 2, "a second replica")
            end.touch()
        assert outcome.all_served

    asyncio.run(play())


def test_request_at_ray_serve_loads_the_model_on_one_of_the_sleeping_replicas(rig: Rig) -> None:
    fleet = {"when_idle": "sleep", "idle_after": "10s", "min_replicas": 2, "max_replicas": 2}
    # More slots than requests, because Serve may count one for a while after its end.
    fresh(rig, fleet=fleet, defaults={"ctx_size": 512, "parallel": 8, "threads": 1})

    def asleep() -> list[bool]:
        return sorted(bool(report.get("asleep")) for report in rig.reports_at_serve())

    async def play() -> None:
        async with at_serve(rig) as client:
            await rig.until(lambda: asleep() == [True, True], "the sleep of both")
            await client.completions.create(model=MODEL, prompt="Once", max_tokens=4)
            (server,) = rig.llama_servers()
            for words in ("Twice there was", "A third story", "Four animals"):
                await client.completions.create(model=MODEL, prompt=words, max_tokens=4)
            assert rig.llama_servers() == [server], "it had free slots"

    asyncio.run(play())


def test_requests_of_fronts_and_of_ray_serve_fill_the_slots_together(rig: Rig, tmp_path: Path) -> None:
    slow = install(tmp_path / "llama-server", "token_s=0.05")
    fresh(rig, runtime=str(slow), fleet={"min_replicas": 2, "max_replicas": 2})

    def busy() -> list[tuple[int, int]]:
        """Of each replica, as it told Serve: all requests, and those that entered at Serve."""
        return sorted((report.get("busy", 0), report.get("by_serve", 0)) for report in rig.reports_at_serve())

    async def play() -> None:
        async with rig.client() as front, at_serve(rig) as serve, AsyncExitStack() as streams:

            async def begin(client: Any, *expected: list[tuple[int, int]]) -> None:
                await streams.enter_async_context(await stream_of(client, 100_000))
                await rig.until(lambda: busy() in expected, f"one of {expected}")

            await begin(front, [(0, 0), (1, 0)])
            await begin(serve, [(1, 0), (1, 1)])
            await begin(serve, [(1, 0), (2, 2)], [(1, 1), (2, 1)])  # both have one free slot
            await begin(serve, [(2, 1), (2, 2)])

    asyncio.run(play())


@pytest.mark.parametrize("note", ["", "x" * 4_000_000], ids=["small", "large"])  # by gRPC, by Ray's store
def test_client_that_leaves_ray_serve_frees_its_slot(rig: Rig, tmp_path: Path, note: str) -> None:
    slow = install(tmp_path / "llama-server", "token_s=0.05")
    fresh(rig, runtime=str(slow), fleet={"min_replicas": 1})

    def busy() -> int:
        return sum(int(node["slots_busy"]) for node in rig.nodes_of_fleet())

    async def play() -> None:
        async with at_serve(rig) as client:
            stream = await stream_of(client, 100_000, note)
            await anext(aiter(stream))
            await rig.until(busy, "the request at the node")
            await stream.close()
            await rig.until(lambda: not busy(), "the free slot")

    asyncio.run(play())


def test_replica_that_is_killed_ends_its_stream_at_ray_serve_with_an_error(rig: Rig, tmp_path: Path) -> None:
    import openai

    slow = install(tmp_path / "llama-server", "token_s=0.05")
    fresh(rig, runtime=str(slow), fleet={"min_replicas": 1})

    async def play() -> None:
        async with at_serve(rig) as client:
            for number in (0, 1):  # the actor, and its llamasup
                await rig.until(rig.llama_servers, "a replica")
                outcome = Outcome()
                async with asyncio.timeout(2 * PATIENCE_S):
                    while not outcome.complete:  # until Serve has noticed the end of the one before
                        outcome = Outcome()
                        await rig.ask(client, outcome)
                stream = await stream_of(client, 100_000)
                (server,) = rig.llama_servers()
                with pytest.raises(openai.APIError, match="The replica of the model 'tiny' has ended"):
                    async for _ in stream:
                        actor_and_llamasup(server)[number].kill()
                        break
                    async for _ in stream:
                        pass

    asyncio.run(play())


@pytest.mark.extended
def test_ingress_that_is_killed_is_started_again_and_fronts_go_on(rig: Rig) -> None:
    fresh(rig, fleet={"min_replicas": 1})

    async def play() -> None:
        async with load_of(rig, 1) as front:
            await front.served(1)
            (ingress,) = rig.ray_processes("ray::ServeReplica:llamasup:ingress")
            ingress.kill()
            again = Outcome()
            async with at_serve(rig) as client, asyncio.timeout(2 * PATIENCE_S):
                while not again.complete:
                    await rig.ask(client, again)
            await front.served(1)
        assert front.all_served

    asyncio.run(play())


@pytest.mark.extended
def test_ingress_follows_a_directory_that_is_started_again(rig: Rig) -> None:
    fresh(rig)

    async def play() -> None:
        first, second = Outcome(), Outcome()
        async with at_serve(rig) as client:
            await rig.ask(client, first)
            (directory,) = rig.ray_processes("ray::ServeReplica:llamasup:directory")
            directory.kill()
            await rig.until(lambda: not rig.llama_servers(), "the end of the idle replica")
            await rig.ask(client, second)
        assert first.all_served
        assert second.all_served, "only the new directory knows the second replica"

    asyncio.run(play())


def test_second_turn_finds_its_cache_at_ray_serve(rig: Rig) -> None:
    fresh(
        rig,
        defaults={"ctx_size": 4096, "parallel": 2, "threads": 1},
        fleet={"min_replicas": 2, "max_replicas": 2, "idle_after": "10m"},
    )

    async def turn(client: Any, talk: list[dict[str, str]], number: int) -> tuple[int, int]:
        """The tokens of the prompt, and those of the cache."""
        words = " ".join(f"{number} water {place}" for place in range(40))
        talk.append({"role": "user", "content": words})
        answer = await client.chat.completions.create(model=MODEL, messages=talk, max_tokens=4, temperature=0)
        talk.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens

    async def play() -> None:
        talks: list[list[dict[str, str]]] = [[] for _ in range(4)]
        async with at_serve(rig) as client:
            first = [await turn(client, talk, number) for number, talk in enumerate(talks)]
            second = [await turn(client, talk, number) for number, talk in enumerate(talks)]
        for (prompt, _), (_, cached) in zip(first, second, strict=True):
            assert cached > prompt // 2, (first, second)

    asyncio.run(play())


@pytest.mark.extended
def test_update_waits_for_the_streams_at_ray_serve(rig: Rig, tmp_path: Path) -> None:
    end = tmp_path / "end"
    slow = install(tmp_path / "llama-server", "token_s=0.2", f"until={end}")
    fresh(rig, runtime=str(slow), fleet={"min_replicas": 1})

    async def play() -> None:
        outcome = Outcome()
        async with at_serve(rig) as client:
            asking = asyncio.get_running_loop().create_task(rig.ask(client, outcome, tokens=2000))
            await rig.until(lambda: any(n["slots_busy"] for n in rig.nodes_of_fleet()), "the request")
            before = {process.pid for process in rig.llama_servers()}
            (rig.folder / "keys").write_text("sk-another-key name=other\n")  # replaces the ingress too
            rig.write(
                runtime=str(slow),
                defaults={"ctx_size": 1024, "parallel": 2, "threads": 1},
                auth={"api_key_file": "keys"},
                fleet={"ingress": True, "min_replicas": 1, "surge": True},
            )
            deploying = asyncio.get_running_loop().create_task(asyncio.to_thread(rig.deploy))
            await rig.until(
                lambda: {process.pid for process in rig.llama_servers()} - before, "the new replica"
            )
            assert not asking.done()
            end.touch()
            await asking
            await deploying
        assert outcome.all_served
        served = Outcome()
        async with at_serve(rig, "sk-another-key") as client:
            await rig.ask(client, served)
        assert served.all_served

    asyncio.run(play())


def test_ingress_without_keys_is_not_deployed_where_other_machines_reach_it(rig: Rig) -> None:
    rig.write(fleet={"ingress": True})
    done = rig.run("deploy")
    assert done.returncode == 78, done.stderr
    assert "no API key is set" in done.stderr
    assert "auth.api_key_file" in done.stderr


# --- Ray's own tools ---------------------------------------------------------------------------------------


def serve_tool(rig: Rig, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {
        **os.environ,
        "RAY_ADDRESS": rig.cluster.address,
        "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{rig.dashboard_port}",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [str(Path(sys.executable).with_name("serve")), *arguments],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.extended
def test_tools_of_ray_serve_deploy_a_fleet(rig: Rig) -> None:
    fresh(rig)
    assert rig.run("down").returncode == 0

    async def is_served() -> None:
        outcome = Outcome()
        async with at_serve(rig) as client:
            await rig.ask(client, outcome)
        assert outcome.all_served

    run = serve_tool(
        rig, "run", "--name", "llamasup", "--non-blocking", "llamasup.fleet:app", f"config={rig.config}"
    )
    assert run.returncode == 0, run.stderr
    asyncio.run(is_served())
    assert rig.run("down").returncode == 0
    document = yaml.safe_load((ROOT / "configs" / "fleet" / "serve.yaml").read_text())
    document["http_options"]["port"] = rig.serve_port
    document["applications"][0]["args"]["config"] = str(rig.config)
    path = rig.folder / "serve.yaml"
    path.write_text(json.dumps(document))
    deploy = serve_tool(rig, "deploy", str(path))
    assert deploy.returncode == 0, deploy.stderr
    eventually(lambda: rig.status()["application"] == "running", "the application")
    asyncio.run(is_served())
    assert rig.run("down").returncode == 0
