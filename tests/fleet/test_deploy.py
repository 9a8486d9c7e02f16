"""What the commands make of Ray's answers and errors. Ray is played: these tests need none."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from llamasup.cli.commands import fleet
from llamasup.cli.stop_signals import STOP_SIGNALS, Interrupted
from llamasup.errors import ConfigInvalid, FleetUnusable
from llamasup.fleet import deploy
from llamasup.fleet.messages import LEAVE_S, NodeReport
from llamasup.fleet.node_process import STOP_S
from llamasup.fleet.secret import fleet_id
from llamasup.fleet.settings import Fleet
from tests.extended.fleet.played_serve import application, deployment

SECRET = "s" * 40


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
        self.deleting: Callable[[], None] = lambda: None
        self.user_config: Any = {"fleet_id": fleet_id(SECRET)}

    # --- ray
    def is_initialized(self) -> bool:
        return False

    def init(self, **_: object) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.connected = True

    def shutdown(self) -> None:
        self.connected = False

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="head:6379")

    # --- ray.serve
    def status(self) -> Any:
        if self.status_error is not None:
            raise self.status_error
        return SimpleNamespace(applications=self.applications)

    def delete(self, name: str, *, _blocking: bool) -> None:
        self.deleting()
        if self.ends:
            del self.applications[name]

    def get_deployment_handle(self, _deployment: str, _app: str) -> Any:
        answer = SimpleNamespace(result=lambda timeout_s: self.nodes())
        return SimpleNamespace(nodes=SimpleNamespace(remote=lambda: answer))

    def get_deployment_info(self, name: str, app: str) -> Any:
        assert name in self.applications[app].deployments
        config = SimpleNamespace(user_config=self.user_config)
        return SimpleNamespace(version="aa", deployment_config=config), None

    def run_fleet(self, name: str = "llamasup", *deployments: str) -> None:
        fleet = self.applications[name] = application(tiny=deployment(RUNNING=1))
        if deployments:
            fleet.deployments = dict.fromkeys(deployments, deployment(RUNNING=1))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PlayedRay:
    played = PlayedRay()
    modules = {
        name: ModuleType(name)
        for name in ("ray", "ray.exceptions", "ray.serve", "ray.serve.context", "ray.serve.exceptions")
    }
    for name in ("is_initialized", "init", "shutdown", "get_runtime_context"):
        setattr(modules["ray"], name, getattr(played, name))
    for name in ("status", "delete", "get_deployment_handle"):
        setattr(modules["ray.serve"], name, getattr(played, name))
    modules["ray"].serve = modules["ray.serve"]  # type: ignore[attr-defined]
    modules["ray.serve.context"]._get_global_client = lambda: played  # type: ignore[attr-defined]
    modules["ray.exceptions"].RayError = RayError  # type: ignore[attr-defined]
    modules["ray.serve.exceptions"].RayServeException = RayServeException  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return played


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("models: {tiny: {repo: org/tiny}}\nfleet: {key_file: fleet.key}")
    key = tmp_path / "fleet.key"
    key.touch(0o600)
    key.write_text(SECRET)
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


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RayServeException("no controller"), 69),
        (RayError(), 69),
        (ValueError("The route / is used by another application.\nTraceback"), 69),
        (TimeoutError("60 s"), 75),
    ],
)
def test_error_of_ray_is_no_bug_of_llamasup(
    ray: PlayedRay, config: Path, error: Exception, code: int
) -> None:
    ray.status_error = error
    for act in (deploy.status, deploy.down):
        with pytest.raises(
            FleetUnusable, match=rf"Ray at head:6379 failed: {type(error).__name__}"
        ) as raised:
            act(config, {})
        assert raised.value.exit_code == code
        assert "\n" not in raised.value.message
        assert not ray.connected


@pytest.mark.check("X4", "exit code 78")
@pytest.mark.parametrize(
    ("user_config", "secret"),
    [(None, SECRET), ({"fleet_id": "other"}, SECRET), ({}, SECRET), (..., "t" * 40)],
)
def test_fleet_with_another_secret_is_left_alone(
    ray: PlayedRay, config: Path, user_config: Any, secret: str
) -> None:
    ray.run_fleet()
    if user_config is not ...:
        ray.user_config = user_config
    config.with_name("fleet.key").write_text(secret)
    for act in (deploy.status, deploy.down):
        with pytest.raises(
            ConfigInvalid, match="The fleet 'llamasup' on the Ray cluster at head:6379"
        ) as error:
            act(config, {})
        assert "fleet.key_file" in error.value.remedy
    assert "llamasup" in ray.applications


def test_application_that_is_no_fleet_is_left_alone(ray: PlayedRay, config: Path) -> None:
    ray.run_fleet("llamasup", "chat")
    for act in (deploy.status, deploy.down):
        with pytest.raises(ConfigInvalid, match="is no fleet of llamasup"):
            act(config, {})
    assert "llamasup" in ray.applications


def test_fleet_that_ends_has_a_status_without_its_directory(ray: PlayedRay, config: Path) -> None:
    ray.run_fleet("llamasup", "model-tiny")
    ray.applications["llamasup"].status.value = "DELETING"
    shown = deploy.status(config, {})
    assert (shown["application"], [model["id"] for model in shown["models"]]) == ("ending", ["tiny"])


def test_fleet_of_another_name_is_not_this_one(ray: PlayedRay, config: Path) -> None:
    ray.run_fleet("other")
    assert deploy.status(config, {})["application"] is None
    assert not deploy.down(config, {})["ended"]
    config.write_text(config.read_text().replace("{key_file", "{name: other, key_file"))
    assert deploy.status(config, {})["application"] == "running"
    assert deploy.down(config, {}) == {"ended": True, "fleet": "other", "cluster": "head:6379"}


def test_status_has_the_nodes_that_the_directory_knows(ray: PlayedRay, config: Path) -> None:
    assert deploy.status(config, {})["application"] is None
    ray.run_fleet()
    report = NodeReport("tiny@a", "https://192.0.2.1:1", "tiny")
    ray.nodes = lambda: msgspec.json.encode([(report, True)])
    shown = deploy.status(config, {})
    assert (shown["fleet"], shown["cluster"]) == ("llamasup", "head:6379")
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
    for ended in (False, True, False):
        if ended:
            ray.run_fleet()
        assert deploy.down(config, {})["ended"] is ended


def test_end_has_more_time_than_a_replica_may_take() -> None:
    drain_s = Fleet().drain_timeout_s
    assert deploy.ends_within_s(Fleet()) > drain_s + LEAVE_S + STOP_S
    assert deploy.ends_within_s(Fleet(ingress=True)) > 2 * drain_s + LEAVE_S + STOP_S


def test_end_that_takes_too_long_says_that_ray_goes_on(ray: PlayedRay, config: Path) -> None:
    ray.run_fleet()
    ray.ends = False
    with pytest.raises(FleetUnusable, match="has not stopped within 0 s") as error:
        deploy.down(config, {}, timeout_s=0.0)
    assert error.value.exit_code == 75
    assert "Ray continues" in error.value.remedy


def test_signal_while_the_fleet_ends_says_that_ray_goes_on(
    ray: PlayedRay, config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ray.run_fleet()
    ray.ends = False
    ray.deleting = lambda: STOP_SIGNALS._handle(signal.SIGINT, None)
    with pytest.raises(Interrupted):
        fleet.down(config)
    assert "Ray continues" in capfd.readouterr().err
    assert not ray.connected


def test_news_of_ray_is_not_in_the_result(
    ray: PlayedRay, config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "1")  # and restore it

    def noisy() -> bytes:
        assert os.environ["RAY_ENABLE_AUTO_CONNECT"] == "0", "Ray reads it when it is imported"
        print("(raylet) a node has died")
        return msgspec.json.encode([])

    ray.run_fleet()
    ray.nodes = noisy
    assert fleet.status(config, json=True) == 0
    output = capfd.readouterr()
    assert msgspec.json.decode(output.out)["application"] == "running"
    assert "a node has died" not in output.err
