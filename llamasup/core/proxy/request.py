"""A request of a client, as far as it has been read, and the record of a finished request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec

from llamasup.core.auth.api_key import ApiKey
from llamasup.core.auth.quota import Quota
from llamasup.core.http.heads import Head, HttpError, Priority
from llamasup.core.http.routes import CONTROL, FILES, Route
from llamasup.core.llama_server.token_counts import ContextEnd, TokenCounts
from llamasup.core.models.redaction import whole_and_plain
from llamasup.core.observability.counters import RequestRecord
from llamasup.core.proxy.backend import ModelRoute
from llamasup.core.proxy.settings import ProxyConfig
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.core.queueing.queue_order import granted
from llamasup.core.queueing.suspects import Suspicion

if TYPE_CHECKING:
    from llamasup.core.proxy.stages import Begun, Between, Stage

UNREAD = Head(b"", b"", b"", Route("unread"))  # for a request whose head could not be read


class _Streamed(msgspec.Struct):
    stream: bool = False


_read_streamed = msgspec.json.Decoder(_Streamed).decode


class Request(msgspec.Struct, eq=False):
    """Filled by the reader. ``refusal`` is set as soon as it is known.

    A struct, because its fields then get their defaults in C: most requests change few of them.
    """

    head: Head
    id: bytes
    keep_alive: bool
    http_1_0: bool = False
    peer: str = ""  # the address of the client; empty for a Unix socket
    key: ApiKey | None = None  # its API key
    body: bytes = b""
    body_bytes: int = 0
    received_at: float = 0.0  # when its last byte arrived, or its body began to be forwarded; 0 until then
    cors: bytes = b""  # header lines of the response, for a page of a configured origin
    repaired: bytes = b""  # the header lines that say what llamasup repaired, changed and ignored
    marks: bytes = b""  # these lines without the first
    cause: str = ""  # why it is refused or ended, for logs
    repairs: str = ""  # the same for logs, with what could not be repaired
    refusal: HttpError | None = None
    expects_continue: bool = False
    requested_model: str | None = None  # as the client wrote it
    model_route: ModelRoute | None = None  # to the model that this name resolves to
    counted_as: str = ""  # the virtual model that it was sent to, for metrics and logs
    jobs: int = 1  # jobs of this request at llama-server, as far as its body is read
    counted: int = 1  # how many of them the quota of its key counts
    unreported_tokens: int = 0  # estimated tokens that the answer did not report
    slot_s: float = 0.0  # how long it held permits until now, times their number
    quota: Quota | None = None  # of its key, once the request counts; it must leave the quota
    stages: Stage | None = None  # the first stage of its answer; None: it passes as it is
    holder: Between | None = None  # the stage that may hold its answer
    translator: Between | None = None  # the stage that names its tools back
    has_head: bool = False  # the client has the head of a stream, and the next answer continues it
    begun: Begun | None = None  # the first part of its answer, once its rest was requested
    next_comment_at: float = 0.0  # when the next SSE comment is due; 0: not set
    buffered: bool = False  # the body is buffered, whatever its size
    body_discarded: bool = False  # a part of the body was forwarded, and is not in memory
    body_sink: Callable[[bytes], None] | None = None  # takes the body while it is forwarded
    translation: Stage | None = None  # writes the answer to a request in another API
    held_bytes: int = 0  # bytes of the body that ``Bodies`` counts
    in_lane: bool = False  # ``BatchGate`` counts it
    suspicion: Suspicion | None = None  # its body was in flight when a server ended
    fingerprint: bytes = b""  # of its body, once it has been dropped
    # The pieces of a body, until it is complete. One buffer, because an object for each tiny chunk would
    # take many times the memory of its bytes.
    _received: bytearray | None = None

    def __repr__(self) -> str:
        method, label = self.head.method.decode("latin-1"), self.head.route.label
        return f"<Request {self.id.decode()} {method} {label}, model {self.requested_model!r}>"

    @property
    def needs_permit(self) -> bool:
        """Whether it runs the model, which needs a permit."""
        return self.head.needs_permit

    @property
    def is_limited(self) -> bool:
        """Whether the limits of its key count it. Reading and the control API are free."""
        head = self.head
        return head.needs_permit or (head.method == b"POST" and (head.route is FILES or head.route.of_router))

    @property
    def response_lines(self) -> bytes:
        """The header lines that llamasup adds to the response."""
        return b"X-Request-Id: " + self.id + b"\r\n" + self.repaired + self.cors

    def mark_repaired(self, what: str) -> None:
        self.repairs = f"{self.repairs}, {what}" if self.repairs else what
        self.repaired = b"%bX-Llamasup-Repaired: %b\r\n" % (self.marks, self.repairs.encode())

    def mark(self, header: bytes, value: str) -> None:
        """Add a header to the answer. ``value``: letters that a header may have."""
        line = b"%b: %b\r\n" % (header, value.encode())
        self.marks += line
        self.repaired = line + self.repaired

    def mark_unrepaired(self, what: str) -> None:
        """Note in the logs that its second attempt has also failed."""
        self.repairs = f"{self.repairs}, {what}" if self.repairs else what

    @property
    def client(self) -> str:
        """The client, for fairness and the log: ``key:NAME``, or its address."""
        return self.peer if self.key is None else self.key.client

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
        return self.head.may_wait and not self.body_discarded

    @property
    def is_batch(self) -> bool:
        """Whether it runs only while no other client uses a model."""
        return self.head.priority is Priority.BATCH

    @property
    def hides_paths(self) -> bool:
        """Whether its answer must not show paths, because the key lacks the right ``control``."""
        return self.key is not None and not self.key.controls

    @property
    def priority(self) -> Priority:
        """The requested priority, as far as the key allows it."""
        allows_high = self.key is not None and self.key.priority == "high"
        return granted(self.head.priority, Priority.HIGH if allows_high else Priority.NORMAL)

    def needs_stages(self, *, streams_events: bool) -> bool:
        """Whether its answer does not pass as it is. ``streams_events``: the answer is a stream."""
        return (
            self.translation is not None
            or self.holder is not None
            or self.translator is not None
            or self.http_1_0
            or (self.head.route.has_paths and self.hides_paths)
            or (
                (streams_events and self.model_route is not None)
                and self.model_route.served.queue.continues_streams
            )
        )

    def opening_for(self, endpoint: Endpoint) -> bytes:
        """The head for ``endpoint``, without the lines about the body: with the child's own key (X5, X9)."""
        head, api_key = self.head, endpoint.api_key
        opening = head.opening
        if head.route.has_paths and self.hides_paths:
            opening = whole_and_plain(opening)
        if api_key is not None:
            if endpoint.node is not None:
                opening = endpoint.node.opening(opening, self.id, self.priority)
            if api_key:
                opening += b"Authorization: Bearer " + api_key.encode("ascii") + b"\r\n"
        if mark := endpoint.mark:  # of the control API
            opening += mark
            if (key := self.key) is not None:
                opening += b"X-Llamasup-Client: " + quote(key.client).encode("ascii") + b"\r\n"
                if key.models and not key.controls:
                    opening += b"X-Llamasup-Models: " + quote(",".join(key.models)).encode("ascii") + b"\r\n"
        return opening

    def wants_events(self) -> bool:
        """Whether its body requests a stream, and its route supports streams."""
        if not (self.head.route.streams and self.head.needs_permit and self.body):
            return False
        try:
            return _read_streamed(self.body).stream
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False


def overdue(request: Request, config: ProxyConfig, now: float) -> HttpError | None:
    """The error for a request that has exceeded its time.

    The event streams of the control API, and a download of a file of batches, have no limit.
    """
    route = request.head.route
    timeout_s, remedy = config.request_timeout_s, "request less at once, or raise --request-timeout"
    if route.of_batches:
        timeout_s = config.limits.file_upload_s if request.head.method == b"POST" else None
        remedy = "divide the file"
    if timeout_s is None or now - request.received_at < timeout_s or route is CONTROL or route.of_router:
        return None
    return HttpError(
        504, f"request timed out after {timeout_s:g} s", "timeout_error", "request_timeout", remedy
    )


def record_of(
    request: Request,
    status: int,
    outcome: str,
    now: float,
    model: str = "",
    generation: int = 0,
    queue_s: float = 0.0,
    first_byte_s: float | None = None,
    bytes_out: int = 0,
    counts: TokenCounts | None = None,
    waited_s: float = 0.0,
    replayed: bool = False,
    context: ContextEnd | None = None,
    continued: bool = False,
) -> RequestRecord:
    """The record of a request that ends now."""
    head, key = request.head, request.key
    parent = head.trace_parent
    if request.has_head:
        status = 200  # the client has received this status; ``outcome`` shows the failure
    if counts is None:
        counts = _NO_COUNTS
    record = RequestRecord(
        request.id.decode("ascii"),
        head.method_text,
        head.path_text,
        head.route.label,
        model,
        generation,
        status,
        counts.prompt,
        counts.cached,
        counts.completion,
        counts.tokens_per_s,
        queue_s,
        first_byte_s,
        now - request.received_at if request.received_at else 0.0,
        bytes_out,
        outcome,
        waited_s,
        replayed,
        request.peer if key is None else key.client,
        parent.trace_id,
        request.body_bytes,
        parent_id=parent.span_id,
        parent_sampled=parent.is_sampled,
        ended_s=now,
        slot_s=request.slot_s,
        tokens_estimated=request.unreported_tokens,
        continued=continued,
        repaired=request.repairs,
        cause=request.cause,
    )
    if context is None:
        return record
    return msgspec.structs.replace(
        record, context=context.kind, n_prompt_tokens=context.n_prompt_tokens, n_ctx=context.n_ctx
    )


_NO_COUNTS: Final = TokenCounts()
