"""Where a server listens."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Address", "TcpAddress", "UnixAddress"]


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    @property
    def url(self) -> str:
        # The authority that an HTTP client over a Unix socket sends as Host.
        return "http://localhost"


Address = TcpAddress | UnixAddress
