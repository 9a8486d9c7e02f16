"""The addresses of RPC workers (pure).

llama.cpp's RPC has neither keys nor encryption, so an address is loopback or private, or ``tls://``: a tunnel
between two llamasups.
"""

from __future__ import annotations

import ipaddress
import re

from msgspec import Struct

from llamasup.core.http.address import is_loopback, is_private
from llamasup.errors import UsageInvalid

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
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{_TLS if self.tunnelled else ''}{host}:{self.port}"

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
            return str(ipaddress.ip_address(bare))
        except ValueError:
            return None
    return bare if len(bare) <= _MAX_NAME and all(map(_LABEL.fullmatch, labels)) else None


def refuse_reachable(host: str) -> None:
    """Raise UsageInvalid unless ``host`` is loopback or a private address. A name could resolve to any."""
    if is_loopback(host) or is_private(host):
        return
    name = "every address of this machine" if host in ("0.0.0.0", "::", "*") else "a public address or a name"  # noqa: S104
    raise UsageInvalid(f"{host!r} is {name}; RPC is only for private addresses.", remedy=_REMEDY)
