"""Protocols: what the proxy needs of the models, and its parts of the proxy and of a client connection.

The pool's catalog implements ``Backend``; ``Proxy`` and ``Downstream`` implement the others. The parts of the
proxy import this module instead of those two classes, which import the parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from llamasup.auth.key_limits import Keys
from llamasup.http.heads import HttpError
from llamasup.models.access import ResolvedModel
from llamasup.observability.counters import Metrics, RequestRecord
from llamasup.proxy.bodies import Bodies
from llamasup.proxy.connections import Connection, Connections
from llamasup.proxy.request import Request
from llamasup.proxy.settings import Limits, ProxyConfig
from llamasup.proxy.upstream_pool import UpstreamPool
from llamasup.queueing.endpoint import Endpoint, Lease
from llamasup.queueing.request_queue import RequestQueue
from llamasup.queueing.unavailable import Unavailable

__all__ = ["Backend", "ClientConnection", "ModelList", "ProxyContext"]


class ModelList(Protocol):
    """The answers to ``/v1/models``, as JSON."""

    def all(self, allowed: Callable[[ResolvedModel], bool] | None = None) -> bytes:
        """All models, or only those that are ``allowed``."""
        ...

    def one(self, model: str) -> bytes:
        """The model with this id."""
        ...


class Backend(Protocol):
    """The models, for the proxy. Synchronous, because every request needs it."""

    def lease(self, model: str | None, *, infers: bool = False, body: bytes = b"") -> Lease | Unavailable:
        """A lease on a ready generation of ``model`` (None: the request names none), or why there is none.

        ``infers``: the request runs the model, and so needs a permit. ``body``: the received part of the
        body, which is read only to choose between several replicas.
        """
        ...

    def queue(self, model: str | None) -> RequestQueue:
        """The queue of the requests for ``model``. Only for a model that ``lease`` knows."""
        ...

    def readiness(self) -> Unavailable | None:
        """None if requests would be served now, else why not."""
        ...

    def resolve(self, model: str | None) -> ResolvedModel | None:
        """The model that ``lease`` knows by this name, if any."""
        ...

    def listing(self) -> ModelList | None:
        """The content of ``/v1/models``; None: forward llama-server's own answer."""
        ...


class ProxyContext(Protocol):
    """The proxy, for its connections and exchanges."""

    backend: Backend
    config: ProxyConfig
    limits: Limits
    """Those of ``config``."""
    keys: Keys
    bodies: Bodies
    clients: Connections
    control: Endpoint | None
    """The endpoint for /metrics and /llamasup/*."""
    metrics: Metrics
    draining: bool
    """Whether each connection closes after its next response."""
    uploads: int
    """The number of requests with an ``Upload``."""

    def on_connect(self, connection: Connection, client: str, *, unauthenticated: bool) -> HttpError | None:
        """As ``Connections.enter``. Also raises ConnectionAbortedError if the proxy has been closed."""
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
    paused: bool
    """Whether the client does not read as fast as its response arrives."""

    def keeps_alive(self, request: Request) -> bool:
        """Whether the connection stays open after the response to ``request``."""
        ...

    # --- the end of an exchange

    def exchange_over(self, request: Request) -> None:
        """The exchange has ended, and its response is complete."""
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
