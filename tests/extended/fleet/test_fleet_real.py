"""A fleet on a real Ray cluster, with real and fake llama-servers. scripts/test_fleet runs it.

The tests share the cluster; each deploys its own config first. scripts/test --all leaves out those marked
``extended``.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from llamasup.fleet.replicas import ABSENT_S
from tests.extended.fleet.rig import MODEL, Outcome, Rig, actor_and_llamasup, load_of
from tests.kit.fake_server import install
from tests.kit.patience import PATIENCE_S
from tests.kit.tiny import tiny_decoder

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


def test_request_starts_a_replica_load_another_and_all_end_when_idle(rig: Rig) -> None:
    rig.fresh()

    async def play() -> None:
        first = Outcome()
        async with rig.client() as client:
            await rig.ask(client, first)
        assert first.all_served
        async with load_of(rig, 6) as outcome:
            await rig.until(lambda: rig.running() == 2, "a second replica")
        assert outcome.all_served
        await rig.until(lambda: not rig.llama_servers(), "the end of all replicas")

    asyncio.run(play())


def test_update_replaces_the_replicas_of_changed_models_without_a_failed_request(rig: Rig) -> None:
    rig.fresh(fleet={"min_replicas": 1})

    async def play() -> None:
        before = {process.pid for process in rig.llama_servers()}
        async with load_of(rig, 2) as outcome:
            await outcome.served(2)
            tiny = {"path": "tiny.gguf", "aliases": ["gpt-tiny"]}
            rig.write(
                models={MODEL: tiny, "other": {"path": "other.gguf"}},
                fleet={
                    "min_replicas": 1,
                    "max_replicas": 1,
                    "models": {
                        MODEL: {"cpus": 1, "memory": "100MiB"},
                        "other": {"cpus": 1, "memory": "90MiB", "min_replicas": 0},
                    },
                },
            )
            shown = await asyncio.to_thread(rig.deploy)
            assert {model["id"] for model in shown["models"]} == {MODEL, "other"}
            await rig.until(rig.nodes_of_fleet, "the nodes at the new directory")
            await outcome.served(5)
            assert {process.pid for process in rig.llama_servers()} == before, "nothing of it has changed"
            rig.write(defaults={"ctx_size": 1024, "parallel": 2, "threads": 1}, fleet={"min_replicas": 1})
            await asyncio.to_thread(rig.deploy)
            await rig.until(
                lambda: (now := {process.pid for process in rig.llama_servers()}) and not now & before,
                "new replicas in place of the old ones",
            )
            await outcome.served(5)
        assert outcome.all_served

    asyncio.run(play())


def test_killed_actor_leaves_no_process_and_no_request_unserved(rig: Rig) -> None:
    rig.fresh(fleet={"min_replicas": 1})

    async def play() -> None:
        (server,) = rig.llama_servers()
        actor, llamasup = actor_and_llamasup(server)
        async with load_of(rig, 2) as outcome:
            await outcome.served(2)
            actor.kill()
            _, left = await asyncio.to_thread(psutil.wait_procs, [actor, llamasup, server], PATIENCE_S)
            assert not left
            await outcome.served(5)
        assert outcome.refused == []
        assert len(outcome.cut) <= 2, "a client has one stream at a time"

    asyncio.run(play())


@pytest.mark.extended
def test_answer_that_takes_longer_than_a_stop_survives_the_end_of_its_replica(
    rig: Rig, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    slow = install(tmp_path / "llama-server", "token_s=0.2", f"until={end}")
    own = {"path": "tiny.gguf", "drain_timeout": "1s"}
    rig.fresh(models={MODEL: own}, runtime=str(slow), fleet={"min_replicas": 1})

    async def play() -> None:
        outcome = Outcome()
        async with rig.client() as client:
            asking = asyncio.get_running_loop().create_task(rig.ask(client, outcome, tokens=2000))
            await rig.until(lambda: any(n["slots_busy"] for n in rig.nodes_of_fleet()), "the request")
            rig.write(models={MODEL: {**own, "ctx_size": 1024}}, runtime=str(slow), fleet={"min_replicas": 1})
            deploying = asyncio.get_running_loop().create_task(asyncio.to_thread(rig.deploy))
            await rig.until(
                lambda: any(node["state"] == "leaving" for node in rig.nodes_of_fleet()), "the end to begin"
            )
            await asyncio.sleep(5.0)  # longer than the drain_timeout of the model
            assert not asking.done()
            end.touch()
            await asking
            await deploying
        assert outcome.all_served

    asyncio.run(play())


@pytest.mark.extended
def test_requests_continue_while_the_head_restarts(rig: Rig) -> None:
    rig.fresh(fleet={"min_replicas": 1})

    async def play() -> None:
        async with load_of(rig, 2) as outcome:
            await outcome.served(2)
            await rig.restart_head()
            await outcome.served(5)
            await rig.until(lambda: rig.status()["application"] == "running", "Serve after the restart")
            await outcome.served(5)
        assert outcome.all_served

    asyncio.run(play())


@pytest.mark.extended
def test_machine_that_dies_costs_only_the_streams_that_it_served(rig: Rig) -> None:
    rig.fresh(fleet={"min_replicas": 2, "idle_after": "10m"})

    async def play() -> None:
        clients = 4
        async with load_of(rig, clients) as outcome:
            await rig.until(
                lambda: sum(bool(node["slots_busy"]) for node in rig.nodes_of_fleet()) == 2, "work for both"
            )
            victim = rig.node_with(rig.llama_servers()[0])
            await asyncio.to_thread(rig.kill_node, victim)
            await outcome.served(10)
        assert outcome.refused == []
        assert len(outcome.cut) <= clients
        assert all("tiny@" in each for each in outcome.cut), "each says which node has gone"

    try:
        asyncio.run(play())
    finally:
        rig.add_node()


@pytest.mark.extended
def test_two_fronts_share_the_nodes(rig: Rig) -> None:
    rig.fresh()

    async def play(second: int) -> None:
        async with load_of(rig, 1, rig.front_port, second) as outcome:
            await outcome.served(10)
        assert outcome.all_served

    with ExitStack() as stack:
        asyncio.run(play(rig.start_front(stack)[0]))


def test_same_deployment_revives_a_model_that_could_not_start(rig: Rig) -> None:
    late = rig.folder / "late.gguf"
    late.unlink(missing_ok=True)
    rig.write(models={MODEL: {"path": late.name}}, fleet={"min_replicas": 1})
    done = rig.run("deploy")
    assert done.returncode == 69, done.stderr
    assert f"{late}: there is no such file" in done.stderr
    assert "Node " in done.stderr
    assert "Traceback" not in done.stderr
    late.write_bytes(tiny_decoder())
    rig.deploy()
    before = {process.pid for process in rig.llama_servers()}
    assert before
    rig.deploy()
    rig.deploy()
    assert {process.pid for process in rig.llama_servers()} == before, "the model had not failed again"


@pytest.mark.extended
def test_model_that_cannot_start_says_why_to_its_clients_and_starts_when_it_can(rig: Rig) -> None:
    late = rig.folder / "later.gguf"
    late.unlink(missing_ok=True)
    rig.fresh(
        models={MODEL: {"path": "tiny.gguf"}, "late": {"path": late.name}},
        defaults={"ctx_size": 512, "parallel": 2, "threads": 1, "wait_timeout": "2s"},
    )

    async def play(port: int) -> None:
        outcome = Outcome()
        async with rig.client(port) as client:
            async with asyncio.timeout(2 * PATIENCE_S):
                while not any("its last start failed" in each for each in outcome.refused):
                    await rig.ask(client, outcome, model="late")
            assert any("later.gguf: there is no such file" in each for each in outcome.refused)
            await rig.until(
                lambda: any(model["state"] == "failed" for model in rig.status()["models"]),
                "the end of Serve's attempts",
            )
            late.write_bytes(tiny_decoder())
            async with asyncio.timeout(ABSENT_S + 2 * PATIENCE_S):
                while not outcome.complete:
                    await rig.ask(client, outcome, model="late")

    with ExitStack() as stack:
        asyncio.run(play(rig.start_front(stack)[0]))


def test_fleet_with_another_secret_is_refused(rig: Rig) -> None:
    rig.fresh(fleet={"min_replicas": 1})
    before = {process.pid for process in rig.llama_servers()}
    other = rig.folder / "other.key"
    other.touch(0o600)
    other.write_text("o" * 40)
    rig.write(fleet={"key_file": other.name})
    for command in ("deploy", "status", "down"):
        done = rig.run(command)
        assert done.returncode == 78, done.stderr
        assert "another secret" in done.stderr
    assert {process.pid for process in rig.llama_servers()} == before


@pytest.mark.extended
def test_raylet_that_dies_alone_leaves_no_process_of_ours(rig: Rig) -> None:
    rig.fresh(fleet={"min_replicas": 1})
    (server,) = rig.llama_servers()
    ours = (*actor_and_llamasup(server), server)
    node = rig.node_with(server)
    try:
        rig.kill_raylet(node)
        _, left = psutil.wait_procs(ours, 2 * PATIENCE_S)
        assert not left
        asyncio.run(rig.until(rig.llama_servers, "a replica on another node"))
    finally:
        rig.add_node()


@pytest.mark.extended
def test_end_of_the_fleet_ends_all_and_says_so(rig: Rig) -> None:
    rig.fresh(fleet={"min_replicas": 1})
    for ended in (True, False):
        done = rig.run("down", "--json")
        assert json.loads(done.stdout)["ended"] is ended, done.stderr
    assert not rig.llama_servers()
    assert "Nothing is deployed" in rig.run("status").stdout


@pytest.mark.extended
def test_deployment_without_room_says_so_and_the_next_one_is_applied(rig: Rig) -> None:
    none = {"min_replicas": 1, "drain_timeout": "0s", "models": {MODEL: {"cpus": 64, "memory": "100MiB"}}}
    rig.write(fleet=none)
    done = rig.run("deploy", "--timeout", "3")
    assert done.returncode == 75, done.stderr
    assert "ray status" in done.stderr
    rig.fresh(fleet={"min_replicas": 1})
