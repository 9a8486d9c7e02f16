"""A fleet on a real Ray cluster with real llama-servers, used by the openai client through a front.

The tests use one cluster, since it takes half a minute to start. Each waits for what it needs.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import httpx
import pytest

from tests.fleet.rig import MODEL, Outcome, Rig

pytestmark = [pytest.mark.fleet, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]


def test_first_request_starts_a_replica_and_is_served(rig: Rig) -> None:
    async def play() -> None:
        await rig.until(lambda: rig.running() == 0, "no replica")
        outcome = Outcome()
        async with rig.client() as client:
            assert [model.id for model in (await client.models.list()).data] == [MODEL]
            await rig.ask(client, outcome)
        assert (outcome.complete, outcome.refused) == (1, [])

    asyncio.run(play())


def test_load_starts_replicas_and_without_requests_all_end(rig: Rig) -> None:
    async def play() -> None:
        outcome, ends = Outcome(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(rig.load(outcome, ends))
            await rig.until(lambda: rig.running() == 2, "a second replica")
            ends.set()
        assert (outcome.cut, outcome.refused) == ([], [])
        await rig.until(lambda: not rig.status()["models"][0]["replicas"], "the end of all replicas")

    asyncio.run(play())


def test_update_replaces_replicas_without_a_failed_request(rig: Rig) -> None:
    async def play() -> None:
        outcome, ends = Outcome(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(rig.load(outcome, ends))
            await rig.until(lambda: rig.status()["nodes"], "a node")
            before = {node["name"] for node in await asyncio.to_thread(lambda: rig.status()["nodes"])}
            rig.write(ctx=1024)
            await asyncio.to_thread(rig.deploy)
            await rig.until(
                lambda: (now := {node["name"] for node in rig.status()["nodes"]}) and not now & before,
                "new nodes in place of the old ones",
            )
            await outcome.served(5)
            ends.set()
        assert (outcome.cut, outcome.refused) == ([], [])

    asyncio.run(play())


def test_same_config_replaces_nothing(rig: Rig) -> None:
    async def play() -> None:
        outcome, ends = Outcome(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(rig.load(outcome, ends))
            await rig.until(lambda: rig.status()["nodes"], "a node")
            before = {node["name"] for node in await asyncio.to_thread(lambda: rig.status()["nodes"])}
            await asyncio.to_thread(rig.deploy)
            after = {node["name"] for node in await asyncio.to_thread(lambda: rig.status()["nodes"])}
            ends.set()
        assert before <= after
        assert (outcome.cut, outcome.refused) == ([], [])

    asyncio.run(play())


def test_requests_continue_while_head_restarts(rig: Rig) -> None:
    async def play() -> None:
        outcome, ends = Outcome(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(rig.load(outcome, ends))
            await rig.until(lambda: rig.status()["nodes"], "a node")
            rig.restart_head()  # here: the kernel ends Ray's processes with the thread that started them
            await outcome.served(5)
            await rig.until(lambda: rig.status()["application"] == "RUNNING", "Serve after the restart")
            ends.set()
        assert (outcome.cut, outcome.refused) == ([], [])

    asyncio.run(play())


def test_command_shows_models_and_nodes(rig: Rig) -> None:
    command = [sys.executable, "-m", "llamasup", "fleet", "status", str(rig.config), "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["application"] == "RUNNING"
    assert [model["deployment"] for model in shown["models"]] == ["model-tiny"]


def test_serves_own_address_refuses_without_a_key_and_serves_with_one(rig: Rig) -> None:
    from llamasup.fleet.secret import node_key

    url = f"{rig.serve_url}/v1/chat/completions"
    body = {"model": "gpt-tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    key = node_key((rig.folder / "fleet.key").read_text().strip())
    with httpx.Client(timeout=120) as client:
        assert client.post(url, json=body).status_code == 401
        answer = client.post(url, json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_z_death_of_a_node_costs_only_the_streams_that_it_served(rig: Rig) -> None:
    """The last test, because a Ray node is gone afterwards."""

    async def play() -> None:
        outcome, ends = Outcome(), asyncio.Event()
        clients = 3
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(rig.load(outcome, ends))
            await rig.until(lambda: rig.running() == 2, "two replicas")
            node = await asyncio.to_thread(rig.node_of_replica)
            assert node is not None
            await asyncio.to_thread(rig.kill_node, node)
            await outcome.served(10)
            ends.set()
        assert outcome.refused == []
        assert len(outcome.cut) <= clients  # a client has one stream at a time, and each says why it ended
        assert all("tiny@" in each for each in outcome.cut)

    asyncio.run(play())
