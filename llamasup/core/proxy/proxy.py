"""The proxy: its listeners, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from socket import socket

from llamasup.core.proxy.access_policy import AccessPolicy
from llamasup.core.proxy.context import Dialect, ProxyContext
from llamasup.core.proxy.downstream import Downstream
from llamasup.core.proxy.listeners.bind import BACKLOG
from llamasup.core.proxy.listeners.tls import SecureListener, TlsContext


class Proxy(ProxyContext):
    """Listens on any number of sockets, and serves their clients."""

    async def start(
        self,
        sockets: Sequence[socket],
        *,
        trusted: bool = False,
        tls: TlsContext | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        """Serve on listening sockets. ``trusted``: a Unix socket, for which the file permissions decide.
        ``dialect``: another API that they also speak.
        """
        access = AccessPolicy(self.config, self.keys, trusted=trusted, console=self.console, dialect=dialect)

        serve = partial(Downstream, self, access)
        for sock in sockets:
            if tls is None:
                # asyncio calls listen() again. With a shorter backlog, connects of a burst would be lost, and
                # repeated a second later.
                server = await self._loop.create_server(serve, sock=sock, backlog=BACKLOG)
                self._close_listeners.append(server.close)
            else:
                self._close_listeners.append(SecureListener(self, access, sock, tls).close)

    def stop_accepting(self) -> None:
        """Close the listening sockets; open connections continue."""
        for close in self._close_listeners:
            close()
        self._close_listeners.clear()

    def drain(self) -> None:
        """Close idle connections now, and the others after their next response."""
        self.draining = True
        for connection in self.clients:
            connection.close_if_idle()

    async def aclose(self) -> None:
        """Close idle connections in order, and abort the others."""
        self.stop_accepting()
        self._closed = True
        self.drain()  # without it, a reset could destroy an answer that was just written
        for _ in range(2):  # rounds of the loop, until accepted connections have called ``on_connect``
            await asyncio.sleep(0)
        for connection in self.clients:
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self.awaiting_cause.stop()
        await self.tasks.aclose()
        if len(self.clients):  # connection_lost is called in the loop's next round
            await self._all_disconnected.wait()
        pools = (*self._pools.values(), *self._closing_pools)
        await asyncio.gather(*(pool.aclose() for pool in pools))
        self._pools.clear()
