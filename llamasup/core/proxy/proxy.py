"""The proxy: its listeners, its client connections and their timeouts, its upstream connections."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from socket import socket
from time import monotonic
from typing import Any, Final

from msgspec.structs import replace

from llamasup.core.auth.keys import Keys
from llamasup.core.auth.quota import cost_of
from llamasup.core.http.heads import HeadRules, HttpError
from llamasup.core.observability.counters import GAVE_WAY, Metrics, RequestRecord
from llamasup.core.proxy.access_policy import AccessPolicy
from llamasup.core.proxy.backend import Backend
from llamasup.core.proxy.batch_gate import BatchGate
from llamasup.core.proxy.bodies import Bodies
from llamasup.core.proxy.connections import Connection, Connections
from llamasup.core.proxy.console_access import ConsoleAccess
from llamasup.core.proxy.downstream import Downstream
from llamasup.core.proxy.interfaces import NO_STAGES, AnswerStages, Dialect
from llamasup.core.proxy.listeners.bind import BACKLOG
from llamasup.core.proxy.listeners.tls import SecureListener, TlsContext
from llamasup.core.proxy.outbox import Outbox
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.settings import ProxyConfig
from llamasup.core.proxy.upstream.pool import Tasks, UpstreamPool
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.core.system.event_loops import DelayQueue
from llamasup.core.system.process.platform import give_memory_back

_log = logging.getLogger("llamasup.proxy")
_OF_CONTROL: Final = HeadRules(transparent=True)  # the answers of the control API are llamasup's own


class Proxy:
    """Serves clients on any number of sockets (``ProxyContext``). Made and used in one event loop.

    ``control``: the endpoint for /metrics and /llamasup/*; None: these are 404. ``on_finished`` is called for
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
        stages: AnswerStages = NO_STAGES,
    ) -> None:
        self.backend = backend
        self.config = config
        self.limits = config.limits
        self.stages = stages
        self.keys = Keys(config.key_file, config.api_keys, monotonic)
        self.console = ConsoleAccess(
            secrets.token_urlsafe(32), is_on=config.console, owns_address=config.route_by_model
        )
        self.bodies = Bodies(config.limits)
        self.batches = BatchGate()
        self.control = control
        self.metrics = metrics if metrics is not None else Metrics()
        self.draining = False
        self.uploads = 0  # requests whose bodies are forwarded while they arrive
        self.file_uploads = Counter[str]()  # the same to the API for batches, by client
        self._closed = False
        self._on_finished = on_finished
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks(self._loop)
        self.outbox = Outbox(self._loop.call_soon)
        self._servers: list[asyncio.Server | SecureListener] = []
        self.clients = Connections(config.limits)
        self._all_disconnected = asyncio.Event()
        self._pools: dict[Endpoint, UpstreamPool] = {}
        # Of ended generations: their connections may still carry last bytes.
        self._closing_pools: deque[UpstreamPool] = deque(maxlen=8)
        self._sweeper: asyncio.TimerHandle | None = None
        self._awaiting_cause = DelayQueue(config.limits.cause_wait_s)
        self._id_prefix = secrets.token_hex(5).encode()
        self._ids = count(1)

    # --- life

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

        for sock in sockets:
            self._servers.append(
                # asyncio calls listen() again. With a shorter backlog, connects of a burst would be lost, and
                # repeated a second later.
                await self._loop.create_server(lambda: Downstream(self, access), sock=sock, backlog=BACKLOG)
                if tls is None
                else SecureListener(self, access, sock, tls)
            )

    def stop_accepting(self) -> None:
        """Close the listening sockets; open connections continue."""
        for server in self._servers:
            server.close()
        self._servers.clear()

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
        self._awaiting_cause.stop()
        await self._tasks.aclose()
        if len(self.clients):  # connection_lost is called in the loop's next round
            await self._all_disconnected.wait()
        pools = (*self._pools.values(), *self._closing_pools)
        await asyncio.gather(*(pool.aclose() for pool in pools))
        self._pools.clear()

    # --- for connections and exchanges

    def on_connect(self, connection: Connection, client: str, *, unauthenticated: bool) -> HttpError | None:
        refusal = self.clients.enter(connection, client, unauthenticated=unauthenticated)
        self._all_disconnected.clear()
        if self._closed:
            raise ConnectionAbortedError
        if self._sweeper is None:
            self.keys.look()  # the sweep did not check the key file while no connection was open
            self._sweeper = self._loop.call_later(self.limits.sweep_s, self._sweep)
        return refusal

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon(callback)

    def start_soon(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.start(work, name)

    def await_cause(self, callback: Callable[[], None]) -> None:
        self._awaiting_cause.add(callback)

    def on_disconnect(self, connection: Connection) -> None:
        self.clients.leave(connection)
        if not len(self.clients):
            self._all_disconnected.set()

    def pool_of(self, endpoint: Endpoint) -> UpstreamPool:
        pool = self._pools.get(endpoint)
        if pool is None:
            pool = UpstreamPool(
                endpoint, self._tasks, self.limits.connect_s, self._rules_for(endpoint), self.outbox
            )
            self._pools[endpoint] = pool
            endpoint.when_closed(lambda: self._drop_pool(endpoint))
        return pool

    def _rules_for(self, endpoint: Endpoint) -> HeadRules:
        if endpoint is self.control:
            return _OF_CONTROL
        rules = self.config.rules
        return rules if endpoint.node is None else replace(rules, data_only=True)

    def next_id(self) -> bytes:
        return b"%b-%x" % (self._id_prefix, next(self._ids))

    def record_request(self, request: Request, record: RequestRecord) -> None:
        if request.quota is not None:
            cost = cost_of(record.tokens_prompt, record.tokens_cached, record.tokens_completion)
            never_sent = record.outcome == "unavailable" and not record.replayed
            gave_way = record.outcome == GAVE_WAY and not record.generation
            refund = never_sent or gave_way or record.outcome == "refused"
            self.keys.leave(request, cost + request.unreported_tokens, refund=refund)
        if request.held_bytes:
            self.bodies.drop(request)
        if request.in_lane:
            batches = self.batches
            if batches.is_used:
                batches.leave(request, record.ended_s)
            else:
                request.in_lane = False
                batches.others -= 1
                batches.last_s = record.ended_s
        self.metrics.count_request(record)
        if self._on_finished is not None:
            try:
                self._on_finished(record)
            except Exception:
                _log.exception("on_finished failed")

    def _drop_pool(self, endpoint: Endpoint) -> None:
        pool = self._pools.pop(endpoint, None)
        if pool is not None:  # else the proxy has been closed
            pool.close()
            self._closing_pools.append(pool)

    def _sweep(self) -> None:
        """One timer for all connections: a timer for each request would cost more than its parsing."""
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
