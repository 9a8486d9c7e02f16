"""A stream that is continued if its llama-server ends (``Settings.continue_streams``)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from llamasup.core.http.chunks import is_chunked
from llamasup.core.http.heads import HttpError, error_body
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.response import Unstreamed
from llamasup.core.proxy.stages import AnswerHead, Attempt, Between, Ended, Position, Stage
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.features.continuation.answer import NotContinued
from llamasup.features.continuation.apis import API_BY_ROUTE
from llamasup.features.continuation.stream import MAX_KEPT, Recording


def keep(request: Request, behind: Stage) -> Stage:
    """Keep the stream of this request, if its form is known."""
    return ContinuedStream(request, behind) if request.head.route.label in API_BY_ROUTE else behind


class ContinuedStream(Between):
    """The stage that keeps the answer to one request, and joins the parts of all its generations.

    ``received`` is None as long as no stream has begun that can be continued.
    """

    __slots__ = ("_attempt", "_failed", "_recording", "_request", "_unstreamed")

    _attempt: Attempt

    def __init__(self, request: Request, behind: Stage) -> None:
        self.next = behind
        self._request = request
        self._recording: Recording | None = None
        self._failed: HttpError | None = None
        self._unstreamed: Unstreamed | None = None  # an answer that cannot be the rest of a stream

    @property
    def received(self) -> Recording | None:
        return self._recording

    # --- the answer

    def begin(self, attempt: Attempt, head: AnswerHead, framing: bytes | None) -> None:
        self._attempt = attempt
        is_stream = head.status == 200 and head.streams_events and is_chunked(framing)
        recording = self._recording
        if recording is None:
            super().begin(attempt, head, framing)
            if is_stream and self._may_keep(attempt):
                self._recording = recording = Recording(self._request.head.route.label, self._request.body)
                recording.begin(self.write)
                self.write = recording.relay
        elif not is_stream:
            self._unstreamed = Unstreamed(framing)
            self.write = self._unstreamed.write
        else:
            self.write = self._relay
            try:
                recording.begin(self.next.write, repeats=attempt.endpoint.repeats_begun_message)
            except NotContinued as reason:
                self._fail_because(reason)

    def _may_keep(self, attempt: Attempt) -> bool:
        request = self._request
        is_small = request.jobs == 1 and len(request.body) <= MAX_KEPT
        return is_small and request.replayable and not attempt.is_uploaded

    def _relay(self, data: bytes) -> None:
        """More of a rest."""
        if self._failed is None and self._recording is not None:
            try:
                self._recording.relay(data)
            except NotContinued as reason:
                self._fail_because(reason)

    def _fail_because(self, reason: NotContinued) -> None:
        self._failed = _not_continued(reason)
        self._attempt.end_soon("upstream_failed", self._failed)

    def end(self, status: int) -> Ended:
        if self._failed is not None:
            error = error_body(self._failed)
        elif self._unstreamed is not None:
            error = self._unstreamed.error(status)
        else:
            error = b""
        if error:
            self.fail(error)
            return Ended("error_event")
        if self._recording is not None:
            self._recording.finish()
        return super().end(status)

    def fail(self, error: bytes) -> None:
        self._request.keep_alive = False
        super().fail(error)

    def position(self, plain: Position) -> Position:
        """The part of the response that the client has: only whole events of a stream that is kept."""
        if self._unstreamed is not None:
            return Position.NOTHING
        found = super().position(plain)
        return Position.BETWEEN if found is Position.INSIDE and self._recording is not None else found

    # --- its rest

    def complete(self) -> bool:
        if self._recording is None or not self._recording.is_complete:
            return False
        self._recording.end()
        return True

    def resume(self) -> str:
        return self._put_request(0)

    def _put_request(self, tokens: int | None) -> str:
        """Put the body for the rest into the request. Returns the reason if that is not possible.

        ``tokens``: those that the client has, if only the model knows them; None: it could not be asked.
        """
        if tokens is None or self._recording is None:
            return ""
        try:
            self._request.body = self._recording.continued_body(tokens)
        except NotContinued as reason:
            return str(reason)
        return ""

    def prepare(self, endpoint: Endpoint) -> Coroutine[Any, Any, Callable[[], object]] | None:
        if self._recording is None or not self._recording.uncounted or endpoint.node is not None:
            return super().prepare(endpoint)
        return self._count(endpoint, self._recording.uncounted)

    async def _count(self, endpoint: Endpoint, text: str) -> Callable[[], object]:
        """Only the model knows how many tokens the client has, if one event may have several."""
        from llamasup.core.llama_server.client import Prober  # here, because few streams are continued

        head = self._request.head
        prefix = head.path.decode("latin-1").removesuffix(head.route.label)
        async with Prober(endpoint.address, endpoint.api_key, prefix=prefix) as server:
            # If the request cannot be changed: it was made without this number, and still is.
            return partial(self._put_request, await server.count_tokens(text))


def _not_continued(reason: NotContinued) -> HttpError:
    return HttpError(
        502,
        f"llama-server exited during this answer, which could not be continued: {reason}",
        "server_error",
        "not_continued",
        "send the request again",
    )
