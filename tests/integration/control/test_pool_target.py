"""Control of the models of ``serve``: a pool with fake servers, everything else real."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.control.interface import Fetch
from llamasup.core.control.pool_target import ConfiguredTarget
from llamasup.core.http.address import TcpAddress
from llamasup.core.models.spec import Changes, ModelSpec
from llamasup.core.pool.catalog.v1_models import NodeModel
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.pool.model import ManagedModel
from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.states import Policy, State
from llamasup.errors import Conflict, ModelMissing, ModelUnknown
from llamasup.features.peers.nodes import Peer
from llamasup.features.peers.nodes_backend import NodesBackend
from llamasup.features.peers.peers import Peers
from llamasup.features.peers.static import StaticMembership
from tests.core.pool.pools import PATIENCE_S, Pooled, async_test, file_of, pooled, server, spec_of
from tests.features.peers.test_peers import PlayedNode
from tests.kit.backends import as_node_reads

# Nothing is tried again by itself while a test runs, and who waits does so all the same.
LATE = Policy(restart=RestartPolicy(first_delay_s=1000.0, longest_delay_s=1000.0), wait_timeout_s=2000.0)


class ServiceOwner:
    stops_asked = 0

    def ask_stop(self) -> None:
        raise AssertionError

    def control_asks(self, what: str, model: str = "") -> None:
        pass


class NoFiles:
    def pull(self, name: str) -> Fetch:
        raise AssertionError

    async def remove(self, managed: ManagedModel) -> Mapping[str, Any]:
        raise AssertionError


async def nothing_new() -> Changes:
    return Changes()


def controlled(it: Pooled) -> ConfiguredTarget:
    return ConfiguredTarget(
        ServiceOwner(), it.catalog, TcpAddress("127.0.0.1", 1), lambda _: None, nothing_new, NoFiles()
    )


@pytest.fixture
def spec(tmp_path: Path, tiny_model: Path) -> ModelSpec:
    return spec_of(file_of(tmp_path, "a", tiny_model))


@pytest.mark.parametrize(("fault", "state"), [("exit=load:1", State.BACKOFF), ("load_s=1000", State.LOADING)])
@async_test
async def test_restart_restarts_models_that_crashed_or_hang_during_load(
    fault: str, state: State, tmp_path: Path, spec: ModelSpec
) -> None:
    runtime = server(tmp_path, {"a.gguf": [fault]})
    async with pooled(tmp_path, spec, runtime=runtime, policy=LATE) as it:
        waiting = it.ask("a")
        await it.until(lambda: any(each.instance.state is state for each in it["a"].runners))
        server(tmp_path)
        async with asyncio.timeout(PATIENCE_S):
            await controlled(it).restart("a")

        assert await waiting.served_by() == 2


@async_test
async def test_status_shows_why_a_load_has_not_begun(
    tmp_path: Path, spec: ModelSpec, tiny_model: Path
) -> None:
    async with pooled(tmp_path, spec, spec_of(file_of(tmp_path, "b", tiny_model)), capacity=1.5) as it:
        serving = it.ask("a")
        await serving.served_by()
        waiting = it.ask("b")
        await it.until_phase("a", Phase.CORDONED)
        loads = {model["id"]: model["load"] for model in controlled(it).status()["models"]}
        assert loads["a"] is None
        assert (loads["b"]["percent"], loads["b"]["eta_s"]) == (None, None)
        assert loads["b"]["reason"] == "it waits until other models free memory"
        serving.finish()
        await waiting.served_by()


@async_test
async def test_restart_of_an_unloaded_model_loads_it(tmp_path: Path, spec: ModelSpec) -> None:
    async with pooled(tmp_path, spec) as it:
        async with asyncio.timeout(PATIENCE_S):
            await controlled(it).restart("a")

        assert await it.ask("a").served_by() == 1


SMALL = {"ctx_size": 512, "parallel": 1}


@async_test
async def test_plan_names_the_models_that_would_go_and_starts_nothing(
    tmp_path: Path, tiny_model: Path, spec: ModelSpec
) -> None:
    other = spec_of(file_of(tmp_path, "b", tiny_model))
    async with pooled(tmp_path, spec, other, capacity=1.5) as it:
        await it.load("a")
        target = controlled(it)
        for name in ("b", other.source):  # by its name and by its file
            plan = await target.plan(name, SMALL)
            assert plan["evicts"] == ["a"]
            assert plan["problem"] is None
            ram = plan["devices"]["ram"]
            assert (ram["fits"], ram["needed_bytes"]) == (False, plan["memory"]["total_bytes"])
        assert (await target.plan("a", SMALL))["evicts"] == []
        assert [it.loads(name) for name in ("a", "b")] == [1, 0]
        assert it["a"].runners


@async_test
async def test_file_that_is_not_served_is_planned(tmp_path: Path, tiny_model: Path, spec: ModelSpec) -> None:
    file = str(file_of(tmp_path, "new", tiny_model))
    async with pooled(tmp_path, spec, capacity=1.5) as it:
        await it.load("a")
        target = controlled(it)
        plan = await target.plan(file, SMALL)
        assert plan["argv"][plan["argv"].index("--model") + 1] == file
        assert plan["evicts"] == ["a"]
        assert "new" not in it.pool.managed_models
        too_large = await target.plan(file, {"ctx_size": 1 << 20, "parallel": 8})
        assert "fit" in too_large["problem"]["message"]
        with pytest.raises(ModelMissing):
            await target.plan(f"{file}.gguf", {})
        with pytest.raises(ModelUnknown):
            await target.plan("new", {})


@async_test
async def test_memory_of_a_loaded_model_is_predicted_and_measured(tmp_path: Path, spec: ModelSpec) -> None:
    async with pooled(tmp_path, spec) as it:
        target = controlled(it)
        (ram,) = (await target.memory())["devices"]
        assert (ram["name"], ram["models"], target.held_bytes()) == ("ram", [], 0)
        await it.load("a")
        (ram,) = (await target.memory())["devices"]
        (held,) = ram["models"]
        assert (held["id"], held["state"]) == ("a", "ready")
        assert held["predicted"]["total_bytes"] >= target.held_bytes() > 0
        assert held["measured_bytes"] > 0
        assert ram["budget_bytes"] == it.pool.options.budget["ram"]


@async_test
async def test_models_of_other_nodes_are_shown_and_changed_only_there(
    tmp_path: Path, spec: ModelSpec
) -> None:
    async with pooled(tmp_path, spec, runtime=server(tmp_path)) as it:
        target = controlled(it)
        assert target.status()["nodes"] == []
        assert target.node_gauges() is None
        node = PlayedNode()
        await node.start()
        membership = StaticMembership((Peer("desk", node.url),))
        peers = target.nodes = Peers(membership, it.catalog, timeout_s=60.0, max_waiting=8)
        target.catalog = NodesBackend(it.catalog, peers)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(peers.run())
            await peers.begun()
            (shown,) = target.status()["nodes"]
            assert (shown["name"], shown["state"]) == ("desk", "ready")
            gauges = target.node_gauges()
            assert gauges is not None
            assert gauges.states == {"desk": "ready"}
            assert target.why("story")["sentences"] == [
                "The node 'desk' has it loaded: 0 of 2 slots are busy."
            ]
            assert target.why("a")["model"] == "a"
            for change in (target.load, target.unload, target.restart):
                with pytest.raises(Conflict, match="not on this node, but on 'desk'"):
                    await change("tale")
            node.models = (NodeModel("a", state="ready", slots=2),)
            await it.until(lambda: peers.find("a") is not None)
            assert target.why("a")["sentences"][-1].startswith("The node 'desk' has it loaded")
            assert target.node_gauges() is not None
            running.cancel()
        await node.stop()


@async_test
async def test_another_node_gets_the_models_with_their_load(tmp_path: Path, spec: ModelSpec) -> None:
    async with pooled(tmp_path, spec, runtime=server(tmp_path)) as it:
        (cold,) = as_node_reads(it.catalog)
        assert (cold.id, cold.state, cold.serves) == ("a", "stopped", False)
        await it.pool.load(it["a"])
        (warm,) = as_node_reads(it.catalog)
        assert (warm.serves, warm.busy, warm.entry["id"]) == (True, 0, "a")
