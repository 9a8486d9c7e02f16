"""Replicas that sleep while they are idle, on a real Ray cluster."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.extended.fleet.rig import MODEL, Outcome, Rig, actor_and_llamasup
from tests.kit.tiny import tiny_decoder

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


def states_of(rig: Rig) -> dict[str, str]:
    """Of the nodes, by their model."""
    return {node["model"]: "asleep" if node["asleep"] else node["state"] for node in rig.nodes_of_fleet()}


def sleeps(rig: Rig, model: str) -> bool:
    return states_of(rig).get(model) == "asleep"


def test_idle_replica_unloads_its_model_and_the_next_request_loads_it_there(rig: Rig) -> None:
    rig.fresh(fleet={"when_idle": "sleep"})

    async def play() -> None:
        outcome = Outcome()
        async with rig.client() as client:
            await rig.ask(client, outcome)
            (server,) = rig.llama_servers()
            actor, llamasup = actor_and_llamasup(server)
            await rig.until(lambda: states_of(rig) == {MODEL: "asleep"}, "the sleep of the replica")
            await rig.until(lambda: not rig.llama_servers(), "the end of its llama-server")
            await rig.ask(client, outcome)
            assert outcome.complete == 2, (outcome.cut, outcome.refused)
            (server,) = rig.llama_servers()
            assert actor_and_llamasup(server) == (actor, llamasup)
        await rig.until(lambda: states_of(rig) == {MODEL: "asleep"}, "the sleep after the next request")

    asyncio.run(play())


@pytest.mark.extended
def test_replica_that_has_slept_longest_makes_room_for_a_model_without_a_place(rig: Rig) -> None:
    """Each of the three machines has room for one replica."""
    models = [f"model-{number}" for number in range(4)]
    for model in models:
        (rig.folder / f"{model}.gguf").write_bytes(tiny_decoder())
    rig.fresh(
        models={model: {"path": f"{model}.gguf"} for model in models},
        fleet={"when_idle": "sleep", "max_replicas": 1},
    )

    async def play() -> None:
        outcome = Outcome()
        async with rig.client() as client:
            for model in models[:3]:
                await rig.ask(client, outcome, model=model)
                await rig.until(partial(sleeps, rig, model), f"the sleep of {model}")
            await rig.ask(client, outcome, model=models[3])
        assert outcome.complete == 4, (outcome.cut, outcome.refused)
        await rig.until(lambda: models[3] in states_of(rig), "the fourth model at the directory")
        assert models[0] not in states_of(rig)

    asyncio.run(play())
