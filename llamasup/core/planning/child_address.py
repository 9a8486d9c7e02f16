"""The private address of a child: a Unix socket, or a loopback port with a key."""

from __future__ import annotations

from typing import Literal

from llamasup.core.http.address import Address, UnixAddress
from llamasup.core.llama_server.argv_builder import CommandLine
from llamasup.core.llama_server.help_text import Capabilities


def child_address_kind(capabilities: Capabilities, *, platform: str) -> Literal["unix", "tcp"]:
    """The kind of address for a child of this build: a Unix socket if possible."""
    return "unix" if capabilities.unix_sockets and platform != "win32" else "tcp"


def needs_key_file(capabilities: Capabilities) -> bool:
    """Whether this build reads an API key only from a file, not from its environment (as 2024-08 does)."""
    return _variable(capabilities) is None


def key_variable(capabilities: Capabilities, address: Address, api_key: str | None) -> str | None:
    """Return the environment variable for the key of a child on TCP, if the build reads one."""
    return None if isinstance(address, UnixAddress) or api_key is None else _variable(capabilities)


def give_address(
    line: CommandLine,
    capabilities: Capabilities,
    address: Address,
    api_key: str | None,
    api_key_file: str | None,
) -> None:
    """Add host, port and key. ``key_variable`` has the key if the build reads one from its environment."""
    if isinstance(address, UnixAddress):
        why = "a Unix socket in a private folder, which other users cannot reach"
        line.give("--host", address.path, why, essential=True)
        why = "has no effect with a Unix socket; passed because its default is changing"
        line.give("--port", 0, why, essential=True)
        return
    line.give("--host", address.host, "only this machine can connect", essential=True)
    line.give("--port", address.port, "a free port, chosen before the start", essential=True)
    if api_key is not None and needs_key_file(capabilities):
        if api_key_file is None:
            raise ValueError("this build takes its API key from a file only: see needs_key_file")
        why = "other users of this machine can reach the port"
        line.give("--api-key-file", api_key_file, why, essential=True)


def _variable(capabilities: Capabilities) -> str | None:
    option = capabilities.find("--api-key")
    return None if option is None or option.removed else option.env
