"""The state that all parts of the proxy share, and the protocols of what they work with."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from time import monotonic
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.auth.keys import Keys
from llamasup.core.auth.quota import cost_of
from llamasup.core.http.heads import Head, HeadRules, HttpError
from llamasup.core.observability.counters import GAVE_WAY, Metrics, RequestRecord
from llamasup.core.proxy.backend import Backend
from llamasup.core.proxy.batch_gate import BatchGate
from llamasup.core.proxy.bodies import Bodies
from llamasup.core.proxy.connections import Connection, Connections
from llamasup.core.proxy.console_access import ConsoleAccess
from llamasup.core.proxy.outbox import Outbox
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.settings import ProxyConfig
from llamasup.core.proxy.stages import Stage
from llamasup.core.proxy.upstream.pool import Tasks, UpstreamPool
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.core.settings.model import Repairs
from llamasup.core.system.event_loops import DelayQueue
from llamasup.core.system.process.platform import give_memory_back

_log = logging.getLogger("llamasup.proxy")
_OF_CONTROL: Final = HeadRules(transparent=True)  # the answers of the control API are llamasup's own


class AnswerStages(Struct, frozen=True):
    """Makes the stages that features add to some requests. None: there is no such feature.

    ``repair`` is called for a request to a model that repairs something, before its lease. It may change the
    body, and set the ``holder`` of the request. ``keep`` is called for a request to a model that continues
    streams. It returns a stage with the given one behind it, or the given one. ``tools`` is called for a
    conversation that may have tools or system messages that llama-server does not know, before ``repair``. It
    may change the body, and set the ``translator``.
    """

    repair: Callable[[Request, Repairs, Metrics], None] | None = None
    keep: Callable[[Request, Stage], Stage] | None = None
    tools: Callable[[Request], None] | None = None


NO_STAGES: Final = AnswerStages()


class ProxyContext:
    """The state that the connections and the exchanges of a proxy share. Made and used in one event loop.

    ``control``: the endpoint for /metrics and /llamasup/*; None: these are 404. ``on_finished`` is called for
    every finished request, on the hot path: it must return at once. ``clients``: the open connections.
    ``owners`` returns the ids of the models of other programs that serve a path. ``outbox`` takes what is
    written to clients and to llama-servers.
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
        owners: Callable[[str], tuple[str, ...]] = lambda _: (),
    ) -> None:
        self.backend = backend
        self.owners = owners
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
        self.draining = False  # whether each connection closes after its next response
        self.uploads = 0  # requests whose bodies are forwarded while they arrive
        self.file_uploads = Counter[str]()  # the same to the API for batches, by client
        self._closed = False
        self._on_finished = on_finished
        self._loop = asyncio.get_running_loop()
        self.tasks = Tasks(self._loop)  # they end with the proxy
        self.call_soon = self._loop.call_soon
        self.outbox = Outbox(self.call_soon)
        self._close_listeners: list[Callable[[], None]] = []
        self.clients = Connections(config.limits)
        self._all_disconnected = asyncio.Event()
        self._pools: dict[Endpoint, UpstreamPool] = {}
        # Of ended generations: their connections may still carry last bytes.
        self._closing_pools: deque[UpstreamPool] = deque(maxlen=8)
        self._sweeper: asyncio.TimerHandle | None = None
        # Calls back once the supervisor has had the time to find why a server ended.
        self.awaiting_cause = DelayQueue(config.limits.cause_wait_s)
        self._id_prefix = secrets.token_hex(5).encode()
        self._ids = count(1)

    def on_connect(self, connection: Connection, client: str, *, unauthenticated: bool) -> HttpError | None:
        """Enter a connection (``Connections``). Raises ConnectionAbortedError if the proxy is closed."""
        refusal = self.clients.enter(connection, client, unauthenticated=unauthenticated)
        self._all_disconnected.clear()
        if self._closed:
            raise ConnectionAbortedError
        if self._sweeper is None:
            self.keys.look()  # the sweep did not check the key file while no connection was open
            self._sweeper = self._loop.call_later(self.limits.sweep_s, self._sweep)
        return refusal

    def on_disconnect(self, connection: Connection) -> None:
        """A connection has closed."""
        self.clients.leave(connection)
        if not len(self.clients):
            self._all_disconnected.set()

    def pool_of(self, endpoint: Endpoint) -> UpstreamPool:
        """The connections to ``endpoint``."""
        pool = self._pools.get(endpoint)
        if pool is None:
            pool = UpstreamPool(
                endpoint, self.tasks, self.limits.connect_s, self._rules_for(endpoint), self.outbox
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
        """An id for a request without an ``X-Request-Id``."""
        return b"%b-%x" % (self._id_prefix, next(self._ids))

    def record_request(self, request: Request, record: RequestRecord) -> None:
        """Release what a finished request holds, and record it. Called once for each request."""
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


class ClientConnection(Protocol):
    """The connection of a client, for the parts that serve its current request."""

    proxy: ProxyContext
    transport: asyncio.Transport
    send: Callable[[bytes], None]
    """Sends bytes to the client. The only way to do so: it keeps them in order."""
    paused: bool
    """Whether the client does not read as fast as its response arrives."""

    def keeps_alive(self, request: Request) -> bool:
        """Whether the connection stays open after the response to ``request``."""
        ...

    # --- the end of an exchange

    def exchange_over(self, request: Request, now: float) -> None:
        """The exchange has ended, and its response is complete. ``now``: the time (monotonic)."""
        ...

    def exchange_failed(self, request: Request, error: HttpError) -> None:
        """The exchange has ended before any byte of a response: answer with ``error``."""
        ...

    def exchange_awaits_body(self, request: Request) -> None:
        """The exchange has ended before the body was complete: buffer the body, then serve the request."""
        ...

    def close(self, *, linger: bool = False) -> None:
        """Send what is written, and close. ``linger``: let a client that still sends read it first."""
        ...

    def abort(self) -> None:
        """Reset the connection, because its response cannot be completed."""
        ...

    # --- an upload

    def pause_upload(self) -> None:
        """Stop reading the body: the child does not read, or is not connected."""
        ...

    def resume_body(self, request: Request, paused_s: float = 0.0) -> None:
        """Continue to read the body of ``request`` after a pause of ``paused_s``."""
        ...

    def upload_over(self) -> None:
        """The upload has ended, with or without the whole body."""
        ...


# --- another API


class LocalAnswer(Struct, frozen=True):
    """A complete answer of llamasup itself. ``lines``: header lines, such as that of its type."""

    body: bytes
    status: int = 200
    lines: bytes = b"Content-Type: application/json; charset=utf-8\r\n"


class Dialect(Protocol):
    """Another API that a listener speaks, which llamasup translates to and from llama-server's.

    A request in such an API is served by the same parts as every other: its head, key, limits and body are
    judged before, and then it waits, is sent again, is counted and ends as a request in llama-server's API.
    """

    def speaks(self, head: Head) -> bool:
        """Whether a request with this head is in this API. Others are in llama-server's."""
        ...

    def translate(self, request: Request, backend: Backend) -> HttpError | LocalAnswer | None:
        """Put a complete request into llama-server's API, with its ``translation``; or the answer to it."""
        ...

    def error_response(self, error: HttpError, lines: bytes, *, method: bytes, close: bool) -> bytes:
        """The complete response for an error."""
        ...
