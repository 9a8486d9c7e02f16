"""Protocols: what the parts of the proxy need of the proxy and of a client connection.

``Proxy`` and ``Downstream`` implement them. The parts of the proxy import this module instead of those two
classes, which import the parts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from msgspec import Struct

from llamasup.core.auth.keys import Keys
from llamasup.core.http.heads import Head, HttpError
from llamasup.core.observability.counters import Metrics, RequestRecord
from llamasup.core.proxy.backend import Backend
from llamasup.core.proxy.batch_gate import BatchGate
from llamasup.core.proxy.bodies import Bodies
from llamasup.core.proxy.connections import Connection, Connections
from llamasup.core.proxy.outbox import Outbox
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.settings import Limits, ProxyConfig
from llamasup.core.proxy.stages import Stage
from llamasup.core.proxy.upstream.pool import UpstreamPool
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.core.settings.repairs import Repairs


class AnswerStages(Struct, frozen=True):
    """Makes the stages that features add to some requests. None: there is no such feature.

    ``repair`` is called for a request to a model that repairs something, before its lease. It may change the
    body, and set the ``holder`` of the request. ``keep`` is called for a request to a model that continues
    streams. It returns a stage with the given one behind it, or the given one.
    """

    repair: Callable[[Request, Repairs, Metrics], None] | None = None
    keep: Callable[[Request, Stage], Stage] | None = None


class ProxyContext(Protocol):
    """The proxy, for its connections and exchanges."""

    backend: Backend
    config: ProxyConfig
    limits: Limits
    """The limits of ``config``."""
    keys: Keys
    bodies: Bodies
    batches: BatchGate
    clients: Connections
    control: Endpoint | None
    """The endpoint for /metrics and /llamasup/*."""
    metrics: Metrics
    draining: bool
    """Whether each connection closes after its next response."""
    uploads: int
    """The number of requests with an ``Upload``, without those of ``file_uploads``."""
    file_uploads: Counter[str]
    """The number of uploads to the API for batches, by client."""
    outbox: Outbox
    """Takes what is written to clients and to llama-servers."""
    stages: AnswerStages

    def on_connect(self, connection: Connection, client: str, *, unauthenticated: bool) -> HttpError | None:
        """Enter a connection (``Connections``). Raises ConnectionAbortedError if the proxy is closed."""
        ...

    def on_disconnect(self, connection: Connection) -> None:
        """A connection has closed."""
        ...

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back in the loop's next round."""
        ...

    def start_soon(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run ``work`` in a task that ends with the proxy."""
        ...

    def await_cause(self, callback: Callable[[], None]) -> None:
        """Call back after ``Limits.cause_wait_s``, the time for the supervisor to find why a server ended."""
        ...

    def pool_of(self, endpoint: Endpoint) -> UpstreamPool:
        """The connections to ``endpoint``."""
        ...

    def next_id(self) -> bytes:
        """An id for a request without an ``X-Request-Id``."""
        ...

    def record_request(self, request: Request, record: RequestRecord) -> None:
        """A request is over: release what it holds, and record it. Called once for each."""
        ...


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


NO_STAGES: Final = AnswerStages()
