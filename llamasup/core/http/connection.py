"""Connections to an address, for the proxy and for llamasup's own requests to its servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from llamasup.core.http.address import Address, UnixAddress

if TYPE_CHECKING:
    import ssl

AnyProtocol = TypeVar("AnyProtocol", bound=asyncio.BaseProtocol)


async def open_connection(
    address: Address, protocol_factory: Callable[[], AnyProtocol], tls: ssl.SSLContext | None = None
) -> tuple[asyncio.Transport, AnyProtocol]:
    """Connect a new protocol to ``address``. ``tls``: verifies a TCP server and its name. Raises OSError."""
    loop = asyncio.get_running_loop()
    if isinstance(address, UnixAddress):
        transport, protocol = await loop.create_unix_connection(protocol_factory, address.path)
    else:
        transport, protocol = await loop.create_connection(
            protocol_factory, address.host, address.port, ssl=tls
        )
    if (error := _connect_error(transport)) is not None:
        transport.abort()
        raise error
    return transport, protocol


def _connect_error(transport: asyncio.Transport) -> OSError | None:
    """Return the reason why a new connection cannot be used; None if it can."""
    if transport.is_closing():
        return ConnectionResetError("the connection was closed at once")
    try:
        transport.get_extra_info("socket").getpeername()
    except OSError:
        # If its backlog is full, a Unix socket returns EAGAIN, which asyncio treats as "in progress" and then
        # as connected (Python 3.11 to 3.13). llama-server's backlog is 512 (b11434).
        return BlockingIOError("its backlog of new connections is full")
    return None
