"""Which clients are connected, and which connection is closed for a new one when a limit is reached (X8).

First the oldest stranger: if a key is required, a connection without a valid key so far, whether it is
silent, has sent half a head, or does not read its refusal. Then the connection with the longest idle time. At
the limit of a client one of its own connections is closed, at the total limit one of any client.

Decides on each new connection in constant time, at the bound too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from llamasup.http.heads import HttpError
from llamasup.proxy.settings import Limits

__all__ = ["REFUSALS", "TOO_MANY", "Connection", "Connections", "host_of", "most_connections"]

# Refusals being read by their clients (``Limits.linger_s`` at most). Beyond it nobody is told any more.
REFUSALS = 64
# Descriptors that are no client's: logs, the child's pipes, the control socket, files being read, refusals.
_RESERVE = 64 + REFUSALS

TOO_MANY_OF_ONE = HttpError(
    429,
    "this client has too many connections",
    type="rate_limit_error",
    cause="too_many_connections",
    remedy="use connections again: they are kept alive",
    retry_after_s=1.0,
    close=True,
)
TOO_MANY = HttpError(
    503,
    "there are too many connections, and all of them are busy",
    type="server_error",
    cause="too_many_connections",
    remedy="try again; if it stays so, raise the limit of open files (ulimit -n, LimitNOFILE=)",
    retry_after_s=1.0,
    close=True,
)


class Connection(Protocol):
    """What is counted: a client's connection, with or without its TLS handshake."""

    def close_if_idle(self) -> None: ...
    def abort(self) -> None: ...
    def sweep(self, now: float) -> None: ...


def most_connections(descriptors: int) -> int:
    """How many clients can be served with so many descriptors: each needs one more to llama-server."""
    return max(8, (descriptors - _RESERVE) // 2)


class Crowd:
    """Connections of one client or of all; those that may be closed for a new one are oldest first."""

    __slots__ = ("client", "idle", "number", "strangers")

    def __init__(self, client: str = "") -> None:
        self.client = client
        self.number = 0
        self.strangers: OrderedDict[Connection, None] = OrderedDict()
        # Connections that wait for a request. Each adds and removes itself, twice per request.
        self.idle: OrderedDict[Connection, None] = OrderedDict()

    def remove(self, connection: Connection) -> None:
        self.number -= 1
        self.strangers.pop(connection, None)
        self.idle.pop(connection, None)


class Connections:
    """Every open connection, by client."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.connections
        # However few there may be, no single client takes all of them.
        self._most_per_client = min(limits.connections_per_client, max(1, limits.connections // 2))
        self._open: dict[Connection, Crowd | None] = {}  # None: the connection is being closed for a new one
        self._of: dict[str, Crowd] = {}
        self._all = Crowd()
        self.idle = self._all.idle

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Connection]:
        """May change meanwhile."""
        return iter(tuple(self._open))

    def enter(self, connection: Connection, client: str, *, stranger: bool = False) -> HttpError | None:
        """Count a connection; returns its refusal, if any. ``client`` is empty for Unix sockets.

        ``stranger``: a key is required; call ``trust`` after the connection has sent a valid one.

        Raises ConnectionAbortedError where there is no room even for a refusal; then it is not counted.
        """
        crowd = self._of.get(client) or Crowd(client)
        refusal: HttpError | None = None
        if client and crowd.number >= self._most_per_client and not self._make_room(crowd):
            refusal = TOO_MANY_OF_ONE
            if crowd.number >= self._most_per_client + REFUSALS:
                raise ConnectionAbortedError
        elif self._all.number >= self._most and not self._make_room(self._all):
            refusal = TOO_MANY
        if refusal is not None and self._all.number >= self._most + REFUSALS:
            raise ConnectionAbortedError
        self._open[connection] = self._of[client] = crowd
        for each in (self._all, crowd):
            each.number += 1
            if refusal is None:
                (each.strangers if stranger else each.idle)[connection] = None
        return refusal

    def trust(self, connection: Connection) -> None:
        """The connection has sent a valid key with its current request."""
        for each in (self._all, self._open[connection]):
            if each is not None:
                each.strangers.pop(connection, None)

    def idle_of_client(self, connection: Connection) -> OrderedDict[Connection, None]:
        """The idle connections of the client of ``connection``."""
        crowd = self._open[connection]
        return self.idle if crowd is None else crowd.idle

    def leave(self, connection: Connection) -> None:
        self._uncount(connection)
        self._open.pop(connection, None)

    def _make_room(self, crowd: Crowd) -> bool:
        """Close a connection of ``crowd``, if one of them can be closed."""
        is_stranger = bool(crowd.strangers)
        connection = next(iter(crowd.strangers or crowd.idle), None)
        if connection is None:
            return False
        self._uncount(connection)  # at once: until its end is noticed, others would be closed for it
        connection.close_if_idle()  # in order, as after an idle time-out
        if is_stranger:
            connection.abort()
        return True

    def _uncount(self, connection: Connection) -> None:
        crowd = self._open.get(connection)
        if crowd is None:  # it was never counted, or is not counted any more
            return
        self._open[connection] = None
        self._all.remove(connection)
        crowd.remove(connection)
        if not crowd.number:
            del self._of[crowd.client]


def host_of(address: object) -> str:
    """Of a socket's address; nothing for a Unix socket."""
    # An IPv6 socket that takes IPv4 too shows those addresses as ::ffff:127.0.0.1.
    return str(address[0]).removeprefix("::ffff:") if isinstance(address, tuple) else ""
