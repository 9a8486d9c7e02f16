from __future__ import annotations

import importlib.util
import json
import ssl
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamasup.config import load
from llamasup.config.reading import read
from llamasup.errors import ConfigInvalid, FleetUnusable
from llamasup.fleet.membership import Known, merged
from llamasup.fleet.messages import FleetNode, ListedModel, Snapshot
from llamasup.fleet.node_config import NodeFiles, node_config
from llamasup.fleet.resources import PlannedNeeds, actor_options, are_given
from llamasup.fleet.scaling import LOAD, ScaleByLoad, replicas_for
from llamasup.fleet.secret import control_key, directory_key, is_signed, node_key, signature
from llamasup.fleet.secret_file import fleet_secret
from llamasup.peers.membership import ExpectedModel, Peer
from llamasup.settings.sections import Fleet, FleetModel
from llamasup.settings.units import Size

SECRET = "s" * 40
FILES = NodeFiles("/run/keys", "/run/certificate.pem", "/run/key.pem")


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
    policy = ScaleByLoad(target=0.5)
    assert policy(SimpleNamespace(aggregated_metrics={LOAD: {"a": 0.5, "b": 0.75}})) == (3, {})
    assert policy(SimpleNamespace(aggregated_metrics=None)) == (0, {})


# --- resources ---------------------------------------------------------------------------------------


def test_plan_for_cpus_reserves_its_threads() -> None:
    options = actor_options(PlannedNeeds(1 << 30, 0, 8), FleetModel())
    assert options == {"num_cpus": 8, "num_gpus": 0, "memory": 1 << 30}


def test_plan_for_gpus_reserves_them_and_one_cpu() -> None:
    options = actor_options(PlannedNeeds(1 << 30, 2, 8), FleetModel())
    assert options == {"num_cpus": 1, "num_gpus": 2, "memory": 1 << 30}


def test_config_replaces_what_the_plan_says() -> None:
    own = FleetModel(cpus=0, gpus=1, memory=Size(bytes=5))
    assert are_given(own)
    assert not are_given(FleetModel(cpus=1))
    assert actor_options(None, own) == {"num_cpus": 0, "num_gpus": 1, "memory": 5}
    assert actor_options(PlannedNeeds(1 << 30, 0, 0), own)["num_cpus"] == 0


# --- secrets -----------------------------------------------------------------------------------------


def test_keys_of_a_fleet_differ_and_do_not_contain_its_secret() -> None:
    keys = {node_key(SECRET), control_key(SECRET), directory_key(SECRET)}
    assert len(keys) == 3
    assert not any(SECRET in key for key in keys)
    assert node_key(SECRET) != node_key("t" * 40)


def test_signature_counts_for_one_answer_to_one_request() -> None:
    signed = signature(SECRET, "nonce", b"body")
    assert is_signed(SECRET, "nonce", b"body", signed)
    assert not is_signed(SECRET, "other", b"body", signed)
    assert not is_signed(SECRET, "nonce", b"other", signed)
    assert not is_signed("t" * 40, "nonce", b"body", signed)
    assert not is_signed(SECRET, "nonce", b"body", "é")


def test_secret_is_created_once_with_mode_0600(tmp_path: Path) -> None:
    fleet = Fleet(key_file=tmp_path / "deep" / "fleet.key")
    secret = fleet_secret(fleet, {}, create=True)
    assert fleet_secret(fleet, {}) == secret == fleet_secret(fleet, {}, create=True)
    assert fleet.key_file is not None
    assert fleet.key_file.stat().st_mode & 0o777 == 0o600


def test_secret_of_the_environment_needs_no_file(tmp_path: Path) -> None:
    assert fleet_secret(Fleet(key_file=tmp_path / "no"), {"LLAMASUP_FLEET_SECRET": f"{SECRET}\n"}) == SECRET


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
        assert "pip install 'llamasup[fleet]'" in error.value.remedy
        assert error.value.exit_code == 69


# --- the config of a node ----------------------------------------------------------------------------


def test_node_gets_an_ordinary_config_with_its_model_alone(tmp_path: Path) -> None:
    written = {
        "listen": "0.0.0.0:80",
        "runtime": "bin/llama-server",
        "memory": {"ram": "80%"},
        "defaults": {"ctx_size": 512, "mmproj": "proj.gguf"},
        "downloads": {"token_file": "token", "parallel": 2},
        "models_dir": "models",
        "models": {
            "tiny": {"path": "tiny.gguf", "parallel": 2, "draft_model": "draft.gguf", "ttl": "1m"},
            "other": {"path": "other.gguf"},
            "t*": {"threads": 3},
        },
        "fleet": {"max_replicas": 3},
    }
    content = node_config(
        written,
        folder="/srv/fleet",
        model="tiny",
        source="/srv/fleet/tiny.gguf",
        aliases=("gpt-tiny",),
        files=FILES,
    )
    assert json.loads(content) == {
        "runtime": "/srv/fleet/bin/llama-server",
        "memory": {"ram": "80%"},
        "defaults": {"ctx_size": 512, "mmproj": "/srv/fleet/proj.gguf"},
        "downloads": {"token_file": "/srv/fleet/token", "parallel": 2},
        "models": {
            "tiny": {
                "path": "/srv/fleet/tiny.gguf",
                "parallel": 2,
                "draft_model": "/srv/fleet/draft.gguf",
                "aliases": ["gpt-tiny"],
                "preload": True,
                "ttl": "never",
            },
            "t*": {"threads": 3},
        },
        "auth": {"api_key_file": "/run/keys"},
        "http": {"tls_cert": "/run/certificate.pem", "tls_key": "/run/key.pem", "ui": False},
        "usage": {"enabled": False},
    }
    path = tmp_path / "node.yaml"
    path.write_bytes(content)
    reading, issues = read(path, {})
    assert not issues
    assert reading.config.models["tiny"].source == "/srv/fleet/tiny.gguf"


@pytest.mark.parametrize(
    ("source", "key"), [("org/repo:Q4_K_M", "repo"), ("https://example.net/m.gguf", "url"), ("demo", "path")]
)
def test_model_without_a_shared_path_keeps_where_it_comes_from(source: str, key: str) -> None:
    written = {"models": None, "defaults": None, "runtime": "auto"}
    content = node_config(written, folder="/srv", model="m", source=source, aliases=(), files=FILES)
    config = json.loads(content)
    assert config["models"]["m"][key] == source
    assert config["runtime"] == "auto"


def test_paths_of_the_node_and_lists_of_paths_are_kept() -> None:
    written = {
        "models": {
            "m": {
                "repo": "org/m",
                "mmproj": "~/proj.gguf",
                "loras": ["a.gguf", "/b.gguf"],
                "unknown": "x",
                "threads": 1,
            },
            "o*": None,
        }
    }
    content = node_config(written, folder="/srv", model="m", source="org/m", aliases=(), files=FILES)
    entry = json.loads(content)["models"]["m"]
    assert entry["mmproj"] == "~/proj.gguf"
    assert entry["loras"] == ["/srv/a.gguf", "/b.gguf"]
    assert entry["unknown"] == "x"


# --- the config of the fleet -------------------------------------------------------------------------


def test_fleet_of_a_config_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("fleet: {directory: 'http://head:8000/', idle_after: 1m, models: {m: {memory: 1GiB}}}")
    fleet = load(path, {}).fleet
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
    )
    key = node_key(SECRET)
    assert known.seen == 7
    assert known.peers == (Peer("a", "https://a", key, "PEM"), Peer("b", "https://b", key, "PEM", True))
    assert known.expected == (ExpectedModel("tiny", ("t",), "No node of the fleet has the model yet", 3.0),)


def test_nodes_that_a_started_directory_does_not_list_yet_stay() -> None:
    before = merged(Known(), snapshot(FleetNode("a", "https://a", "tiny")), SECRET)
    after = merged(before, snapshot(FleetNode("b", "https://b", "tiny"), settled=False), SECRET)
    assert [peer.name for peer in after.peers] == ["a", "b"]
    assert [peer.name for peer in merged(after, snapshot(), SECRET).peers] == []
