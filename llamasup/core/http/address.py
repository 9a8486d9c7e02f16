"""Addresses to listen on, and allowlist entries for Host (X2), Origin (X3) and hosts of media URLs (X7)."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress

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
            f"{text!r} would let every web page that a user here has open use the model.",
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
    host = f"[{name}]" if ":" in name else name
    return f"{scheme}://{host}" + ("" if port in (None, _DEFAULT_PORTS.get(scheme)) else f":{port}")


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
    host = f"[{name}]" if ":" in name else name
    return host if port is None else f"{host}:{port}"


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
        return ipaddress.ip_address(host).is_loopback
    return False


# RFC 1918, RFC 6598 (shared address space, which VPNs of several machines use), RFC 4193 and link-local.
_PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        (
            "10.0.0.0/8",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "100.64.0.0/10",
            "169.254.0.0/16",
            "fc00::/7",
            "fe80::/10",
        ),
    )
)


def is_private(host: str) -> bool:
    """Return whether ``host`` is an address of a private network. A name could resolve to any address."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        return any(address in network for network in _PRIVATE)
    return False


def host_of_url(url: str) -> str | None:
    """Return the host of ``http://HOST[:PORT]``, IPv6 without its brackets; None if it is malformed."""
    parsed = parse_authority(url.partition("://")[2].encode("utf-8", "replace"))
    return None if parsed is None or parsed[1] == 0 else parsed[0]
