"""A fleet that grows and shrinks with its load, on a real Ray cluster of three nodes.

All requests are those of the unmodified ``openai`` client, unless the test reads what that client skips.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from llamasup.testing.fake_server import install
from tests.fleet.rig import MODEL, NODES, Outcome, Rig, load_of
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]

SMALL = {"ctx_size": 512, "parallel": 2, "threads": 1}


def test_model_goes_from_no_replica_to_three_nodes_and_back_without_a_failed_request(rig: Rig) -> None:
    rig.fresh(fleet={"max_replicas": NODES})

    async def play() -> None:
        async with load_of(rig, 10) as heavy:
            await rig.until(lambda: len(rig.nodes_of_fleet()) == NODES, "three replicas")
            machines = {id(rig.node_with(server)) for server in rig.llama_servers()}
            assert len(machines) == NODES, "one replica on each node"
            await heavy.served(30)
        assert heavy.all_served
        async with load_of(rig, 1) as light:
            await rig.until(lambda: len(rig.llama_servers()) == 1, "the end of two replicas")
            await light.served(5)
        assert light.all_served
        await rig.until(lambda: not rig.llama_servers(), "the end of the last replica")
        later = Outcome()
        async with rig.client() as client:
            await rig.ask(client, later)
        assert later.all_served
        assert len(rig.llama_servers()) == 1

    asyncio.run(play())


def test_request_without_a_replica_learns_how_long_the_start_will_take(rig: Rig, tmp_path: Path) -> None:
    """The first start shows how long one takes. The second lasts until the test has seen enough."""
    loaded = tmp_path / "loaded"
    slow = install(tmp_path / "llama-server", "load_s=600", f"until={loaded}")
    rig.fresh(runtime=str(slow), defaults={**SMALL, "wait_timeout": "10m"})

    async def play(port: int) -> None:
        loaded.touch()
        first, second = Outcome(), Outcome()
        async with rig.client(port) as client, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as front:

            async def left_s() -> float | None:
                live = (await front.get("/llamasup/v1/requests")).json()["live"]
                return live[0]["eta_s"] if live else None

            await rig.ask(client, first)
            await rig.until(lambda: not rig.llama_servers(), "the end of the replica")
            loaded.unlink()
            asking = asyncio.get_running_loop().create_task(rig.ask(client, second))
            async with asyncio.timeout(2 * PATIENCE_S):
                while (began_s := await left_s()) is None:
                    await asyncio.sleep(0.05)
                while (now_s := await left_s()) is None or now_s > began_s / 2:
                    await asyncio.sleep(0.05)
            assert not asking.done()
            loaded.touch()
            await asking
        assert first.all_served
        assert second.all_served

    with ExitStack() as stack:
        asyncio.run(play(rig.start_front(stack)[0]))


def test_requests_continue_while_the_controller_of_serve_and_the_directory_are_killed(rig: Rig) -> None:
    rig.fresh(fleet={"min_replicas": 1, "max_replicas": NODES})

    async def play() -> None:
        before = {process.pid for process in rig.llama_servers()}
        async with load_of(rig, 2) as outcome:
            await outcome.served(2)
            killed = rig.ray_processes("ray::ServeController") + rig.ray_processes(
                "ray::ServeReplica:llamasup:directory"
            )
            assert len(killed) == 2
            for process in killed:
                process.kill()
            await outcome.served(5)
            await rig.until(rig.nodes_of_fleet, "the node at the new directory")
            await outcome.served(5)
        assert outcome.all_served
        assert {process.pid for process in rig.llama_servers()} >= before, "the replica goes on"

    asyncio.run(play())
