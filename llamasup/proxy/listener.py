"""The proxy as a whole: its listeners, its connections and their time-outs, its pools."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from socket import socket
from ssl import SSLContext
from time import monotonic

from llamasup.proxy.door import Door
from llamasup.proxy.downstream import Downstream
from llamasup.proxy.pool import Pool
from llamasup.proxy.settings import ProxyConfig
from llamasup.proxy.tasks import Tasks
from llamasup.runtime.endpoint import Backend, Endpoint
from llamasup.runtime.metrics import Metrics, RequestRecord

__all__ = ["Proxy"]

_log = logging.getLogger("llamasup.proxy")


class Proxy:
    """Serves clients on any number of sockets. Made and used in one event loop.

    ``control`` is where /metrics and /llamasup/* are answered; None: they are 404. ``on_finished`` hears of
    every finished request, on the hot path: it must return at once.
    """

    def __init__(
        self,
        backend: Backend,
        config: ProxyConfig,
        *,
        control: Endpoint | None = None,
        metrics: Metrics | None = None,
        on_finished: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.backend = backend
        self.config = config
        self.limits = config.limits
        self.control = control
        self.metrics = metrics if metrics is not None else Metrics()
        self.draining = False
        self._closed = False
        self._on_finished = on_finished
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks(self._loop)
        self._servers: list[asyncio.Server] = []
        self._connections: set[Downstream] = set()
        self._all_left = asyncio.Event()
        self._pools: dict[Endpoint, Pool] = {}
        self._closing_pools: deque[Pool] = deque(
            maxlen=8
        )  # of generations that went; their last bytes may linger
        self._sweeper: asyncio.TimerHandle | None = None
        self._id_prefix = secrets.token_hex(5).encode()
        self._ids = count(1)

    # --- life

    async def start(
        self, sockets: Sequence[socket], *, trusted: bool = False, tls: SSLContext | None = None
    ) -> None:
        """Serve on listening sockets. ``trusted``: a Unix socket whose file permissions are the authority."""
        door = Door(self.config, trusted=trusted)
        for sock in sockets:
            server = await self._loop.create_server(lambda: Downstream(self, door), sock=sock, ssl=tls)
            self._servers.append(server)

    def stop_accepting(self) -> None:
        """Close the listening sockets; connections go on."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    def drain(self) -> None:
        """Close idle connections now and the others behind their next response."""
        self.draining = True
        for connection in tuple(self._connections):
            connection.close_if_idle()

    async def aclose(self) -> None:
        """Close what is idle, break what is left."""
        self.stop_accepting()
        self._closed = True
        self.drain()  # a connection that has just had its last answer is not to lose it by a reset
        for _ in range(2):  # rounds of the loop, for connections that were accepted and have not joined yet
            await asyncio.sleep(0)
        for connection in tuple(self._connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        await self._tasks.aclose()
        if self._connections:  # connection_lost is called in the loop's next round
            await self._all_left.wait()
        pools = (*self._pools.values(), *self._closing_pools)
        await asyncio.gather(*(pool.aclose() for pool in pools))
        self._pools.clear()

    @property
    def connections(self) -> int:
        """Open client connections."""
        return len(self._connections)

    # --- for connections and exchanges

    def joined(self, connection: Downstream) -> None:
        self._connections.add(connection)
        self._all_left.clear()
        if self._closed:
            connection.abort()
            return
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self.limits.sweep_s, self._sweep)

    def soon(self, callback: Callable[[], None]) -> None:
        """Call back in the loop's next round."""
        self._loop.call_soon(callback)

    def left(self, connection: Downstream) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_left.set()

    def pool_of(self, endpoint: Endpoint) -> Pool:
        pool = self._pools.get(endpoint)
        if pool is None:
            pool = Pool(endpoint, self._loop, self._tasks, self.limits.connect_s, self.config.rules)
            self._pools[endpoint] = pool
            endpoint.when_closed(lambda: self._drop_pool(endpoint))
        return pool

    def next_id(self) -> bytes:
        return b"%b-%x" % (self._id_prefix, next(self._ids))

    def tell(self, record: RequestRecord) -> None:
        self.metrics.count_request(record)
        if self._on_finished is not None:
            try:
                self._on_finished(record)
            except Exception:
                _log.exception("on_finished failed")

    def _drop_pool(self, endpoint: Endpoint) -> None:
        pool = self._pools.pop(endpoint, None)
        if pool is not None:  # else the proxy was closed first
            pool.close()
            self._closing_pools.append(pool)

    def _sweep(self) -> None:
        """One timer for all connections: one per request would cost more than the request's parsing."""
        now = monotonic()
        for connection in tuple(self._connections):
            connection.sweep(now)
        idle = 0
        for pool in self._pools.values():
            pool.sweep(now)
            idle += len(pool)
        busy = bool(self._connections or idle)
        self._sweeper = self._loop.call_later(self.limits.sweep_s, self._sweep) if busy else None
