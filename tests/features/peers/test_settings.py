"""The section ``peers`` of a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.features.peers.settings import PEERS
from tests.core.config.reading import config_of, issue_of


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("{}", "c.yaml:2: peers.desk: url is missing"),
        ("{url: desk:8080}", "c.yaml:2: peers.desk.url: invalid value"),
        ("{url: 'http://desk.example.net:8080', key_file: k}", "http to 'desk.example.net' is refused"),
        ("{url: 'http://8.8.8.8:8080', key_file: k}", "http to '8.8.8.8' is refused"),
        ("{url: 'http://192.168.1.20:8080'}", "c.yaml:2: peers.desk: key_file is missing"),
        ("{url: 'https://desk.example.net'}", "c.yaml:2: peers.desk: key_file is missing"),
        ("{url: 'https://ex*ample'}", "is not a valid URL"),
        ("{url: 'http://127.0.0.1:8080', ca_file: ca}", "ca_file: has no effect without https"),
        ("{url: 'https://a/path', key_file: k}", "invalid value"),
    ],
)
def test_unsafe_or_incomplete_node_is_refused(peer: str, message: str) -> None:
    assert message in issue_of(f"peers:\n  desk: {peer}\n")


def test_two_nodes_with_one_url_are_refused() -> None:
    found = issue_of("peers:\n  desk: {url: 'http://[::1]:8080'}\n  door: {url: 'http://[::1]:8080/'}\n")
    assert found == "c.yaml:3: peers.door.url: is also the url of 'desk'; remove one of them"


def test_config_may_have_only_the_models_of_other_nodes() -> None:
    config = config_of("peers: {desk: {url: 'http://10.1.2.3:8080', key_file: desk.key}}")
    assert config.of(PEERS)["desk"].url == "http://10.1.2.3:8080"
    assert config.of(PEERS)["desk"].key_file == Path("/etc/llamasup/desk.key")
