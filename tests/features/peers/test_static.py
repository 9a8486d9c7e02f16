"""The nodes that a config names, with the content of their files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llamasup.errors import ConfigInvalid
from llamasup.features.peers.nodes import Peer
from llamasup.features.peers.settings import PeerEntry
from llamasup.features.peers.static import StaticMembership, peers_of
from tests.kit.async_tests import async_test

URL = "https://desk.example.net:8080"


def test_key_and_certificate_are_read_from_their_files(tmp_path: Path, certificate: tuple[str, str]) -> None:
    key = tmp_path / "key"
    key.write_text("sk-1\n")
    (peer,) = peers_of({"desk": PeerEntry(url=URL, key_file=key, ca_file=Path(certificate[0]))})
    assert (peer.name, peer.url, peer.key) == ("desk", URL, "sk-1")
    assert "BEGIN CERTIFICATE" in peer.ca
    assert peers_of({"desk": PeerEntry(url=URL), "bad": PeerEntry()}) == (Peer("desk", URL),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 words, not one key"),
        ("sk-1 name=desk", "has 2 words"),
        ("schlüssel", "is not ASCII text"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_file_without_one_key_is_refused_and_not_shown(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "sk-secret"
    if text is not None:
        path.write_text(text, "utf-8")
    with pytest.raises(ConfigInvalid, match=message) as caught:
        peers_of({"desk": PeerEntry(url=URL, key_file=path)})
    assert "peers.desk.key_file" in caught.value.message
    assert "sk-" not in caught.value.message


@pytest.mark.parametrize("text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nx\n"])
def test_file_without_a_certificate_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ca.pem"
    path.write_text(text)
    with pytest.raises(ConfigInvalid, match="has no certificate"):
        peers_of({"desk": PeerEntry(url=URL, ca_file=path)})


@async_test
async def test_membership_changes_when_the_config_does() -> None:
    desk = Peer("desk", URL)
    membership = StaticMembership((desk,))
    waiting = asyncio.get_running_loop().create_task(membership.changed())
    membership.replace((desk,))
    await asyncio.sleep(0)
    assert not waiting.done()
    membership.replace(())
    await waiting
    assert membership.current() == ()
    assert membership.expected() == ()
    membership.wanted("a", 1)
