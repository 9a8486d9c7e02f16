"""Counts client connections, and decides which one is closed for a new one when a limit is reached (X8).

If a key is required, the first choice is the oldest connection that has sent no valid key. The second choice
is the connection with the longest idle time. At the limit of a client one of its own connections is closed,
at the total limit one of any client. Each decision takes constant time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from llamasup.core.http.heads import HttpError
from llamasup.core.proxy.live.state import LiveConnection
from llamasup.core.proxy.settings import Limits

__all__ = ["REFUSALS", "TOO_MANY", "Connection", "Connections", "host_of", "most_connections"]

# Connections that stay open for their refusal (``Limits.linger_s`` at most). Further ones are aborted.
REFUSALS = 64
# Descriptors for other uses: logs, pipes of children, the control socket, files being read, refusals.
_RESERVE = 64 + REFUSALS

TOO_MANY_OF_ONE = HttpError(
    429,
    "this client has too many open connections",
    type="rate_limit_error",
    cause="too_many_connections",
    remedy="reuse connections (keep-alive)",
    retry_after_s=1.0,
    close=True,
)
TOO_MANY = HttpError(
    503,
    "too many open connections, and all of them are busy",
    type="server_error",
    cause="too_many_connections",
    remedy="try again; if this persists, raise the limit of open files (ulimit -n, LimitNOFILE=)",
    retry_after_s=1.0,
    close=True,
)


class Connection(LiveConnection, Protocol):
    """A client connection: a ``Downstream``, or a TLS handshake before it."""

    def close_if_idle(self) -> None: ...
    def abort(self) -> None: ...
    def sweep(self, now: float) -> None: ...


def most_connections(descriptors: int) -> int:
    """Returns how many clients fit into this many descriptors. Each needs two: its own, and one upstream."""
    return max(8, (descriptors - _RESERVE) // 2)


class ConnectionGroup:
    """Connections of one client or of all. Those that may be closed for a new one are in order of age."""

    def __init__(self, client: str = "") -> None:
        self.client = client
        self.count = 0
        self.unauthenticated: OrderedDict[Connection, None] = OrderedDict()
        # Connections without a request. Each connection adds and removes itself for every request.
        self.idle: OrderedDict[Connection, None] = OrderedDict()

    def remove(self, connection: Connection) -> None:
        self.count -= 1
        self.unauthenticated.pop(connection, None)
        self.idle.pop(connection, None)


class Connections:
    """All open client connections, by client."""

    def __init__(self, limits: Limits) -> None:
        self._max = limits.connections
        # One client gets at most half of the connections, even if the total is small.
        self._max_per_client = min(limits.connections_per_client, max(1, limits.connections // 2))
        self._open: dict[
            Connection, ConnectionGroup | None
        ] = {}  # None: the connection is being closed for a new one
        self._by_client: dict[str, ConnectionGroup] = {}
        self._all = ConnectionGroup()
        self.idle = self._all.idle

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Connection]:
        """A snapshot, because connections may close during the loop."""
        return iter(tuple(self._open))

    def enter(
        self, connection: Connection, client: str, *, unauthenticated: bool = False
    ) -> HttpError | None:
        """Count a connection; returns its refusal, if any. ``client`` is empty for Unix sockets.

        ``unauthenticated``: a key is required; call ``mark_authenticated`` once a valid one has arrived.

        Raises ConnectionAbortedError, and does not count the connection, if too many refusals are open.
        """
        group = self._by_client.get(client) or ConnectionGroup(client)
        refusal: HttpError | None = None
        if client and group.count >= self._max_per_client and not self._make_room(group):
            refusal = TOO_MANY_OF_ONE
            if group.count >= self._max_per_client + REFUSALS:
                raise ConnectionAbortedError
        elif self._all.count >= self._max and not self._make_room(self._all):
            refusal = TOO_MANY
        if refusal is not None and self._all.count >= self._max + REFUSALS:
            raise ConnectionAbortedError
        self._open[connection] = self._by_client[client] = group
        for counted in (self._all, group):
            counted.count += 1
            if refusal is None:
                (counted.unauthenticated if unauthenticated else counted.idle)[connection] = None
        return refusal

    def mark_authenticated(self, connection: Connection) -> None:
        """The connection has sent a valid key with its current request."""
        for counted in (self._all, self._open[connection]):
            if counted is not None:
                counted.unauthenticated.pop(connection, None)

    def idle_of_client(self, connection: Connection) -> OrderedDict[Connection, None]:
        """The idle connections of the client of ``connection``."""
        group = self._open[connection]
        return self.idle if group is None else group.idle

    def leave(self, connection: Connection) -> None:
        self._uncount(connection)
        self._open.pop(connection, None)

    def _make_room(self, group: ConnectionGroup) -> bool:
        """Close a connection of ``group``, if one of them can be closed."""
        is_unauthenticated = bool(group.unauthenticated)
        connection = next(iter(group.unauthenticated or group.idle), None)
        if connection is None:
            return False
        self._uncount(connection)  # at once, because its close is reported only in a later round of the loop
        connection.close_if_idle()  # an orderly close, as after an idle timeout
        if is_unauthenticated:
            connection.abort()
        return True

    def _uncount(self, connection: Connection) -> None:
        group = self._open.get(connection)
        if group is None:  # not counted
            return
        self._open[connection] = None
        self._all.remove(connection)
        group.remove(connection)
        if not group.count:
            del self._by_client[group.client]


def host_of(address: object) -> str:
    """The host of a socket's address; empty for a Unix socket."""
    # A dual-stack IPv6 socket shows IPv4 addresses as ::ffff:127.0.0.1.
    return str(address[0]).removeprefix("::ffff:") if isinstance(address, tuple) else ""
