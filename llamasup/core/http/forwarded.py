"""The address of a client behind reverse proxies, from ``X-Forwarded-For`` (pure).

Only a proxy that the user trusts may say for whom it asks. Each proxy appends the address from which it was
asked, so the list is read from its end; what an untrusted client has put in front of it does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final

from llamasup.core.http.heads import parse_authority

UNIX: Final = "unix"
"""The name for every client of a Unix socket, as a trusted proxy."""
_MAX_HOPS: Final = 16  # a client can send any number


def proxy_network(text: str) -> IPv4Network | IPv6Network:
    """Return an address, or a network in CIDR notation. Raises ValueError."""
    return ip_network(text, strict=False)


class TrustedProxies:
    """The proxies at ``addresses``: addresses, networks, and ``unix``."""

    __slots__ = ("_networks", "_unix")

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        self._unix = UNIX in addresses
        self._networks = tuple(proxy_network(text) for text in addresses if text != UNIX)

    def __contains__(self, peer: str) -> bool:
        """Return whether ``peer`` is a trusted proxy.

        ``peer`` is an address; empty for a client of a Unix socket.
        """
        if not peer:
            return self._unix
        if not self._networks:
            return False
        try:
            address = ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def client_of(self, peer: str, forwarded_for: bytes) -> str:
        """Return the client that sent a request through ``peer``: the last address that is no trusted proxy.

        If there is none, the first of the proxies.
        """
        if not forwarded_for or peer not in self:
            return peer
        client = peer
        for hop in reversed(forwarded_for.split(b",")[-_MAX_HOPS:]):
            address = _address(hop)
            if not address:
                return client  # "unknown", or a name that hides the address: the proxy before it counts
            client = address
            if address not in self:
                return client
        return client


def _address(hop: bytes) -> str:
    """The address of one hop, with or without a port; empty if it is not one."""
    text = hop.strip()
    parsed = parse_authority(b"[%b]" % text if text.count(b":") > 1 and not text.startswith(b"[") else text)
    try:
        address = ip_address(parsed[0] if parsed else "")
    except ValueError:
        return ""
    return str(getattr(address, "ipv4_mapped", None) or address)
