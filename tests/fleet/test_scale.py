"""A fleet that grows and shrinks with its load, on a real Ray cluster of three nodes.

All requests are those of the unmodified ``openai`` client, unless the test reads what that client skips.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
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
