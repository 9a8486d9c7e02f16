"""The idle connections to one endpoint, last in first out, and new ones.

Owns the proxy's few tasks: connecting is the only thing that cannot be done in a callback.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from time import monotonic
from typing import Any, Final, Protocol

from llamasup.http.address import UnixAddress
from llamasup.http.head_cache import KnownHead
from llamasup.http.heads import DEFAULT_RULES, HeadRules, RawHeaders
from llamasup.proxy.upstream import Upstream
from llamasup.queueing.endpoint import Endpoint

__all__ = ["IDLE_S", "MAX_IDLE", "ConnectionUser", "Pool", "Tasks"]


_log = logging.getLogger("llamasup.proxy")


class Tasks:
    """Keeps tasks alive, reports what they raise, ends them all."""

    __slots__ = ("_loop", "_running")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

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
    """Asks for a new upstream connection."""

    @property
    def over(self) -> bool:
        """Whether it does not need the connection any more."""
        ...

    def connected(self, upstream: Upstream) -> None:
        """The connection is made."""
        ...

    def connect_failed(self, error: OSError | TimeoutError) -> None:
        """No connection could be made."""
        ...


IDLE_S: Final = 4.0  # llama-server closes at 5 s: leave first, so that no request meets a closing door
MAX_IDLE: Final = (
    64  # a llama-server thread sits behind each; more slots than this are not run on one machine
)
PATIENCE_S: Final = (
    0.25  # how long a new connection may wait for its first answer before idle ones are closed
)


class Pool:
    """Of one endpoint, that is of one generation. Forgotten when the endpoint closes."""

    __slots__ = (
        "_all_gone",
        "_connect_s",
        "_endpoint",
        "_idle",
        "_loop",
        "_open",
        "_tasks",
        "_waiting",
        "known_head",
        "known_headers",
        "known_lines",
        "known_streams_events",
        "rules",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        loop: asyncio.AbstractEventLoop,
        tasks: Tasks,
        connect_s: float,
        rules: HeadRules = DEFAULT_RULES,
    ) -> None:
        self._endpoint = endpoint
        self._loop = loop
        self._tasks = tasks
        self._connect_s = connect_s
        self.rules = rules
        self._idle: list[Upstream] = []
        self._open: set[Upstream] = set()
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        self._waiting: dict[Upstream, float] = {}  # new ones without an answer yet, since when; oldest first
        # The last response's headers and what became of them: a server repeats itself.
        self.known_headers: RawHeaders = []
        self.known_lines = b""
        self.known_streams_events = False
        self.known_head: KnownHead | None = None  # of a plain answer, if the last head was one

    def __len__(self) -> int:
        """How many are idle."""
        return len(self._idle)

    def take(self, now: float) -> Upstream | None:
        """The connection with the shortest idle time, if it can be reused.

        A connection with unread bytes cannot: they would begin the next answer (S20). Nor can a closed one.
        """
        idle = self._idle
        while idle:
            upstream = idle.pop()
            if not upstream.transport.is_closing():
                if now - upstream.idle_since < IDLE_S and not upstream.has_unread(0):
                    return upstream
                upstream.transport.abort()
        return None

    def give(self, upstream: Upstream) -> bool:
        """Keep an idle connection for the next request; False if it should be closed instead.

        Once a new connection has waited for its first answer for a while, those that come free are closed: in
        builds with a fixed number of HTTP threads an idle connection holds the very thread that it waits for.
        """
        now = monotonic()
        idle = self._idle
        if self._endpoint.closed or len(idle) >= MAX_IDLE or (self._waiting and self._someone_waits(now)):
            return False
        upstream.idle_since = now
        idle.append(upstream)
        return True

    def opened(self, upstream: Upstream) -> None:
        self._open.add(upstream)
        self._all_gone.clear()

    def gone(self, upstream: Upstream) -> None:
        """It has closed, perhaps while it was idle."""
        self._open.discard(upstream)
        if not self._open:
            self._all_gone.set()
        if upstream in self._idle:
            self._idle.remove(upstream)

    def waits(self, upstream: Upstream) -> None:
        """A new connection has sent its first request."""
        self._waiting[upstream] = monotonic()

    def waits_no_more(self, upstream: Upstream) -> None:
        self._waiting.pop(upstream, None)

    def connect(self, user: ConnectionUser) -> None:
        """Make a connection for ``user``; calls its ``connected`` or ``connect_failed``."""
        self._tasks.start(self._connect(user), f"connect to {self._endpoint.address.url}")

    async def _connect(self, user: ConnectionUser) -> None:
        address = self._endpoint.address
        try:
            async with asyncio.timeout(self._connect_s):
                if isinstance(address, UnixAddress):
                    _, upstream = await self._loop.create_unix_connection(
                        lambda: Upstream(self), address.path
                    )
                else:
                    _, upstream = await self._loop.create_connection(
                        lambda: Upstream(self), address.host, address.port
                    )
        except (OSError, TimeoutError) as error:
            user.connect_failed(error)
            return
        if user.over:  # its client left, or the generation went
            upstream.abort()
        elif (why := _useless(upstream.transport)) is not None:
            upstream.abort()
            user.connect_failed(why)
        else:
            user.connected(upstream)

    def sweep(self, now: float) -> None:
        """Close what has been idle for too long."""
        keep_s = 0.0 if self._someone_waits(now) else IDLE_S
        while self._idle and now - self._idle[0].idle_since >= keep_s:
            self._idle.pop(0).transport.abort()

    def close(self) -> None:
        """Close the idle connections; those in use belong to their exchanges."""
        for upstream in self._idle:
            upstream.transport.abort()
        self._idle.clear()

    async def aclose(self) -> None:
        """Break all connections, and wait until they are gone."""
        self._idle.clear()
        for upstream in self._open:
            upstream.transport.abort()
        await self._all_gone.wait()

    def _someone_waits(self, now: float) -> bool:
        return bool(self._waiting) and now - next(iter(self._waiting.values())) > PATIENCE_S


def _useless(transport: asyncio.Transport) -> OSError | None:
    """Why a connection that was made cannot be used, if so."""
    if transport.is_closing():
        return ConnectionResetError("the connection was closed at once")
    try:
        transport.get_extra_info("socket").getpeername()
    except OSError:
        # With its backlog full, a Unix socket says EAGAIN; asyncio takes this for "in progress", and then for
        # connected (Python 3.11 to 3.13). llama-server's backlog is 512 (b11434).
        return BlockingIOError("too many connections wait to be accepted")
    return None
