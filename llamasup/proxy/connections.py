"""Which clients are connected, and who has to make room when there are too many (X8).

Decides on each new connection in constant time, at the bound too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from llamasup.core.http import HttpError
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


class Connections:
    """Every open connection, by client."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.connections
        # However few there may be, no single client takes all of them.
        self._most_per_client = min(limits.connections_per_client, max(1, limits.connections // 2))
        self._open: dict[Connection, str] = {}
        self._of: dict[str, int] = {}
        # Those that wait for a request, longest first. They put themselves in and out: twice a request.
        self.idle: OrderedDict[Connection, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Connection]:
        """May change meanwhile."""
        return iter(tuple(self._open))

    def enter(self, connection: Connection, client: str) -> HttpError | None:
        """Count it in; None, or with what it is to be refused. ``client`` is empty for Unix sockets.

        Raises ConnectionAbortedError where there is no room even for a refusal; then it is not counted.
        """
        number = self._of.get(client, 0) + 1
        refusal: HttpError | None = None
        if client and number > self._most_per_client:
            refusal = TOO_MANY_OF_ONE
            if number > self._most_per_client + REFUSALS:
                raise ConnectionAbortedError
        elif len(self._open) >= self._most and not self._make_room():
            refusal = TOO_MANY
        if refusal is not None and len(self._open) >= self._most + REFUSALS:
            raise ConnectionAbortedError
        self._open[connection] = client
        self._of[client] = number
        if refusal is None:
            self.idle[connection] = None
        return refusal

    def leave(self, connection: Connection) -> None:
        client = self._open.pop(connection, None)
        if client is None:  # it was never counted
            return
        self.idle.pop(connection, None)
        left = self._of[client] - 1
        if left:
            self._of[client] = left
        else:
            del self._of[client]

    def _make_room(self) -> bool:
        """Close what has been idle for longest, as if its time had come."""
        if not self.idle:
            return False
        connection, _ = self.idle.popitem(last=False)
        connection.close_if_idle()
        return True


def host_of(address: object) -> str:
    """Of a socket's address; nothing for a Unix socket."""
    # An IPv6 socket that takes IPv4 too shows those addresses as ::ffff:127.0.0.1.
    return str(address[0]).removeprefix("::ffff:") if isinstance(address, tuple) else ""
