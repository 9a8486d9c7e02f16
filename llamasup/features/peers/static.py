"""The nodes that the config names."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

from llamasup.core.config.config_keys import Config
from llamasup.core.settings.declaration import Place
from llamasup.core.system.storage.folders import read_bounded
from llamasup.errors import ConfigInvalid, LlamasupError
from llamasup.features.peers.nodes import ExpectedModel, Peer
from llamasup.features.peers.settings import PEERS, PeerEntry

_MAX_KEY_BYTES = 64 << 10
_MAX_CA_BYTES = 4 << 20


class StaticMembership:
    """A ``Membership`` that changes only by ``replace``."""

    def __init__(self, peers: tuple[Peer, ...]) -> None:
        self._peers = peers
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Do nothing: the owner replaces the nodes."""

    def current(self) -> tuple[Peer, ...]:
        return self._peers

    def replace(self, peers: tuple[Peer, ...]) -> None:
        """The config was read again."""
        if peers != self._peers:
            self._peers = peers
            self._changed.set()

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def expected(self) -> tuple[ExpectedModel, ...]:
        return ()

    def wanted(self, model: str, waiting: int) -> None:
        """Do nothing: no node is started."""


def config_problems(config: Config) -> Iterator[tuple[Place, LlamasupError]]:
    """Return the files of nodes that cannot be used."""
    for name, entry in config.of(PEERS).items():
        try:
            peers_of({name: entry})
        except LlamasupError as error:
            key = "ca_file" if ".ca_file" in error.message else "key_file"
            yield ("peers", name, key), error


def peers_of(entries: Mapping[str, PeerEntry]) -> tuple[Peer, ...]:
    """Return the nodes of a config, with the content of their files. Blocks; raises ConfigInvalid."""
    return tuple(
        Peer(name, entry.url, key=_key(name, entry.key_file), ca=_ca(name, entry.ca_file))
        for name, entry in entries.items()
        if entry.url is not None  # the config check has reported the others
    )


def _key(name: str, path: Path | None) -> str:
    if path is None:
        return ""
    # Errors do not show the path, which may be a key that was pasted there.
    text = _read(path, f"peers.{name}.key_file", _MAX_KEY_BYTES, "a file with the key alone")
    words = text.split()
    if len(words) != 1 or not words[0].isascii() or not words[0].isprintable():
        raise ConfigInvalid(
            f"The file of peers.{name}.key_file has {len(words)} words, not one key.",
            remedy="Write into it only the key that `llamasup key new` shows on that node.",
        )
    return words[0]


def _ca(name: str, path: Path | None) -> str:
    if path is None:
        return ""
    text = _read(path, f"peers.{name}.ca_file", _MAX_CA_BYTES, "a PEM file of certificates")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        raise ConfigInvalid(
            f"The file of peers.{name}.ca_file, {str(path)!r}, has no certificate.",
            remedy="Give a PEM file with the CA of the node's certificate, or with that certificate itself.",
        ) from None
    return text


def _read(path: Path, key: str, most_bytes: int, what: str) -> str:
    try:
        content, _ = read_bounded(path.expanduser(), most_bytes)
        return content.decode("ascii")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII text"
        raise ConfigInvalid(
            f"The file of {key} cannot be read: {reason}.", remedy=f"Give the path of {what}."
        ) from None
