"""Where a child listens and how it is kept from others: a Unix socket, or a loopback port with a key."""

from __future__ import annotations

from typing import Literal

from llamasup.http.address import Address, UnixAddress
from llamasup.llama_server.capabilities import Capabilities
from llamasup.llama_server.flags import CommandLine

__all__ = ["child_address_kind", "give_address", "needs_key_file"]


def child_address_kind(capabilities: Capabilities, *, platform: str) -> Literal["unix", "tcp"]:
    """Where a child of this build should listen: on a Unix socket wherever it can (X5)."""
    return "unix" if capabilities.unix_sockets and platform != "win32" else "tcp"


def needs_key_file(capabilities: Capabilities) -> bool:
    """Whether this build takes an API key from a file only, not from its environment (2024-08 does)."""
    return _key_variable(capabilities) is None


def give_address(
    line: CommandLine,
    capabilities: Capabilities,
    address: Address,
    api_key: str | None,
    api_key_file: str | None,
) -> str | None:
    """Host, port and key. The name of the environment variable that has to carry the key, if one does."""
    if isinstance(address, UnixAddress):
        why = "a Unix socket in a private folder: no port for others to find"
        line.give("--host", address.path, why, essential=True)
        why = "has no meaning for a socket; given because the default is changing"
        line.give("--port", 0, why, essential=True)
        return None
    line.give("--host", address.host, "loopback only", essential=True)
    line.give("--port", address.port, "a free port, known before the start", essential=True)
    if api_key is None:
        return None
    variable = _key_variable(capabilities)
    if variable is None:
        if api_key_file is None:
            raise ValueError("this build takes its API key from a file only: see needs_key_file")
        why = "other users of this machine could reach the port"
        line.give("--api-key-file", api_key_file, why, essential=True)
    return variable


def _key_variable(capabilities: Capabilities) -> str | None:
    option = capabilities.find("--api-key")
    return None if option is None or option.removed else option.env
