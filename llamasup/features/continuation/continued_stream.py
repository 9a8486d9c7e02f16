"""A stream that is continued if its llama-server ends (``Settings.continue_streams``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from llamasup.core.http.chunks import is_chunked
from llamasup.core.http.heads import HttpError, error_body
from llamasup.core.proxy.answers.sse_keepalive import KeepaliveStream
from llamasup.core.proxy.interfaces import ClientConnection
from llamasup.core.proxy.request import Request
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.features.continuation.answer import NotContinued
from llamasup.features.continuation.apis import API_BY_ROUTE
from llamasup.features.continuation.stream import MAX_KEPT, Recording


def keep(
    downstream: ClientConnection, request: Request, sent_at: float, first_byte_at: float
) -> ContinuedStream | None:
    """Keep the stream that begins, if its form is known and its request is small enough."""
    if request.head.route.label not in API_BY_ROUTE or request.jobs != 1 or len(request.body) > MAX_KEPT:
        return None
    return ContinuedStream(downstream, request, sent_at, first_byte_at)


class ContinuedStream:
    """The answer to one request, through all its generations.

    A ``KeptStream``. For the exchange of a later generation it is a ``BegunStream``.
    """

    __slots__ = (
        "_failed",
        "_metrics",
        "_on_failure",
        "_recording",
        "_repeats",
        "_request",
        "_rest",
        "_write",
        "first_byte_at",
        "opening",
        "refusal",
        "sent_at",
    )

    def __init__(
        self, downstream: ClientConnection, request: Request, sent_at: float, first_byte_at: float
    ) -> None:
        self._recording = Recording(request.head.route.label, request.body)
        self.sent_at = sent_at
        self.first_byte_at = first_byte_at
        self.opening = b""
        self.refusal = ""
        self._request = request
        self._metrics = downstream.proxy.metrics
        self._write: Callable[[bytes], None] = downstream.send
        self._rest = KeepaliveStream(downstream, request, has_head=True)
        self._failed: HttpError | None = None
        self._on_failure: Callable[[HttpError], None] | None = None
        self._repeats: bool | None = None

    @property
    def is_continued(self) -> bool:
        return self._recording.is_continued

    @property
    def is_complete(self) -> bool:
        return self._recording.is_complete

    @property
    def tail(self) -> deque[bytes]:
        return self._recording.tail

    def first(self, write: Callable[[bytes], None]) -> Callable[[bytes], None]:
        self._write = write
        self._recording.begin(write)
        return self._recording.relay

    @property
    def pieces(self) -> int:
        return self._recording.pieces

    @property
    def sent_bytes(self) -> int:
        return self._recording.sent_bytes

    def expect(self, *, repeats: bool | None, fail: Callable[[HttpError], None]) -> None:
        self._repeats, self._on_failure = repeats, fail

    @property
    def is_uncounted(self) -> bool:
        return bool(self._recording.uncounted)

    async def count(self, endpoint: Endpoint) -> int | None:
        from llamasup.core.llama_server.client import Prober  # here, because few streams are continued

        head = self._request.head
        prefix = head.path.decode("latin-1").removesuffix(head.route.label)
        async with Prober(endpoint.address, endpoint.api_key, prefix=prefix) as server:
            return await server.count_tokens(self._recording.uncounted)

    def counted(self, tokens: int) -> None:
        self._put_request(tokens)  # if it fails: it was made without this number, and still is

    def ask_for_rest(self, model: str) -> bool:
        if not self.refusal and (reason := self._put_request()):
            self.refuse(reason, model)
        if self.refusal:
            return False
        self._request.keepalive_stream = self
        self._request.next_comment_at = 0.0
        return True

    def _put_request(self, tokens: int = 0) -> str:
        """Put the body for the rest into the request. Returns the reason if that is not possible."""
        try:
            self._request.body = self._recording.continued_body(tokens)
        except NotContinued as reason:
            return str(reason)
        return ""

    def refuse(self, reason: str, model: str) -> None:
        self.refusal = reason
        self._metrics.count_continued(model, "refused")

    def end(self) -> None:
        self._recording.end()

    # --- as a stream that has begun

    def comment(self, text: str) -> None:
        self._rest.comment(text)

    @property
    def is_relayed(self) -> bool:
        return self._rest.is_relayed

    def join(self, *, is_stream: bool, framing: bytes | None) -> Callable[[bytes], None]:
        if not is_stream or not is_chunked(framing):
            return self._rest.join(is_stream=False, framing=framing)
        try:
            self._recording.begin(self._write, repeats=self._repeats)
        except NotContinued as reason:
            self._fail_because(reason)
        return self._relay

    def _relay(self, data: bytes) -> None:
        if self._failed is None:
            try:
                self._recording.relay(data)
            except NotContinued as reason:
                self._fail_because(reason)

    def _fail_because(self, reason: NotContinued) -> None:
        self._failed = _not_continued(reason)
        assert self._on_failure is not None
        self._on_failure(self._failed)

    def finish(self, status: int) -> bytes | None:
        if self._failed is not None:
            return error_body(self._failed)
        error = self._rest.finish(status)
        if error is None:
            self._recording.finish()
        return error

    def fail(self, error: bytes) -> None:
        if self._request.translation is None:
            self._rest.fail(error)
        else:
            self._request.keep_alive = False
            self._request.translation.fail(error)


def _not_continued(reason: NotContinued) -> HttpError:
    return HttpError(
        502,
        f"llama-server ended within this answer, which could not be continued: {reason}",
        "server_error",
        "not_continued",
        "send the request again",
    )
