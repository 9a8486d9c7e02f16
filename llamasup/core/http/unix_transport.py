"""An httpx transport over a Unix socket that can be cancelled at any time (see ``AsyncioBackend``)."""

from __future__ import annotations

import httpcore

from llamasup.core.http.httpx_import import httpx
from llamasup.core.http.network import AsyncioBackend


class UnixTransport(httpx.AsyncHTTPTransport):
    """A pool of any number of connections to the socket at ``path``."""

    def __init__(self, path: str) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            uds=path, max_connections=None, max_keepalive_connections=None, network_backend=AsyncioBackend()
        )
