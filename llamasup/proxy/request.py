"""A client's request as far as it has been read, and what is told about it when it is over."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Protocol

import msgspec

from llamasup.auth.keys import ApiKey
from llamasup.auth.quota import Quota
from llamasup.http.context_end import ContextEnd
from llamasup.http.heads import Head, HttpError, Priority, trace_id_of
from llamasup.http.routes import CONTROL, Route
from llamasup.http.sse import TokenCounts
from llamasup.observability.metrics import RequestRecord
from llamasup.queueing.fair_queue import granted

__all__ = ["UNREAD", "BegunStream", "Request", "overdue", "record_of"]

UNREAD = Head(b"", b"", b"", Route("unread"))  # stands for a head that could not be read


class _Streamed(msgspec.Struct):
    stream: bool = False


_read_streamed = msgspec.json.Decoder(_Streamed).decode


class BegunStream(Protocol):
    """A stream of events that llamasup has begun before llama-server has answered (``EarlyStream``)."""

    def comment(self) -> None:
        """Send an SSE comment."""
        ...

    def join(self, *, is_stream: bool, framing: bytes | None) -> Callable[[bytes], None]:
        """Go on with llama-server's answer; returns what takes its body."""
        ...

    @property
    def is_passed_on(self) -> bool:
        """Whether that answer is a stream, too, so that the client gets it as it is."""
        ...

    def finish(self, status: int) -> bytes | None:
        """The answer is complete. The error body to ``fail`` with if it was no stream, else None."""
        ...

    def fail(self, error: bytes) -> None:
        """End with the event of this error body."""
        ...


class Request:
    """Filled by the parser's callbacks; ``refusal`` is set as soon as it is known that it is not served."""

    __slots__ = (
        "_received",
        "body",
        "body_bytes",
        "body_discarded",
        "body_sink",
        "buffered",
        "comment_at",
        "counted",
        "early",
        "expects_continue",
        "head",
        "held_bytes",
        "http_1_0",
        "id",
        "jobs",
        "keep_alive",
        "key",
        "named",
        "needs_permit",
        "peer",
        "quota",
        "received_at",
        "refusal",
        "response_lines",
        "untold_tokens",
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
        """``peer``: the address that it came from; empty for a Unix socket. ``key``: the one it came with."""
        self.head = head
        self.peer = peer
        self.key = key
        self.named: str | None = None  # the model, in its client's words
        self.jobs = 1  # jobs of this request at llama-server, as far as its body is read
        self.counted = 1  # how many of them the quota of its key counts
        self.untold_tokens = 0  # estimated tokens that its answer did not report, for its quota
        self.quota: Quota | None = None  # that of its key, which it has entered and must leave
        # Whether it needs inference, which is limited by places.
        self.needs_permit = head.route.infers and head.method == b"POST"
        self.id = request_id
        self.http_1_0 = http_1_0
        self.keep_alive = keep_alive and not http_1_0
        self.expects_continue = head.expects_continue
        self.refusal: HttpError | None = None
        self.response_lines = b"X-Request-Id: " + request_id + b"\r\n"
        self.early: BegunStream | None = None  # once the head of a stream of ours has been sent
        self.comment_at = 0.0  # when the next SSE comment is due; 0: none was yet
        self.received_at = 0.0  # monotonic time of its last byte, or of being sent on before; 0 until then
        self.buffered = False  # its body is read whole, whatever its size
        self.body_discarded = False  # a part of its body was sent on and is not here any more
        self.body_sink: Callable[[bytes], None] | None = None  # takes its body while that is sent on
        self.body = b""
        self.body_bytes = 0
        self.held_bytes = 0  # bytes of the body that ``Bodies`` counts
        # A body of several pieces, until it is complete. It is one buffer, because an object for each tiny
        # chunk would take many times the memory of its bytes.
        self._received: bytearray | None = None

    @property
    def client(self) -> str:
        """Who it belongs to, for fairness and the log: ``key:NAME``, or the address that it came from."""
        return self.peer if self.key is None else f"key:{self.key.name}"

    def add(self, piece: bytes) -> None:
        """Keep bytes of the body; those of a refused request are only counted."""
        self.body_bytes += len(piece)
        if self.refusal is not None:
            self._received = None
        elif self.body_sink is not None:
            self.body_sink(piece)
        elif self._received is not None:
            self._received += piece
        elif not self.body:
            self.body = piece  # most bodies come whole
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

    def read_whole(self, received: bytearray) -> None:
        """Keep ``received`` and what follows."""
        self.buffered = True
        self._received = received

    @property
    def may_wait(self) -> bool:
        """Whether it may wait for a generation, and be sent again if nothing of an answer has come."""
        return self.head.route.waits and self.head.method == b"POST" and not self.body_discarded

    @property
    def hides_paths(self) -> bool:
        """Whether its answer must not show paths, because the key lacks the right ``control``."""
        return self.key is not None and not self.key.controls

    @property
    def priority(self) -> Priority:
        """What it asks for, if its key allows it."""
        allows_high = self.key is not None and self.key.priority == "high"
        return granted(self.head.priority, Priority.HIGH if allows_high else Priority.NORMAL)

    def wants_events(self) -> bool:
        """Whether its body asks for a stream of events, and its route can give one."""
        if not (self.head.route.streams and self.needs_permit and self.body):
            return False
        try:
            return _read_streamed(self.body).stream
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False


def overdue(request: Request, timeout_s: float | None, now: float) -> HttpError | None:
    """The answer to a request that has had all of its time. ``timeout_s`` None: it may take any time.

    It is for requests to the model: a stream of events goes on for as long as llamasup does.
    """
    if timeout_s is None or now - request.received_at < timeout_s or request.head.route is CONTROL:
        return None
    return HttpError(
        504,
        f"the request has taken {timeout_s:g} s, which is all that it may",
        "timeout_error",
        "request_timeout",
        "ask for less at once, or allow more with --request-timeout",
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
    """The record of a request that is over now."""
    head = request.head
    if request.early is not None:
        status = 200  # this is what its client has seen; ``outcome`` says what came of it
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
        trace_id_of(head.traceparent) if head.traceparent else "",
        request.body_bytes,
    )
    if context is None:
        return record
    return msgspec.structs.replace(
        record, context=context.kind, n_prompt_tokens=context.n_prompt_tokens, n_ctx=context.n_ctx
    )
