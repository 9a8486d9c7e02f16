"""A request of a client, as far as it has been read, and the record of a finished request."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Protocol

import msgspec

from llamasup.auth.keys import ApiKey
from llamasup.auth.quota import Quota
from llamasup.http.context_end import ContextEnd
from llamasup.http.heads import NO_TRACE_PARENT, Head, HttpError, Priority, trace_parent_of
from llamasup.http.routes import CONTROL, Route
from llamasup.http.sse import TokenCounts
from llamasup.observability.counters import RequestRecord
from llamasup.proxy.backend import ModelRoute
from llamasup.queueing.queue_order import granted

__all__ = ["UNREAD", "BegunStream", "Request", "overdue", "record_of"]

UNREAD = Head(b"", b"", b"", Route("unread"))  # for a request whose head could not be read


class _Streamed(msgspec.Struct):
    stream: bool = False


_read_streamed = msgspec.json.Decoder(_Streamed).decode


class BegunStream(Protocol):
    """A stream that llamasup has begun before llama-server has answered (``KeepaliveStream``)."""

    def comment(self) -> None:
        """Send an SSE comment."""
        ...

    def join(self, *, is_stream: bool, framing: bytes | None) -> Callable[[bytes], None]:
        """Continue with llama-server's answer; returns the function that takes its body."""
        ...

    @property
    def is_relayed(self) -> bool:
        """Whether that answer is also a stream, so that the client gets it unchanged."""
        ...

    def finish(self, status: int) -> bytes | None:
        """The answer is complete. Returns the error body for ``fail`` if it was not a stream, else None."""
        ...

    def fail(self, error: bytes) -> None:
        """End with the event of this error body."""
        ...


class Request:
    """Filled by the callbacks of the parser. ``refusal`` is set as soon as it is known."""

    __slots__ = (
        "_received",
        "body",
        "body_bytes",
        "body_discarded",
        "body_sink",
        "buffered",
        "counted",
        "expects_continue",
        "head",
        "held_bytes",
        "http_1_0",
        "id",
        "jobs",
        "keep_alive",
        "keepalive_stream",
        "key",
        "model_route",
        "needs_permit",
        "next_comment_at",
        "peer",
        "quota",
        "received_at",
        "refusal",
        "requested_model",
        "response_lines",
        "unreported_tokens",
    )

    def __init__(
        self,
        head: Head,
        request_id: bytes,
        *,
        keep_alive: bool,
        http_1_0: bool = False,
        peer: str = "",
        key: ApiKey | None = None,
    ) -> None:
        """``peer``: the address of the client; empty for a Unix socket. ``key``: its API key."""
        self.head = head
        self.peer = peer
        self.key = key
        self.requested_model: str | None = None  # as the client wrote it
        self.model_route: ModelRoute | None = None  # to the model that this name resolves to
        self.jobs = 1  # jobs of this request at llama-server, as far as its body is read
        self.counted = 1  # how many of them the quota of its key counts
        self.unreported_tokens = 0  # estimated tokens that the answer did not report, for the quota
        self.quota: Quota | None = None  # of its key, once the request counts; it must leave the quota
        # Whether it runs the model, which needs a permit.
        self.needs_permit = head.route.infers and head.method == b"POST"
        self.id = request_id
        self.http_1_0 = http_1_0
        self.keep_alive = keep_alive and not http_1_0
        self.expects_continue = head.expects_continue
        self.refusal: HttpError | None = None
        self.response_lines = b"X-Request-Id: " + request_id + b"\r\n"
        self.keepalive_stream: BegunStream | None = None  # once we have sent the head of a stream
        self.next_comment_at = 0.0  # when the next SSE comment is due; 0: not set
        self.received_at = 0.0  # when its last byte arrived, or its body began to be forwarded; 0 until then
        self.buffered = False  # the body is buffered, whatever its size
        self.body_discarded = False  # a part of the body was forwarded, and is not in memory
        self.body_sink: Callable[[bytes], None] | None = None  # takes the body while it is forwarded
        self.body = b""
        self.body_bytes = 0
        self.held_bytes = 0  # bytes of the body that ``Bodies`` counts
        # The pieces of a body, until it is complete. One buffer, because an object for each tiny chunk would
        # take many times the memory of its bytes.
        self._received: bytearray | None = None

    def __repr__(self) -> str:
        method, label = self.head.method.decode("latin-1"), self.head.route.label
        return f"<Request {self.id.decode()} {method} {label}, model {self.requested_model!r}>"

    @property
    def client(self) -> str:
        """The client, for fairness and the log: ``key:NAME``, or its address."""
        return self.peer if self.key is None else f"key:{self.key.name}"

    def add(self, piece: bytes) -> None:
        """Keep bytes of the body; of a refused request, only count them."""
        self.body_bytes += len(piece)
        if self.refusal is not None:
            self._received = None
        elif self.body_sink is not None:
            self.body_sink(piece)
        elif self._received is not None:
            self._received += piece
        elif not self.body:
            self.body = piece  # most bodies arrive in one piece
        else:
            self._received = bytearray(self.body)
            self._received += piece
            self.body = b""

    def complete(self) -> None:
        if self._received is not None:
            self.body = bytes(self._received)
            self._received = None

    def take_body(self) -> bytearray:
        """The received part of the body, which the caller owns from now on."""
        received = bytearray(self.body) if self._received is None else self._received
        self.body, self._received = b"", None
        return received

    def buffer(self, received: bytearray) -> None:
        """Buffer the body from now on; ``received`` is its first part."""
        self.buffered = True
        self._received = received

    @property
    def replayable(self) -> bool:
        """Whether it may wait for a generation, and be sent again before an answer begins."""
        return self.head.route.waits and self.head.method == b"POST" and not self.body_discarded

    @property
    def hides_paths(self) -> bool:
        """Whether its answer must not show paths, because the key lacks the right ``control``."""
        return self.key is not None and not self.key.controls

    @property
    def priority(self) -> Priority:
        """The requested priority, as far as the key allows it."""
        allows_high = self.key is not None and self.key.priority == "high"
        return granted(self.head.priority, Priority.HIGH if allows_high else Priority.NORMAL)

    def wants_events(self) -> bool:
        """Whether its body asks for a stream, and its route supports streams."""
        if not (self.head.route.streams and self.needs_permit and self.body):
            return False
        try:
            return _read_streamed(self.body).stream
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False


def overdue(request: Request, timeout_s: float | None, now: float) -> HttpError | None:
    """The error for a request whose time is over. ``timeout_s`` None: no limit.

    The event stream of the control API has no limit.
    """
    if timeout_s is None or now - request.received_at < timeout_s or request.head.route is CONTROL:
        return None
    return HttpError(
        504,
        f"request timed out after {timeout_s:g} s",
        "timeout_error",
        "request_timeout",
        "request less at once, or raise --request-timeout",
    )


def record_of(
    request: Request,
    status: int,
    outcome: str,
    *,
    model: str = "",
    generation: int = 0,
    queue_s: float = 0.0,
    first_byte_s: float | None = None,
    bytes_out: int = 0,
    counts: TokenCounts | None = None,
    waited_s: float = 0.0,
    replayed: bool = False,
    context: ContextEnd | None = None,
) -> RequestRecord:
    """The record of a request that ends now."""
    head = request.head
    parent = trace_parent_of(head.traceparent) if head.traceparent else NO_TRACE_PARENT
    if request.keepalive_stream is not None:
        status = 200  # the client has received this status; ``outcome`` shows the failure
    record = RequestRecord(
        request.id.decode("ascii"),
        head.method.decode("ascii"),
        head.path.decode("latin-1"),
        head.route.label,
        model,
        generation,
        status,
        counts.prompt if counts else None,
        counts.cached if counts else None,
        counts.completion if counts else None,
        counts.tokens_per_s if counts else None,
        queue_s,
        first_byte_s,
        monotonic() - request.received_at if request.received_at else 0.0,
        bytes_out,
        outcome,
        waited_s,
        replayed,
        request.client,
        parent.trace_id,
        request.body_bytes,
        parent_id=parent.span_id,
        parent_sampled=parent.is_sampled,
    )
    if context is None:
        return record
    return msgspec.structs.replace(
        record, context=context.kind, n_prompt_tokens=context.n_prompt_tokens, n_ctx=context.n_ctx
    )
