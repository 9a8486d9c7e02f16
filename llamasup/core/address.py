"""Where a server listens."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["Address", "TcpAddress", "UnixAddress", "addresses", "is_local", "is_loopback", "why_no_host"]


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


def why_no_host(host: str) -> str | None:
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
