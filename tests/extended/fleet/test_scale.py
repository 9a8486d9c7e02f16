"""A fleet that grows and shrinks with its load, on a real Ray cluster of three nodes.

All requests are those of the unmodified ``openai`` client, unless the test reads what that client skips.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from llamasup.core.control.discovery import discover
from llamasup.core.control.selection import select_running
from tests.extended.fleet.network import Network
from tests.extended.fleet.rig import NODES, Outcome, Rig, load_of
from tests.kit.fake_server import install
from tests.kit.patience import PATIENCE_S

pytestmark = [
    pytest.mark.extended,
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

    asyncio.run(play())


def test_request_without_a_replica_learns_how_long_the_start_will_take(rig: Rig, tmp_path: Path) -> None:
    """The first start shows how long one takes. The second lasts until the test has seen enough."""
    loaded = tmp_path / "loaded"
    loaded.touch()
    slow = install(tmp_path / "llama-server", "load_s=600", f"until={loaded}")
    rig.fresh(runtime=str(slow), defaults={**SMALL, "wait_timeout": "10m"})

    async def play(port: int, socket: str) -> None:
        first, second = Outcome(), Outcome()
        transport = httpx.AsyncHTTPTransport(uds=socket)
        async with (
            rig.client(port) as client,
            httpx.AsyncClient(transport=transport, base_url="http://front") as control,
        ):

            async def left_s(below_s: float = math.inf) -> float:
                """The remaining time that a client can see, once it is shorter."""
                async with asyncio.timeout(2 * PATIENCE_S):
                    while True:
                        live = (await control.get("/llamasup/v1/requests")).json()["live"]
                        shown_s: float | None = live[0]["eta_s"] if live else None
                        if shown_s is not None and shown_s <= below_s:
                            return shown_s
                        await asyncio.sleep(0.05)

            await rig.ask(client, first)
            await rig.until(lambda: not rig.llama_servers(), "the end of the replica")
            loaded.unlink()
            asking = asyncio.get_running_loop().create_task(rig.ask(client, second))
            await left_s(await left_s() / 2)
            assert not asking.done()
            loaded.touch()
            await asking
        assert first.all_served
        assert second.all_served

    with ExitStack() as stack:
        port, front = rig.start_front(stack)
        asyncio.run(play(port, select_running(discover(), front.pid).socket))


def test_requests_continue_while_the_controller_of_serve_and_the_directory_are_killed(rig: Rig) -> None:
    rig.fresh(fleet={"min_replicas": 1, "max_replicas": 1})  # no other replica makes it superfluous

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
        assert {process.pid for process in rig.llama_servers()} == before, "the replica goes on"

    asyncio.run(play())


def test_machine_that_vanishes_from_the_network_costs_only_the_streams_that_it_served(rig: Rig) -> None:
    """Nothing refuses a connection to it, as after a loss of power."""
    network = rig.network
    if network is None:
        pytest.skip(f"no network namespaces: {Network.problem()}")
    rig.fresh(fleet={"min_replicas": 2, "idle_after": "10m"})

    async def play() -> None:
        clients = 4
        async with load_of(rig, clients) as outcome:
            await rig.until(
                lambda: sum(bool(node["slots_busy"]) for node in rig.nodes_of_fleet()) == 2, "work for both"
            )
            network.cut(rig.places[victim])
            await outcome.served(10)
        assert outcome.refused == []
        assert len(outcome.cut) <= clients
        assert all("tiny@" in each for each in outcome.cut), "each says which node has gone"

    victim = rig.node_with(rig.llama_servers()[0])
    try:
        asyncio.run(play())
    finally:
        network.join(rig.places[victim])
        rig.kill_node(victim)
        rig.add_node()
