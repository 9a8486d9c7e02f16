"""The proxy as a whole: its listeners, its connections and their time-outs, its pools."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from socket import socket
from time import monotonic
from typing import Any

from llamasup.auth.key_limits import Keys
from llamasup.auth.quota import cost_of
from llamasup.http.heads import HttpError
from llamasup.observability.metrics import Metrics, RequestRecord
from llamasup.proxy.backend import Backend
from llamasup.proxy.bind import BACKLOG
from llamasup.proxy.bodies import Bodies
from llamasup.proxy.connections import Connection, Connections
from llamasup.proxy.downstream import Downstream
from llamasup.proxy.gate import AccessPolicy
from llamasup.proxy.request import Request
from llamasup.proxy.settings import ProxyConfig
from llamasup.proxy.tls import SecureListener, TlsContext
from llamasup.proxy.upstream_pool import Pool, Tasks
from llamasup.queueing.endpoint import Endpoint
from llamasup.system.process.platform import give_memory_back

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
        self.keys = Keys(config.key_file, config.api_keys, monotonic)
        self.bodies = Bodies(config.limits)
        self.control = control
        self.metrics = metrics if metrics is not None else Metrics()
        self.draining = False
        self.uploads = 0  # requests whose bodies are sent on as they come
        self._closed = False
        self._on_finished = on_finished
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks(self._loop)
        self._servers: list[asyncio.Server | SecureListener] = []
        self.clients = Connections(config.limits)
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
        self, sockets: Sequence[socket], *, trusted: bool = False, tls: TlsContext | None = None
    ) -> None:
        """Serve on listening sockets. ``trusted``: a Unix socket whose file permissions are the authority."""
        door = AccessPolicy(self.config, self.keys, trusted=trusted)

        for sock in sockets:
            self._servers.append(
                # It listens once more. With a shorter queue the connects of a burst would be lost, and come
                # again a second later.
                await self._loop.create_server(lambda: Downstream(self, door), sock=sock, backlog=BACKLOG)
                if tls is None
                else SecureListener(self, door, sock, tls)
            )

    def stop_accepting(self) -> None:
        """Close the listening sockets; connections go on."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    def drain(self) -> None:
        """Close idle connections now and the others behind their next response."""
        self.draining = True
        for connection in self.clients:
            connection.close_if_idle()

    async def aclose(self) -> None:
        """Close what is idle, break what is left."""
        self.stop_accepting()
        self._closed = True
        self.drain()  # a connection that has just had its last answer is not to lose it by a reset
        for _ in range(2):  # rounds of the loop, for connections that were accepted and have not joined yet
            await asyncio.sleep(0)
        for connection in self.clients:
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        await self._tasks.aclose()
        if len(self.clients):  # connection_lost is called in the loop's next round
            await self._all_left.wait()
        pools = (*self._pools.values(), *self._closing_pools)
        await asyncio.gather(*(pool.aclose() for pool in pools))
        self._pools.clear()

    @property
    def connections(self) -> int:
        """Open client connections."""
        return len(self.clients)

    # --- for connections and exchanges

    def on_connect(self, connection: Connection, client: str, *, stranger: bool) -> HttpError | None:
        """Count a new connection; returns its refusal, if any. ``stranger`` as in ``Connections.enter``.

        Raises ConnectionAbortedError where it can only be broken off.
        """
        refusal = self.clients.enter(connection, client, stranger=stranger)
        self._all_left.clear()
        if self._closed:
            raise ConnectionAbortedError
        if self._sweeper is None:
            self.keys.look()  # nobody has looked while there was no connection
            self._sweeper = self._loop.call_later(self.limits.sweep_s, self._sweep)
        return refusal

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back in the loop's next round."""
        self._loop.call_soon(callback)

    def start_soon(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Do what has to be awaited, in a task that ends with the proxy."""
        self._tasks.start(work, name)

    def on_disconnect(self, connection: Connection) -> None:
        self.clients.leave(connection)
        if not len(self.clients):
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

    def record_request(self, request: Request, record: RequestRecord) -> None:
        """A request is over, and this is what became of it. Called once for each."""
        if request.quota is not None:
            cost = cost_of(record.tokens_prompt, record.tokens_cached, record.tokens_completion)
            never_sent = record.outcome == "unavailable" and not record.replayed
            refund = never_sent or record.outcome == "refused"
            self.keys.leave(request, cost + request.untold_tokens, refund=refund)
        if request.held_bytes:
            self.bodies.drop(request)
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
        self.keys.look()
        for connection in self.clients:
            connection.sweep(now)
        if self.bodies.may_return_memory():
            give_memory_back()
        idle = 0
        for pool in self._pools.values():
            pool.sweep(now)
            idle += len(pool)
        busy = bool(len(self.clients) or idle)
        self._sweeper = self._loop.call_later(self.limits.sweep_s, self._sweep) if busy else None
