"""The connections to one endpoint: keeps idle ones (last in, first out), and makes new ones.

Also holds the tasks of the proxy: only connecting and TLS handshakes cannot be done in a callback.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from time import monotonic
from typing import Any, Final, Protocol

from llamasup.core.http.connection import open_connection
from llamasup.core.http.head_cache import KnownHead
from llamasup.core.http.heads import HeadRules, RawHeaders
from llamasup.core.proxy.outbox import Outbox
from llamasup.core.proxy.upstream.connection import REQUESTS_PER_CONNECTION, Upstream
from llamasup.core.queueing.endpoint import Endpoint

__all__ = ["IDLE_S", "MAX_IDLE", "ConnectionUser", "Tasks", "UpstreamPool"]


_log = logging.getLogger("llamasup.proxy")


class Tasks:
    """Keeps tasks alive, logs their exceptions, and cancels them all at the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._loop.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)

    async def aclose(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)


class ConnectionUser(Protocol):
    """The exchange for which a new upstream connection is made."""

    @property
    def over(self) -> bool:
        """Whether it no longer needs the connection."""
        ...

    def connected(self, upstream: Upstream) -> None:
        """The connection is made."""
        ...

    def connect_failed(self, error: OSError | TimeoutError) -> None:
        """No connection could be made."""
        ...


IDLE_S: Final = 4.0  # llama-server closes an idle connection after 5 s, perhaps while a request is on its way
NODE_IDLE_S: Final = 60.0  # another llamasup closes it after 75 s (``Limits.keepalive_s``)
NODE_REQUESTS: Final = 1 << 30  # for each connection: a new one may take a TLS handshake
MAX_IDLE: Final = 64  # each holds a thread of llama-server; one machine runs fewer slots
CONGESTED_AFTER_S: Final = 0.25  # the wait for a first answer after which idle connections are closed


class UpstreamPool:
    """The connections to one endpoint, and so to one generation. Dropped when the endpoint closes."""

    def __init__(
        self,
        endpoint: Endpoint,
        tasks: Tasks,
        connect_s: float,
        rules: HeadRules,
        outbox: Outbox,
    ) -> None:
        self._endpoint = endpoint
        self._tasks = tasks
        self._connect_s = connect_s
        self.rules = rules
        self.outbox = outbox
        is_node = endpoint.node is not None
        self._idle_s = NODE_IDLE_S if is_node else IDLE_S
        self.requests_per_connection = NODE_REQUESTS if is_node else REQUESTS_PER_CONNECTION
        self._idle: list[Upstream] = []
        self._open: set[Upstream] = set()
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._waiting: dict[Upstream, float] = {}  # new ones without an answer yet, since when; oldest first
        # The headers of the last response, and the lines made of them: a server usually repeats them.
        self.known_headers: RawHeaders = []
        self.known_lines = b""
        self.known_streams_events = False
        self.known_head: KnownHead | None = None  # of a plain answer, if the last head was one

    def __repr__(self) -> str:
        return f"<UpstreamPool of {self._endpoint!r}: {len(self)} idle, {len(self._open)} open>"

    def __len__(self) -> int:
        """The number of idle connections."""
        return len(self._idle)

    def take(self, now: float) -> Upstream | None:
        """The connection with the shortest idle time that can be reused.

        A closed connection cannot, nor one with unread bytes: they would begin the next answer (S20).
        """
        idle = self._idle
        while idle:
            upstream = idle.pop()
            if not upstream.transport.is_closing():
                if now - upstream.idle_since < self._idle_s and not upstream.has_unread(0):
                    return upstream
                upstream.transport.abort()
        return None

    def give(self, upstream: Upstream) -> bool:
        """Keep an idle connection for the next request; False if it should be closed instead.

        While a new connection has waited for its first answer for long, idle ones are closed: in builds with
        a fixed number of HTTP threads, an idle connection holds a thread that the new connection needs.
        """
        now = monotonic()
        idle = self._idle
        if self._endpoint.closed or len(idle) >= MAX_IDLE or (self._waiting and self._is_congested(now)):
            return False
        upstream.idle_since = now
        idle.append(upstream)
        return True

    def opened(self, upstream: Upstream) -> None:
        self._open.add(upstream)
        self._all_closed.clear()

    def closed(self, upstream: Upstream) -> None:
        self._open.discard(upstream)
        if not self._open:
            self._all_closed.set()
        if upstream in self._idle:
            self._idle.remove(upstream)
            if self._endpoint.node is not None:  # it has closed it: perhaps it has ended
                self._endpoint.node.suspect()

    def awaits_first_answer(self, upstream: Upstream) -> None:
        self._waiting[upstream] = monotonic()

    def first_answer_over(self, upstream: Upstream) -> None:
        self._waiting.pop(upstream, None)

    def connect(self, user: ConnectionUser) -> None:
        """Make a connection for ``user``; calls its ``connected`` or ``connect_failed``."""
        self._tasks.start(self._connect(user), f"connect to {self._endpoint.address.url}")

    async def _connect(self, user: ConnectionUser) -> None:
        endpoint = self._endpoint
        tls = None if endpoint.node is None else endpoint.node.tls
        try:
            async with asyncio.timeout(self._connect_s):
                _, upstream = await open_connection(endpoint.address, lambda: Upstream(self), tls)
        except (OSError, TimeoutError) as error:
            user.connect_failed(error)
            return
        if user.over:  # its client has disconnected, or the generation has ended
            upstream.abort()
        else:
            user.connected(upstream)

    def sweep(self, now: float) -> None:
        """Close connections that have been idle for too long."""
        max_idle_s = 0.0 if self._is_congested(now) else self._idle_s
        while self._idle and now - self._idle[0].idle_since >= max_idle_s:
            self._idle.pop(0).transport.abort()

    def close(self) -> None:
        """Close the idle connections. The exchanges close the others."""
        for upstream in self._idle:
            upstream.transport.abort()
        self._idle.clear()

    async def aclose(self) -> None:
        """Abort all connections, and wait until they have closed."""
        self._idle.clear()
        for upstream in self._open:
            upstream.transport.abort()
        await self._all_closed.wait()

    def _is_congested(self, now: float) -> bool:
        return bool(self._waiting) and now - next(iter(self._waiting.values())) > CONGESTED_AFTER_S
