"""What Serve is given, and the examples for its own tools. Needs Ray, but no cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml

import llamasup.fleet
from llamasup.errors import ConfigInvalid, UnsafeBind
from llamasup.fleet.directory_table import ROOM_AFTER_S
from llamasup.fleet.messages import (
    POLL_PATH,
    SIGNATURE,
    ListedModel,
    NodeLoad,
    NodeReport,
    Poll,
    Snapshot,
)
from llamasup.fleet.secret import directory_key, is_signed
from llamasup.fleet.secret_file import VARIABLE
from tests.extended.fleet.played_serve import application, deployment
from tests.kit.async_tests import async_test
from tests.kit.paths import ROOT
from tests.kit.tiny import tiny_decoder

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
SECRET = "s" * 40
GIVEN = {"cpus": 1, "gpus": 0, "memory": "1GiB"}


def written(folder: Path, **more: Any) -> Path:
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(tiny_decoder())
    config = {
        "models": {"a": {"path": "a.gguf"}, "b": {"path": "b.gguf"}},
        "fleet": {"models": {"a": GIVEN, "b": GIVEN}},
        **more,
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)


def deployments_of(path: Path) -> Mapping[str, Any]:
    first = llamasup.fleet.app({"config": str(path)})._bound_deployment
    ingress = [first] if first.name == "ingress" else []
    directory = first.init_args[3]._bound_deployment if ingress else first
    nodes = [node._bound_deployment for node in directory.init_args[2].values()]
    return {deployment.name: deployment for deployment in (*ingress, directory, *nodes)}


def test_version_changes_only_with_what_concerns_the_model(tmp_path: Path) -> None:
    def versions(**more: Any) -> list[str]:
        found = deployments_of(written(tmp_path, **more))
        return [found[name]._version for name in ("model-a", "model-b", "directory")]

    before = versions()
    assert None not in before
    assert versions() == before
    assert (
        versions(fleet={"max_replicas": 3, "models": {"a": GIVEN, "b": GIVEN}}, listen="127.0.0.1:1")
        == before
    )
    changed = {"a": {"path": "a.gguf", "ctx_size": 512}, "b": {"path": "b.gguf"}}
    a, b, directory = versions(models=changed)
    assert a != before[0]
    assert [b, directory] == before[1:]


def test_model_that_sleeps_is_unloaded_by_its_node_and_its_last_replica_stays(tmp_path: Path) -> None:
    own = {"a": {**GIVEN, "when_idle": "end"}, "b": GIVEN}
    path = written(tmp_path, fleet={"when_idle": "sleep", "idle_after": "90s", "models": own})
    found = deployments_of(path)
    ttls, kinds = [], []
    for name in ("model-a", "model-b"):
        (spec,) = found[name].init_args
        node = yaml.safe_load(msgspec.json.decode(spec)["config"])
        ttls.append(node["models"][name.removeprefix("model-")]["ttl"])
        policy = found[name]._deployment_config.autoscaling_config.policy
        kinds.append(policy.policy_kwargs["sleeps"])
    assert (ttls, kinds) == (["never", "1m30s"], [False, True])


def test_ingress_is_one_more_deployment_and_changes_no_replica(tmp_path: Path) -> None:
    fleet = {"models": {"a": GIVEN, "b": GIVEN}}
    without = deployments_of(written(tmp_path))
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("sk-of-a-client name=client\n")
    more: Any = {"fleet": {**fleet, "ingress": True}, "auth": {"api_key_file": "keys"}}
    found = deployments_of(written(tmp_path, **more))
    assert found.keys() - without.keys() == {"ingress"}
    assert {name: found[name]._version for name in without} == {
        name: deployment._version for name, deployment in without.items()
    }
    router = found["model-a"]._deployment_config.request_router_config.request_router_class
    assert router == "llamasup.fleet.request_router.PromptRouter"
    assert "sk-of-a-client" not in repr([found[name].init_args for name in found])
    keys.write_text("sk-of-another-client\n")
    changed = deployments_of(written(tmp_path, **more))
    assert [name for name in found if found[name]._version != changed[name]._version] == ["ingress"]


def test_model_without_its_needs_is_refused_where_serve_builds(tmp_path: Path) -> None:
    path = written(tmp_path, fleet={"gpus": 0})
    with pytest.raises(ConfigInvalid, match="no plan is made"):
        llamasup.fleet.app({"config": str(path)})


def test_secret_is_not_shown(tmp_path: Path) -> None:
    assert SECRET not in repr(deployments_of(written(tmp_path)))


@pytest.mark.parametrize("example", ["serve.yaml", "rayservice.yaml"])
def test_example_is_valid_and_builds_the_application(example: str, tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    document = yaml.safe_load((ROOT / "configs" / "fleet" / example).read_text())
    if example == "rayservice.yaml":
        document = yaml.safe_load(document["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(document).applications
    assert application.import_path == "llamasup.fleet:app"
    arguments = {**application.args, "config": str(written(tmp_path))}
    assert set(arguments) == {"config", "revision"}
    assert llamasup.fleet.app(arguments)._bound_deployment.name == "directory"


def test_workers_of_kuberay_become_ready_without_a_proxy_and_their_number_changes() -> None:
    document = yaml.safe_load((ROOT / "configs" / "fleet" / "rayservice.yaml").read_text())
    cluster = document["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert yaml.safe_load(document["spec"]["serveConfigV2"])["proxy_location"] == "HeadOnly"
    for group in cluster["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        (*_, probe) = container["readinessProbe"]["exec"]["command"]
        assert "local_raylet_healthz" in probe
        assert ":8000" not in probe


def test_config_of_the_documentation_can_be_deployed(tmp_path: Path, llama_server: str) -> None:
    from llamasup.fleet.deploy import _models, _needs
    from tests.kit.configs import load

    page = (ROOT / "docs" / "ray.md").read_text()
    block = page.partition("<!-- run by tests/extended/fleet/test_serve_config.py -->\n```yaml\n")[
        2
    ].partition("```")[0]
    named = "/srv/models/qwen2.5-7b-q4_k_m.gguf"
    assert named in block
    path = tmp_path / "config.yaml"
    (tmp_path / "tiny.gguf").write_bytes(tiny_decoder())
    path.write_text(f"runtime: {llama_server}\n" + block.replace(named, "tiny.gguf"))
    models = {spec.node.model: spec for spec in _models(path, load(path, {}), {}, _needs)}
    assert set(models) == {"qwen", "gemma"}
    assert models["qwen"].actor_options["num_gpus"] == 1


# --- the directory, without Serve around it ----------------------------------------------------------


async def directory_of(*models: str, **handles: Any) -> Any:
    """It looks at Serve only when the test calls ``_note_problems``."""
    from llamasup.fleet.deployments import Directory

    directory: Any = Directory.__new__(Directory)
    await directory.__init__(msgspec.json.encode(list(map(ListedModel, models))), SECRET, handles, b"{}")
    directory._watching.cancel()
    return directory


async def asked(directory: Any, path: str, body: bytes = b"", key: str = "") -> Any:
    from starlette.requests import Request

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return parts.pop(0)

    return await directory(Request({"type": "http", "path": path, "headers": headers}, receive))


@pytest.mark.check("X4", "401")
@async_test
async def test_directory_answers_only_polls_of_fronts_that_have_the_secret() -> None:
    directory = await directory_of("tiny")
    key = directory_key(SECRET)
    poll = msgspec.json.encode(Poll("front", "nonce", 0, {"tiny": 3}))
    assert (await asked(directory, "/v1/models", key=key)).status_code == 404
    for wrong in ("", "other", "\xe9"):
        assert (await asked(directory, POLL_PATH, poll, wrong)).status_code == 401
    assert (await asked(directory, POLL_PATH, b"{", key)).status_code == 400
    assert (await asked(directory, POLL_PATH, b" " * (1 << 21), key)).status_code == 413
    node = msgspec.json.encode(NodeReport("tiny@a", "https://192.0.2.1:1", "tiny"))
    await directory.failed(node, "no memory")
    assert await directory.report(node) == 0.0
    answer = await asked(directory, POLL_PATH, poll, key)
    assert answer.status_code == 200
    assert is_signed(SECRET, "nonce", answer.body, answer.headers[SIGNATURE])
    assert [found.name for found in msgspec.json.decode(answer.body, type=Snapshot).nodes] == ["tiny@a"]
    assert await directory.report(node) == 3.0
    assert not await directory.makes_room("tiny@a"), "it does not sleep"
    assert not await directory.should_wake("tiny@a"), "it does not sleep"
    await directory.end(node)
    assert msgspec.json.decode(await directory.nodes()) == []


@pytest.mark.check("X1")
@async_test
async def test_ingress_without_keys_does_not_start_where_other_machines_reach_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from llamasup.fleet import deployments
    from llamasup.fleet.ingress import IngressSettings

    http = SimpleNamespace(host="0.0.0.0", port=8000)
    monkeypatch.setattr(deployments, "_get_global_client", lambda: SimpleNamespace(http_config=http))
    ingress: Any = deployments.IngressDeployment.__new__(deployments.IngressDeployment)
    settings, models = msgspec.json.encode(IngressSettings()), msgspec.json.encode([ListedModel("tiny")])
    with pytest.raises(UnsafeBind, match=r"0\.0\.0\.0:8000"):
        await ingress.__init__(settings, models, SECRET, PlayedHandle(), {})
    http.host = "127.0.0.1"
    await ingress.__init__(settings, models, SECRET, PlayedHandle(), {})
    ingress._following.cancel()


@async_test
async def test_end_of_a_call_ends_its_request_at_the_llamasup_at_once() -> None:
    from llamasup.fleet.deployments import Node

    ended = False

    async def played(*_: bytes) -> AsyncIterator[bytes]:
        nonlocal ended
        try:
            yield b"a"
            yield b"b"
        finally:
            ended = True

    node: Any = SimpleNamespace(_requests=SimpleNamespace(forward=played), _by_serve=0)
    answer: Any = Node.forward(node, b"/", b"", b"")
    assert await anext(answer) == b"a"
    assert not ended
    counts = [node._by_serve]
    await answer.aclose()
    assert [*counts, node._by_serve] == [1, 0]
    assert ended


class PlayedHandle:
    """Of a deployment: its calls wait until they are cancelled."""

    def __init__(self) -> None:
        self.waiting = 0
        self.wake = self

    async def remote(self) -> None:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1


def played_clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The clock of the directory, which a test sets by ``now_s``."""
    from llamasup.fleet import deployments as module

    clock: Any = SimpleNamespace(now_s=100.0, time_ns=time.time_ns)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(module, "time", clock)
    return clock


@async_test
async def test_replica_without_a_place_is_forgotten_while_no_news_of_serve_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = played_clock(monkeypatch)
    fleet = application(tiny=deployment("UPSCALING", STARTING=1))
    played = SimpleNamespace(applications={"fleet": fleet})
    monkeypatch.setattr("ray.serve.status", lambda: played)
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: SimpleNamespace(app_name="fleet"))
    directory = await directory_of("tiny", "other")
    load = NodeLoad(slots=2, asleep=True)
    sleeping = msgspec.json.encode(NodeReport("other@a", "https://192.0.2.1:1", "other", load))
    await directory.report(sleeping)
    await directory._note_problems()
    clock.now_s += ROOM_AFTER_S
    played.applications = {}  # the controller starts again
    await directory._note_problems()
    await directory.report(sleeping)
    assert not await directory.makes_room("other@a")
    played.applications = {"fleet": fleet}
    await directory._note_problems()
    clock.now_s += ROOM_AFTER_S
    await directory._note_problems()
    await directory.report(sleeping)
    assert await directory.makes_room("other@a")


@async_test
async def test_directory_with_sleeping_nodes_alone_looks_at_serve_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = played_clock(monkeypatch)
    fleet = application(tiny=deployment(RUNNING=1))
    looks: list[float] = []

    def status() -> Any:
        looks.append(clock.now_s)
        return SimpleNamespace(applications={"fleet": fleet})

    monkeypatch.setattr("ray.serve.status", status)
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: SimpleNamespace(app_name="fleet"))
    directory = await directory_of("tiny", "other")
    load = NodeLoad(slots=2, asleep=True)
    await directory.report(msgspec.json.encode(NodeReport("other@a", "https://192.0.2.1:1", "other", load)))
    for _ in range(8):
        await directory._note_problems()
        clock.now_s += 1.0
    fleet.deployments["model-tiny"] = deployment("UPSCALING", STARTING=1)
    for _ in range(4):
        await directory._note_problems()
        clock.now_s += 1.0
    assert looks == [100.0, 105.0, 110.0, 111.0], "each second while a replica has no place"


@async_test
async def test_failed_model_is_not_started_until_serve_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = application(tiny=deployment(trigger="AUTOSCALING"))
    played = SimpleNamespace(applications={"fleet": fleet})
    monkeypatch.setattr("ray.serve.status", lambda: played)
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: SimpleNamespace(app_name="fleet"))
    handle = PlayedHandle()
    directory = await directory_of("tiny", tiny=handle)
    key = directory_key(SECRET)

    async def polled(number: int, waiting: int) -> Snapshot:
        poll = Poll("front", "nonce", 0, {"tiny": waiting}, number)
        return msgspec.json.decode(
            (await asked(directory, POLL_PATH, msgspec.json.encode(poll), key)).body, type=Snapshot
        )

    await polled(1, waiting=2)
    await directory._note_problems()
    assert handle.waiting == 1
    await polled(2, waiting=0)
    await directory._note_problems()
    assert handle.waiting == 1, "a start goes on when its clients give up"
    failed = deployment("UNHEALTHY", "No space left.", "REPLICA_STARTUP_FAILED")
    fleet.deployments["model-tiny"] = failed
    await directory._note_problems()
    (model,) = (await polled(3, waiting=1)).models
    assert model.problem == "its last start failed: No space left."
    await directory._note_problems()
    assert handle.waiting == 0
    fleet.deployments["model-tiny"] = deployment(trigger="DOWNSCALE_COMPLETED")
    await directory._note_problems()
    await asyncio.sleep(0)
    assert handle.waiting == 1
    directory._wakes["tiny"].cancel()
