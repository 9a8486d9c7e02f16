"""Addresses: to listen on, in the allowlists for Host (X2), Origin (X3) and media URLs (X7), of RPC workers,
and of clients behind reverse proxies (pure).

llama.cpp's RPC has neither keys nor encryption, so the address of a worker is loopback or private, or
``tls://``: a tunnel between two llamasups.

Only a proxy that the user trusts may say in ``X-Forwarded-For`` for whom it asks. Each proxy appends the
address from which it was asked, so the list is read from its end; what an untrusted client has put before
that address is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final

from msgspec import Struct

from llamasup.core.http.heads import parse_authority
from llamasup.errors import UsageInvalid

ANY_HOST = "any"
"""The name for every host, as a media host."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def allowed_host(text: str) -> str:
    """Return the name or address of a Host header, without a port: every port is allowed.

    Raises UsageInvalid.
    """
    if "*" in text:
        raise UsageInvalid(
            f"{text!r} would admit any web page whose own name resolves to this address (DNS rebinding).",
            remedy="Name each host.",
        )
    bare = text if text.startswith("[") or text.count(":") < 2 else f"[{text}]"
    parsed = parse_authority(bare.encode("utf-8", "replace"))
    if parsed is None or not parsed[0]:
        raise UsageInvalid(f"{text!r} is not a host name.", remedy="Give a name such as llm.example.net.")
    name, port = parsed
    if port is not None:
        raise UsageInvalid(f"{text!r} has a port.", remedy=f"Give {name}: every port of it is allowed.")
    return name


# Top-level domains that are reserved for local networks, or are not delegated because so many use them there
# (RFC 6761, RFC 6762 appendix G, RFC 8375, ICANN for `internal`, `home` and `corp`).
_LOCAL_DOMAINS = (
    *(".localhost", ".local", ".internal", ".test", ".home.arpa"),
    *(".lan", ".home", ".corp", ".intranet", ".private"),
)
# No country and no other registry: of these domains, only those of countries can have an address themselves.
_is_bare_name = re.compile(r"(?!xn--|0x[0-9a-f]*\Z|[a-z]{2}\Z)[a-z0-9_-]*[a-z][a-z0-9_-]*").fullmatch


def is_local_name(name: str) -> bool:
    """Return whether no public DNS resolves ``name``, so that nobody on the internet can make a browser send
    it here (DNS rebinding): ``nas``, ``llama.internal``.
    """
    return bool(_is_bare_name(name)) or name.endswith(_LOCAL_DOMAINS)


def allowed_origin(text: str) -> str:
    """Return an Origin as browsers send it: scheme, name, and the port if it is not the default.

    Raises UsageInvalid.
    """
    if "*" in text:
        raise UsageInvalid(
            f"{text!r} would let every web page that a user has open use the model.",
            remedy="Name each origin.",
        )
    scheme, separator, authority = text.lower().partition("://")
    parsed = parse_authority(authority.encode("utf-8", "replace"))
    if not separator or not _SCHEME.fullmatch(scheme) or parsed is None or not parsed[0]:
        raise UsageInvalid(
            f"{text!r} is not an origin.",
            remedy="Give only scheme, name and port, such as https://chat.example.net or http://localhost:3000.",
        )
    name, port = parsed
    shown_port = "" if port in (None, _DEFAULT_PORTS.get(scheme)) else f":{port}"
    return f"{scheme}://{_bracketed(name)}{shown_port}"


def allowed_media_host(text: str) -> str:
    """Return a host that llama-server may fetch media from: ``HOST``, ``HOST:PORT`` or ``any``.

    Raises UsageInvalid.
    """
    parsed = parse_authority(text.encode("utf-8", "replace"))
    if parsed is None or not parsed[0]:
        raise UsageInvalid(
            f"{text!r} is not a valid media host.",
            remedy="Give HOST or HOST:PORT, such as cdn.example.net or 10.0.0.5:8000, or any for every host.",
        )
    name, port = parsed
    return _bracketed(name) if port is None else f"{_bracketed(name)}:{port}"


_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound


class TcpAddress(Struct, frozen=True):
    host: str
    port: int
    tls: bool = False

    @property
    def authority(self) -> str:
        """The host and port as configured."""
        return f"{_bracketed(self.host)}:{self.port}"

    @property
    def url(self) -> str:
        """The URL for clients on this machine; with loopback if the server listens on every address (X2)."""
        host = _bracketed(_LOOPBACK_OF.get(self.host, self.host))
        return f"http{'s' if self.tls else ''}://{host}:{self.port}"

    @property
    def shown(self) -> str:
        """The address as messages show it."""
        return self.url


class UnixAddress(Struct, frozen=True):
    path: str

    @property
    def url(self) -> str:
        # The authority that an HTTP client over a Unix socket sends as Host.
        return "http://localhost"

    @property
    def shown(self) -> str:
        return self.path


Address = TcpAddress | UnixAddress


def listen_text(address: Address) -> str:
    """Return the address in the notation of a config."""
    return address.path if isinstance(address, UnixAddress) else address.authority


def addresses(host: str) -> list[str]:
    """Return the addresses of ``--host``, separated by commas as llama-server's (b11434)."""
    return list(dict.fromkeys(name for name in map(str.strip, host.split(",")) if name))


def invalid_host_remedy(host: str) -> str | None:
    """Return the remedy for an invalid ``host``; None for a name, an address or the path of a socket."""
    if host.endswith(".sock"):
        return None
    if "://" in host:
        return "Give only the name or the address."
    if "/" in host:
        return "Give a path that ends in .sock for a Unix socket."
    if host.count(":") == 1:
        return "Give the port with --port."
    if host.startswith("["):
        return "Leave the brackets out."
    return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def is_local(host: str) -> bool:
    """Return whether only this machine can reach ``host``: a loopback address or a Unix socket."""
    return host.endswith(".sock") or is_loopback(host)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address.

    A name other than localhost could resolve to any address.
    """
    if host.lower() == "localhost":
        return True
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return False


# RFC 1918, RFC 6598 (shared address space, which VPNs of several machines use), RFC 4193 and link-local.
_PRIVATE = tuple(
    ip_network(network)
    for network in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"),
        *("fc00::/7", "fe80::/10"),
    )
)


def is_private(host: str) -> bool:
    """Return whether ``host`` is an address of a private network. A name could resolve to any address."""
    return _is_in(host, _PRIVATE)


def _is_in(host: str, networks: Iterable[IPv4Network | IPv6Network]) -> bool:
    with suppress(ValueError):
        address = ip_address(host.partition("%")[0])
        return any(address in network for network in networks)
    return False


def host_of_url(url: str) -> str | None:
    """Return the host of ``http://HOST[:PORT]``, IPv6 without its brackets; None if it is malformed."""
    parsed = parse_authority(url.partition("://")[2].encode("utf-8", "replace"))
    return None if parsed is None or parsed[1] == 0 else parsed[0]


# --- RPC workers -----------------------------------------------------------------------------------

_TLS = "tls://"
_LOCALHOST, _LOOPBACK = "localhost", "127.0.0.1"
_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>[0-9]{1,5})")
_LABEL = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)")
_MAX_NAME = 253
_MAX_PORT = 65_535
_REMEDY = (
    "The protocol has neither keys nor encryption. Let the worker listen on 127.0.0.1 or on a private "
    "address, or use a tunnel: llamasup rpc-worker --tunnel, and tls://HOST:PORT here."
)


class WorkerAddress(Struct, frozen=True):
    host: str
    port: int
    tunnelled: bool = False

    def __str__(self) -> str:
        return f"{_TLS if self.tunnelled else ''}{_bracketed(self.host)}:{self.port}"

    @property
    def identity(self) -> tuple[str, int]:
        """A value that is equal for two addresses of one worker."""
        return _LOOPBACK if self.host == _LOCALHOST else self.host, self.port


def parse_worker(text: str) -> WorkerAddress:
    """Parse ``HOST:PORT`` or ``tls://HOST:PORT``.

    Raises UsageInvalid, also for an address that is not private.
    """
    tunnelled = text.startswith(_TLS)
    found = _HOST_PORT.fullmatch(text.removeprefix(_TLS))
    host = None if found is None else _canonical(found["host"])
    if found is None or host is None or not 0 < int(found["port"]) <= _MAX_PORT:
        raise UsageInvalid(
            f"{text!r} is not the address of an RPC worker.",
            remedy="Give HOST:PORT such as 10.0.0.2:50052, or tls://HOST:PORT for a tunnel.",
        )
    if not tunnelled:
        refuse_reachable(host)
        if ":" in host:
            raise UsageInvalid(
                f"{text!r} is an IPv6 address, which llama.cpp's RPC does not support.",
                remedy="Give an IPv4 address, or use a tunnel: tls://HOST:PORT.",
            )
        # A tunnel keeps the name, which is compared with that of the certificate.
        host = _LOOPBACK if host == _LOCALHOST else host
    return WorkerAddress(host, int(found["port"]), tunnelled)


def _canonical(host: str) -> str | None:
    """An address or a name in the one notation in which two are compared; None if it is neither."""
    bare = host.removeprefix("[").removesuffix("]").lower().removesuffix(".")
    labels = bare.split(".")
    if host.startswith("[") or labels[-1].isdecimal():
        try:
            return str(ip_address(bare))
        except ValueError:
            return None
    return bare if len(bare) <= _MAX_NAME and all(map(_LABEL.fullmatch, labels)) else None


def refuse_reachable(host: str) -> None:
    """Raise UsageInvalid unless ``host`` is loopback or a private address. A name could resolve to any."""
    if is_loopback(host) or is_private(host):
        return
    name = "every address of this machine" if host in ("0.0.0.0", "::", "*") else "a public address or a name"  # noqa: S104
    raise UsageInvalid(f"{host!r} is {name}; RPC is only for private addresses.", remedy=_REMEDY)


# --- clients behind reverse proxies ----------------------------------------------------------------

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
        return bool(self._networks) and _is_in(peer, self._networks)

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
