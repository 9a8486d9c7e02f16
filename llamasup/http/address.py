"""Addresses to listen on, and allowlist entries for Host (X2), Origin (X3) and hosts of media URLs (X7)."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress
from dataclasses import dataclass

from llamasup.errors import UsageInvalid
from llamasup.http.heads import parse_authority

__all__ = [
    "ANY_HOST",
    "Address",
    "TcpAddress",
    "UnixAddress",
    "addresses",
    "allowed_host",
    "allowed_media_host",
    "allowed_origin",
    "invalid_host_remedy",
    "is_local",
    "is_loopback",
]


ANY_HOST = "any"
"""As a media host: every host."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_USUAL_PORTS = {"http": 80, "https": 443}


def allowed_host(text: str) -> str:
    """The name or address of a Host header, without its port: any port is taken. Raises UsageInvalid."""
    if "*" in text:
        raise UsageInvalid(
            f"{text!r} would let any web page in that brings its own name for this address (DNS rebinding).",
            remedy="Name each host.",
        )
    bare = text if text.startswith("[") or text.count(":") < 2 else f"[{text}]"
    parsed = parse_authority(bare.encode("utf-8", "replace"))
    if parsed is None or not parsed[0]:
        raise UsageInvalid(f"{text!r} is no host name.", remedy="Give a name such as llm.example.net.")
    name, port = parsed
    if port is not None:
        raise UsageInvalid(f"{text!r} has a port.", remedy=f"Give {name}: every port of it is taken.")
    return name


def allowed_origin(text: str) -> str:
    """An Origin as browsers send it: scheme, name, and the port where it is not the usual one.

    Raises UsageInvalid.
    """
    if "*" in text:
        raise UsageInvalid(
            f"{text!r} would let every web page that somebody here has open use the model.",
            remedy="Name each origin.",
        )
    scheme, separator, authority = text.lower().partition("://")
    parsed = parse_authority(authority.encode("utf-8", "replace"))
    if not separator or not _SCHEME.fullmatch(scheme) or parsed is None or not parsed[0]:
        raise UsageInvalid(
            f"{text!r} is no origin.",
            remedy="Give scheme, name and port alone, such as https://chat.example.net or http://localhost:3000.",
        )
    name, port = parsed
    host = f"[{name}]" if ":" in name else name
    return f"{scheme}://{host}" + ("" if port in (None, _USUAL_PORTS.get(scheme)) else f":{port}")


def allowed_media_host(text: str) -> str:
    """A host that llama-server may fetch media from: ``HOST``, ``HOST:PORT`` or ``any``.

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


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int
    tls: bool = False

    @property
    def authority(self) -> str:
        """As it was said."""
        return f"{_bracketed(self.host)}:{self.port}"

    @property
    def url(self) -> str:
        """For clients on this machine. Where every address is meant, loopback's (X2)."""
        host = _bracketed(_LOOPBACK_OF.get(self.host, self.host))
        return f"http{'s' if self.tls else ''}://{host}:{self.port}"

    @property
    def shown(self) -> str:
        """For people."""
        return self.url


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    @property
    def url(self) -> str:
        # The authority that an HTTP client over a Unix socket sends as Host.
        return "http://localhost"

    @property
    def shown(self) -> str:
        return self.path


Address = TcpAddress | UnixAddress


def addresses(host: str) -> list[str]:
    """Of ``--host``, which may name several with commas between them, as llama-server's (b11434)."""
    return list(dict.fromkeys(each for each in map(str.strip, host.split(",")) if each))


def invalid_host_remedy(host: str) -> str | None:
    """What to do about one that can be neither a name, nor an address, nor the path of a socket."""
    if host.endswith(".sock"):
        return None
    if "://" in host:
        return "Give the name or the address alone."
    if "/" in host:
        return "Give a path that ends in .sock, if it is to be a Unix socket."
    if host.count(":") == 1:
        return "Give the port with --port."
    if host.startswith("["):
        return "Leave the brackets out."
    return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def is_local(host: str) -> bool:
    """Whether only this machine can reach it: a loopback address or a Unix socket."""
    return host.endswith(".sock") or is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. Any other name may resolve to anything: no."""
    if host.lower() == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
