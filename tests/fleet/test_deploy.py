"""What the commands make of Ray's answers and errors. Ray is played: these tests need none."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from llamasup.cli.commands import fleet
from llamasup.errors import FleetUnusable
from llamasup.fleet import deploy
from llamasup.fleet.messages import NodeReport


class RayError(Exception):
    pass


class RayServeException(Exception):
    pass


class PlayedRay:
    """A cluster with the applications of ``applications``."""

    def __init__(self) -> None:
        self.applications: dict[str, Any] = {}
        self.init_error: Exception | None = None
        self.status_error: Exception | None = None
        self.nodes: Callable[[], bytes] = lambda: msgspec.json.encode([])
        self.connected = False
        self.ends = True

    # --- ray
    def is_initialized(self) -> bool:
        return False

    def init(self, **_: object) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.connected = True

    def shutdown(self) -> None:
        self.connected = False

    # --- ray.serve
    def status(self) -> Any:
        if self.status_error is not None:
            raise self.status_error
        return SimpleNamespace(applications=self.applications)

    def delete(self, name: str, *, _blocking: bool) -> None:
        if self.ends:
            del self.applications[name]

    def get_deployment_handle(self, _deployment: str, _app: str) -> Any:
        answer = SimpleNamespace(result=lambda timeout_s: self.nodes())
        return SimpleNamespace(nodes=SimpleNamespace(remote=lambda: answer))

    def run_fleet(self) -> None:
        running = SimpleNamespace(value="RUNNING")
        healthy = SimpleNamespace(
            status=SimpleNamespace(value="HEALTHY"), message="", replica_states={"RUNNING": 1}
        )
        self.applications[deploy.APP] = SimpleNamespace(
            status=running, message="", deployments={"directory": healthy, "model-tiny": healthy}
        )


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PlayedRay:
    played = PlayedRay()
    modules = {
        name: ModuleType(name) for name in ("ray", "ray.exceptions", "ray.serve", "ray.serve.exceptions")
    }
    for name in ("is_initialized", "init", "shutdown"):
        setattr(modules["ray"], name, getattr(played, name))
    for name in ("status", "delete", "get_deployment_handle"):
        setattr(modules["ray.serve"], name, getattr(played, name))
    modules["ray"].serve = modules["ray.serve"]  # type: ignore[attr-defined]
    modules["ray.exceptions"].RayError = RayError  # type: ignore[attr-defined]
    modules["ray.serve.exceptions"].RayServeException = RayServeException  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return played


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("models: {tiny: {repo: org/tiny}}\nfleet: {}")
    return path


@pytest.mark.parametrize("error", [ConnectionError(), ValueError("\nno such address"), RayError("gone")])
def test_cluster_that_cannot_be_reached_is_named(ray: PlayedRay, config: Path, error: Exception) -> None:
    ray.init_error = error
    with pytest.raises(FleetUnusable, match=r"There is no Ray cluster at 'auto': \w"):
        deploy.status(config, {})


def test_address_where_nothing_listens_is_not_tried_by_ray(ray: PlayedRay, config: Path) -> None:
    ray.init_error = AssertionError("it would try for minutes")
    with socket.socket() as sock:  # bound, and it does not listen
        sock.bind(("127.0.0.1", 0))
        config.write_text(
            f"models: {{m: {{repo: org/m}}}}\nfleet: {{ray: '127.0.0.1:{sock.getsockname()[1]}'}}"
        )
        with pytest.raises(FleetUnusable, match=r"no Ray cluster at '127\.0\.0\.1:\d+': .*refused"):
            deploy.status(config, {})
        sock.listen()
        ray.init_error = None
        assert deploy.status(config, {})["application"] is None


@pytest.mark.parametrize("error", [RayServeException("no controller"), RayError(), TimeoutError("60 s")])
def test_error_of_ray_is_no_bug_of_llamasup(ray: PlayedRay, config: Path, error: Exception) -> None:
    ray.status_error = error
    for act in (deploy.status, deploy.down):
        with pytest.raises(FleetUnusable, match=type(error).__name__) as raised:
            act(config, {})
        assert raised.value.exit_code == 69
        assert not ray.connected


def test_status_has_the_nodes_that_the_directory_knows(ray: PlayedRay, config: Path) -> None:
    assert deploy.status(config, {})["application"] is None
    ray.run_fleet()
    report = NodeReport("tiny@a", "https://192.0.2.1:1", "tiny")
    ray.nodes = lambda: msgspec.json.encode([(report, True)])
    shown = deploy.status(config, {})
    assert [(node["name"], node["state"]) for node in shown["nodes"]] == [("tiny@a", "leaving")]
    assert [model["id"] for model in shown["models"]] == ["tiny"]


def test_status_without_the_directory_has_the_models(ray: PlayedRay, config: Path) -> None:
    def late() -> bytes:
        raise TimeoutError

    ray.run_fleet()
    ray.nodes = late
    shown = deploy.status(config, {})
    assert shown["nodes"] is None
    assert shown["message"] == "The directory does not answer: TimeoutError"
    assert [model["state"] for model in shown["models"]] == ["ready"]


def test_end_waits_until_nothing_is_left(ray: PlayedRay, config: Path) -> None:
    assert not deploy.down(config, {})
    ray.run_fleet()
    assert deploy.down(config, {})
    assert not deploy.down(config, {})


def test_end_that_takes_too_long_says_that_ray_goes_on(ray: PlayedRay, config: Path) -> None:
    ray.run_fleet()
    ray.ends = False
    with pytest.raises(FleetUnusable, match="has not ended within 0 s") as error:
        deploy.down(config, {}, timeout_s=0.0)
    assert "Ray goes on" in error.value.remedy


def test_news_of_ray_is_not_in_the_result(
    ray: PlayedRay, config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def noisy() -> bytes:
        print("(raylet) a node has died")
        return msgspec.json.encode([])

    ray.run_fleet()
    ray.nodes = noisy
    assert fleet.status(config, json=True) == 0
    output = capfd.readouterr()
    assert msgspec.json.decode(output.out)["application"] == "running"
    assert "a node has died" in output.err
