from __future__ import annotations

import importlib.util
import math
import ssl
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.settings.units import Size
from llamasup.core.system.extras import install_command
from llamasup.errors import ConfigInvalid, FleetUnusable
from llamasup.features.peers.nodes import ExpectedModel, Peer
from llamasup.fleet.membership import Known, merged
from llamasup.fleet.messages import FleetNode, ListedModel, NodeLoad, Snapshot
from llamasup.fleet.replicas import (
    ABSENT_S,
    LOAD,
    MAKES_ROOM,
    PlannedNeeds,
    ScaleByLoad,
    actor_options,
    are_given,
    given_for,
    replicas_for,
)
from llamasup.fleet.secret import control_key, directory_key, is_signed, node_key, signature
from llamasup.fleet.secret_file import fleet_secret
from llamasup.fleet.settings import FLEET, Fleet, FleetModel
from tests.kit.configs import load

SECRET = "s" * 40


# --- scaling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loads", "replicas"),
    [
        ((), 0),
        ((0.0, 0.0), 0),
        ((0.1,), 1),
        ((0.8,), 1),  # exactly at the target
        ((1.0,), 2),
        ((0.8, 0.8, 0.8), 3),
        ((1.0, 1.0), 3),
        ((4.0,), 5),  # many wait at the node
        ((0.5, 0.2), 1),
    ],
)
def test_as_many_replicas_as_bring_the_load_to_the_target(loads: tuple[float, ...], replicas: int) -> None:
    assert replicas_for(loads, 0.8) == replicas


def test_policy_reads_the_load_that_replicas_report() -> None:
    played = PlayedScaling(idle_after_s=0.0)
    assert played.asked({"a": 0.5, "b": 0.75}, current=2, target=2) == 3
    assert played.asked({"a": 0.0}, current=1, target=1) == 0
    assert played.asked(None, current=0, target=0) == 0


def test_last_replica_ends_when_it_has_been_idle_for_long_enough() -> None:
    played = PlayedScaling(idle_after_s=100.0)
    assert played.asked({"a": 0.5}, current=1, target=1) == 1
    assert played.asked({"a": 0.0}, current=1, target=1, after_s=99.0) == 1
    assert played.asked({"a": 0.5}, current=1, target=1) == 1
    assert played.asked({"a": 0.0, "b": 0.0}, current=2, target=2, after_s=50.0) == 1, "Serve ends the rest"
    assert played.asked({"a": 0.0}, current=1, target=1, after_s=50.0) == 0


def test_replica_that_has_not_reported_yet_is_idle() -> None:
    played = PlayedScaling(idle_after_s=100.0)
    assert played.asked({}, current=1, target=1) == 1
    assert played.asked({"a": 0.0}, current=1, target=1, after_s=100.0) == 0


def test_start_that_has_failed_is_given_up_so_that_serve_tries_again() -> None:
    played = PlayedScaling(idle_after_s=1000.0)
    assert played.asked(None, current=0, target=1) == 1
    assert played.asked({}, current=0, target=1, after_s=ABSENT_S - 1) == 1
    assert played.asked({}, current=0, target=1, after_s=1.0) == 0
    assert played.asked({}, current=0, target=0) == 0
    assert played.asked({}, current=0, target=1) == 1, "the next start has as much time"


@pytest.mark.parametrize("idle_after_s", [10.0, 100.0])
def test_update_of_a_model_that_served_lately_has_the_time_to_load(idle_after_s: float) -> None:
    played = PlayedScaling(idle_after_s)
    assert played.asked({"a": 0.5}, current=1, target=1) == 1
    assert played.asked({}, current=0, target=1, after_s=5.0) == 1
    longer_s = max(ABSENT_S, idle_after_s - 5.0)
    assert played.asked({}, current=0, target=1, after_s=longer_s - 1.0) == 1
    assert played.asked({}, current=0, target=1, after_s=1.0) == 0


@pytest.mark.parametrize("target", [0.8, 1.0])
def test_queue_at_the_fronts_asks_for_as_many_replicas_as_it_needs(target: float) -> None:
    load = NodeLoad(slots=4, busy=4, waiting=36.0)
    assert replicas_for([load.demand], target) == math.ceil(10 / target)


def test_last_replica_of_a_model_that_sleeps_stays_until_it_makes_room() -> None:
    played = PlayedScaling(idle_after_s=10.0, sleeps=True)
    assert played.asked({"a": 0.5}, current=1, target=1) == 1
    assert played.asked({"a": 0.0}, current=1, target=1, after_s=3600.0) == 1
    assert played.asked({"a": 0.0, "b": 0.0}, current=2, target=2, makes_room={"a": 0.0}) == 1
    assert played.asked({"a": 0.5}, current=1, target=1, makes_room={"a": 1.0}) == 1, "a request came"
    assert played.asked({"a": 0.0}, current=1, target=1, makes_room={"a": 1.0}) == 0


def test_sleeping_replica_makes_room_also_after_a_restart_of_the_controller() -> None:
    played = PlayedScaling(idle_after_s=600.0, sleeps=True)
    assert played.asked({"a": 0.0}, current=1, target=1, makes_room={"a": 1.0}) == 0


@pytest.mark.parametrize("restarts", [False, True])
def test_replacement_of_a_sleeping_replica_has_the_time_to_load(restarts: bool) -> None:
    """After a restart, the controller does not know that there was one."""
    played = PlayedScaling(idle_after_s=600.0, sleeps=True)
    if not restarts:
        assert played.asked({"a": 0.0}, current=1, target=1) == 1
    assert played.asked({}, current=0, target=1, after_s=3600.0) == 1
    assert played.asked({}, current=0, target=1, after_s=ABSENT_S + 1.0) == 1
    assert played.asked({}, current=0, target=1, after_s=600.0 - ABSENT_S - 1.0) == 0


def test_start_from_zero_that_has_failed_is_given_up_also_if_the_model_sleeps() -> None:
    played = PlayedScaling(idle_after_s=600.0, sleeps=True)
    assert played.asked(None, current=0, target=0) == 0
    assert played.asked({}, current=0, target=1) == 1
    assert played.asked({}, current=0, target=1, after_s=ABSENT_S) == 0


class PlayedScaling:
    """Serve, which gives each call the state that the last one returned."""

    def __init__(self, idle_after_s: float, *, sleeps: bool = False) -> None:
        self._policy = ScaleByLoad(0.5, idle_after_s, sleeps=sleeps)
        self._now_s = 1000.0
        self._state: dict[str, Any] = {}

    def asked(
        self,
        loads: dict[str, float] | None,
        *,
        current: int,
        target: int,
        after_s: float = 0.0,
        makes_room: Mapping[str, float] = MappingProxyType({}),
    ) -> int:
        self._now_s += after_s
        latest = {
            name: [SimpleNamespace(value=0.5), SimpleNamespace(value=v)] for name, v in makes_room.items()
        }
        context = SimpleNamespace(
            aggregated_metrics=None if loads is None else {LOAD: loads},
            raw_metrics=None if loads is None else {MAKES_ROOM: latest},
            current_num_replicas=current,
            target_num_replicas=target,
            policy_state=self._state,
            current_time=self._now_s,
        )
        number, self._state = self._policy(context)
        return number


# --- resources ---------------------------------------------------------------------------------------


def test_plan_for_cpus_reserves_its_threads() -> None:
    needs = PlannedNeeds(1 << 30, 0, 8)
    for given, needed in (
        (FleetModel(gpus=0), needs),
        (FleetModel(), replace(needs, wants_gpu=False)),
        (given_for("m", Fleet(gpus=0)), needs),
    ):
        options = actor_options("m", needed, given)
        assert options == {"num_cpus": 8, "num_gpus": 0, "memory": 1 << 30}


def test_machine_without_gpu_does_not_say_that_the_cluster_has_none() -> None:
    with pytest.raises(ConfigInvalid, match="How many GPUs") as error:
        actor_options("m", PlannedNeeds(1 << 30, 0, 8), FleetModel())
    assert "`gpus` under `fleet:`" in error.value.remedy


def test_gpus_of_a_model_replace_those_of_all() -> None:
    fleet = Fleet(gpus=1, models={"b": FleetModel(gpus=2), "c": FleetModel(cpus=3)})
    assert [given_for(model, fleet).gpus for model in "abc"] == [1, 2, 1]
    assert given_for("b", fleet).when_idle == "end"
    assert given_for("c", fleet).cpus == 3


def test_plan_for_gpus_reserves_them_and_one_cpu() -> None:
    options = actor_options("m", PlannedNeeds(1 << 30, 2, 8), FleetModel())
    assert options == {"num_cpus": 1, "num_gpus": 2, "memory": 1 << 30}


def test_config_replaces_what_the_plan_says() -> None:
    own = FleetModel(cpus=0, gpus=1, memory=Size(bytes=5))
    assert are_given(own)
    assert not are_given(FleetModel(cpus=1))
    assert actor_options("m", None, own) == {"num_cpus": 0, "num_gpus": 1, "memory": 5}
    assert actor_options("m", PlannedNeeds(1 << 30, 0, 0), own)["num_cpus"] == 0


# --- secrets -----------------------------------------------------------------------------------------


def test_keys_of_a_fleet_differ_and_do_not_contain_its_secret() -> None:
    keys = {node_key(SECRET), control_key(SECRET), directory_key(SECRET)}
    assert len(keys) == 3
    assert not any(SECRET in key for key in keys)
    assert node_key(SECRET) != node_key("t" * 40)


@pytest.mark.check("X4")
def test_signature_counts_for_one_answer_to_one_request() -> None:
    signed = signature(SECRET, "nonce", b"body")
    assert is_signed(SECRET, "nonce", b"body", signed)
    assert not is_signed(SECRET, "other", b"body", signed)
    assert not is_signed(SECRET, "nonce", b"other", signed)
    assert not is_signed("t" * 40, "nonce", b"body", signed)
    assert not is_signed(SECRET, "nonce", b"body", "é")
    assert not is_signed(SECRET, "a", b"x\nb", signature(SECRET, "a\nx", b"b"))


@pytest.mark.check("X4")
def test_secret_is_created_once_with_mode_0600(tmp_path: Path) -> None:
    fleet = Fleet(key_file=tmp_path / "deep" / "fleet.key")
    secret = fleet_secret(fleet, {}, create=True)
    assert fleet_secret(fleet, {}) == secret == fleet_secret(fleet, {}, create=True)
    assert fleet.key_file is not None
    assert fleet.key_file.stat().st_mode & 0o777 == 0o600


def test_secret_of_the_environment_needs_no_file(tmp_path: Path) -> None:
    assert fleet_secret(Fleet(key_file=tmp_path / "no"), {"LLAMASUP_FLEET_SECRET": f"{SECRET}\n"}) == SECRET


@pytest.mark.check("X4")
def test_missing_open_or_short_secrets_are_refused_without_showing_them(tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    fleet = Fleet(key_file=path)
    with pytest.raises(ConfigInvalid, match="no secret"):
        fleet_secret(fleet, {})
    path.write_text("short-secret")
    path.chmod(0o644)
    with pytest.raises(ConfigInvalid, match="Other users"):
        fleet_secret(fleet, {})
    path.chmod(0o600)
    with pytest.raises(ConfigInvalid, match="12 characters") as error:
        fleet_secret(fleet, {})
    assert "short-secret" not in error.value.message
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        fleet_secret(Fleet(key_file=tmp_path), {})


@pytest.mark.skipif(importlib.util.find_spec("cryptography") is None, reason="cryptography is not installed")
def test_all_members_derive_the_same_authority_and_it_signs_the_nodes(tmp_path: Path) -> None:
    from llamasup.fleet.certificates import authority, node_certificate

    assert authority(SECRET) == authority(SECRET) != authority("t" * 40)
    for host in ("192.0.2.1", "node.example.net"):
        certificate = node_certificate(SECRET, host)
        path = tmp_path / f"{host}.pem"
        path.write_bytes(certificate.chain + certificate.private_key)
        client, server = (
            ssl.create_default_context(cadata=authority(SECRET)),
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        )
        server.load_cert_chain(path)
        assert _handshake(client, server, host) is None
        assert _handshake(client, server, "192.0.2.9") is not None


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> ssl.SSLError | None:
    """The error of a handshake in memory."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)]
    for _ in range(6):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return error
    return None


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_missing_extra_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    from llamasup.fleet import app, deploy

    path = tmp_path / "config.yaml"
    path.write_text("models: {tiny: {repo: org/tiny}}\nfleet: {}")
    for act in (lambda: app({"config": str(path)}), lambda: deploy.status(path), lambda: deploy.down(path)):
        with pytest.raises(FleetUnusable, match="is not installed") as error:
            act()
        assert install_command("fleet") in error.value.remedy
        assert error.value.exit_code == 69


# --- the config of the fleet -------------------------------------------------------------------------


def test_fleet_of_a_config_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("fleet: {directory: 'http://head:8000/', idle_after: 1m, models: {m: {memory: 1GiB}}}")
    fleet = load(path, {}).of(FLEET)
    assert fleet is not None
    assert (fleet.directory, fleet.idle_after_s, fleet.min_replicas) == ("http://head:8000", 60.0, 0)
    assert fleet.models["m"].memory == Size(bytes=1 << 30)


# --- what a front knows ------------------------------------------------------------------------------


def snapshot(*nodes: FleetNode, settled: bool = True) -> Snapshot:
    return Snapshot(7, settled, "PEM", nodes, (ListedModel("tiny", ("t",), 3.0),))


def test_front_knows_the_nodes_and_models_of_the_snapshot() -> None:
    known = merged(
        Known(),
        snapshot(FleetNode("b", "https://b", "tiny", True), FleetNode("a", "https://a", "tiny")),
        SECRET,
        0.0,
    )
    key = node_key(SECRET)
    assert known.seen == 7
    assert known.peers == (Peer("a", "https://a", key, "PEM"), Peer("b", "https://b", key, "PEM", True))
    assert known.expected == (ExpectedModel("tiny", ("t",), "No node of the fleet has the model yet", 3.0),)


def test_front_knows_when_the_node_that_starts_will_be_ready() -> None:
    listed = (
        ListedModel("a", eta_s=3.0, starts=True),
        ListedModel("b", eta_s=3.0),
        ListedModel("c", starts=True),
    )
    known = merged(Known(), Snapshot(1, True, "PEM", (), listed), SECRET, 100.0)
    assert [model.ready_at_s for model in known.expected] == [103.0, None, None]


def test_waiting_clients_learn_why_no_node_starts() -> None:
    failed = Snapshot(1, True, "PEM", (), (ListedModel("tiny", problem="its last start failed: no file."),))
    (model,) = merged(Known(), failed, SECRET, 0.0).expected
    assert model.message == ("No node of the fleet has the model yet; its last start failed: no file")


def test_nodes_that_a_started_directory_does_not_list_yet_stay() -> None:
    before = merged(Known(), snapshot(FleetNode("a", "https://a", "tiny")), SECRET, 0.0)
    after = merged(before, snapshot(FleetNode("b", "https://b", "tiny"), settled=False), SECRET, 0.0)
    assert [peer.name for peer in after.peers] == ["a", "b"]
    assert [peer.name for peer in merged(after, snapshot(), SECRET, 0.0).peers] == []
    assert merged(before, snapshot(settled=False), SECRET, 0.0).served == {"tiny"}
    assert merged(before, snapshot(), SECRET, 0.0).served == set()


def test_model_whose_nodes_leave_is_not_served() -> None:
    leaving = FleetNode("a", "https://a", "tiny", True)
    assert merged(Known(), snapshot(leaving), SECRET, 0.0).served == set()
    both = snapshot(leaving, FleetNode("b", "https://b", "tiny"))
    assert merged(Known(), both, SECRET, 0.0).served == {"tiny"}
