"""The response to one client, where it is more than llama-server's head and body: composes its stages.

A plain response has none of them, and the exchange relays it without this module. Also ends a response that
fails, in the way that its client can notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Final

from msgspec import Struct

from llamasup.core.http.chunks import LAST_CHUNK, Dechunker, chunk, is_chunked
from llamasup.core.http.heads import HttpError, error_body
from llamasup.core.http.sse import error_event
from llamasup.core.models.redaction import without_folders
from llamasup.core.proxy.interfaces import ClientConnection
from llamasup.core.proxy.own_heads import response_head
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.stages import AnswerHead, KeptStream, ResponseForm, Translation
from llamasup.core.proxy.waiting import Waiting
from llamasup.core.queueing.endpoint import Endpoint


class Position(Enum):
    """The part of the response that the client has."""

    NOTHING = "an error can be the response"
    BETWEEN = "an error event can follow the last event"
    INSIDE = "only a reset shows that the response is incomplete"


class Ended(Struct, frozen=True):
    """The end of a response. ``outcome`` and ``status``: for the record; empty and 0: those of llama-server's
    answer. ``error``: the error body that the client must still get.
    """

    outcome: str = ""
    status: int = 0
    error: bytes | None = None


PLAIN: Final = Ended()


class Response:
    """``on_error`` is called, in a later round of the loop, once a translation has ended the response with an
    error. ``waiting``: the wait of the request, if any.
    """

    __slots__ = ("_downstream", "_on_error", "_redacted", "_request", "_waiting")

    def __init__(
        self,
        downstream: ClientConnection,
        request: Request,
        waiting: Waiting | None,
        on_error: Callable[[], None],
    ) -> None:
        self._downstream = downstream
        self._request = request
        self._waiting = waiting
        self._on_error = on_error
        self._redacted: _RedactedBody | None = None

    def begin(
        self, head: AnswerHead, framing: bytes | None, kept: KeptStream | None, sent_at: float
    ) -> Callable[[bytes], None]:
        """Begin the response. Returns the function that takes the body, as framed by llama-server.

        ``kept``: keeps this stream, if any. ``sent_at``: when the request was sent.
        """
        request = self._request
        early = request.keepalive_stream
        if early is not None:
            is_stream = head.status == 200 and head.streams_events
            write = early.join(is_stream=is_stream, framing=framing)
        elif request.translation is not None:
            write = self._translated(request.translation, head, framing)
        else:
            write = self._with_head(head, framing, sent_at)
        return write if kept is None or kept is early else kept.first(write)

    def _with_head(
        self, answer: AnswerHead, framing: bytes | None, sent_at: float
    ) -> Callable[[bytes], None]:
        """Send a head. The returned function removes paths and chunks that the client must not get."""
        request, downstream = self._request, self._downstream
        write: Callable[[bytes], None] = downstream.send
        chunked = is_chunked(framing)
        if framing is None:  # the end of the connection ends the body (RFC 9112 §6.3, rule 8)
            request.keep_alive = False
        elif request.http_1_0 and chunked:
            framing, write = None, Dechunker(write).write
        if request.head.route.has_paths and request.hides_paths:
            rechunk = chunked and not request.http_1_0
            self._redacted = _RedactedBody(downstream.send, is_chunked=chunked, rechunk=rechunk)
            write = self._redacted.add
        downstream.send(
            response_head(
                request,
                answer.status,
                answer.lines,
                framing or b"",
                self._waiting,
                sent_at,
                draining=downstream.proxy.draining,
            )
        )
        return write

    def _translated(
        self, translation: Translation, head: AnswerHead, framing: bytes | None
    ) -> Callable[[bytes], None]:
        request, downstream, waiting = self._request, self._downstream, self._waiting
        form = ResponseForm(
            request.response_lines,
            http_1_0=request.http_1_0,
            close=not downstream.keeps_alive(request),
            load_s=0.0 if waiting is None else waiting.entry.waited_s,
        )
        return translation.begin(
            downstream.send,
            head.status,
            form,
            is_chunked=is_chunked(framing),
            streams_events=head.streams_events,
            end=self._end_soon,
        )

    def _end_soon(self) -> None:
        """The response has ended with an error. Called while bytes of the answer are relayed."""
        asyncio.get_running_loop().call_soon(self._on_error)

    def end(self, status: int) -> Ended:
        """The answer with this status is complete: send what is left."""
        early, translation = self._request.keepalive_stream, self._request.translation
        if self._redacted is not None:
            self._redacted.send()
        error = None if early is None else early.finish(status)
        if error is not None:
            return Ended("error_event", error=error)
        if translation is None:
            return PLAIN
        answered = translation.finish()
        if not (answered.complete or answered.framed):  # for the client, the stream is incomplete
            self._request.keep_alive = False
        return Ended("ok" if answered.complete else "translation_failed", answered.status)

    def send_error(self, error: bytes) -> None:
        """End an early stream with the error that ``end`` has found."""
        early = self._request.keepalive_stream
        assert early is not None
        early.fail(error)

    # --- a response that fails

    def position(self, status: int, is_between_events: Callable[[], bool]) -> Position:
        """``status``: of the answer that has begun, or 0."""
        request = self._request
        early, translation = request.keepalive_stream, request.translation
        if translation is not None:
            return Position.BETWEEN if translation.has_begun else Position.NOTHING
        if not status or (early is not None and not early.is_relayed):
            return Position.NOTHING
        # The client of a kept stream gets only whole events.
        is_between = request.kept_stream is not None or is_between_events()
        return Position.BETWEEN if is_between else Position.INSIDE

    def fail(self, error: HttpError, position: Position) -> None:
        """End a response that has begun."""
        request, downstream = self._request, self._downstream
        if position is Position.INSIDE:
            downstream.abort()
            return
        if request.translation is not None:
            request.translation.fail(error_body(error))
        else:
            # An error event, and a close without a last chunk: to a client that reads events, and to one that
            # reads HTTP, the stream is incomplete (S12).
            event = error_event(request.head.path, error_body(error))
            downstream.send(event if request.http_1_0 else chunk(event))
        downstream.close()


def kept_stream(
    downstream: ClientConnection,
    request: Request,
    endpoint: Endpoint,
    head: AnswerHead,
    framing: bytes | None,
    times: tuple[float, float],
    fail: Callable[[HttpError], None],
) -> KeptStream | None:
    """Returns what keeps the stream that begins, so that it can be continued; None: it is not kept.

    ``times``: when the request was sent, and when this answer began. ``fail`` is called, while bytes are
    relayed, if the stream does not continue the one that was kept.
    """
    stream, route = request.kept_stream, request.model_route
    if stream is not None:
        stream.expect(repeats=endpoint.repeats_begun_message, fail=fail)
        return stream
    if route is None or not route.served.queue.continues_streams:
        return None
    may_keep = head.status == 200 and is_chunked(framing) and request.replayable
    if may_keep and downstream.proxy.stages.keep is not None:
        request.kept_stream = downstream.proxy.stages.keep(downstream, request, *times)
    return request.kept_stream


class _RedactedBody:
    """Buffers a complete answer, and forwards it without the folders of this machine.

    Its size depends on the chat template of the model; clients cannot choose it.
    """

    __slots__ = ("_add", "_pieces", "_rechunk", "_write")

    def __init__(self, write: Callable[[bytes], None], *, is_chunked: bool, rechunk: bool) -> None:
        self._write = write
        self._rechunk = rechunk
        self._pieces: list[bytes] = []
        self._add = Dechunker(self._pieces.append).write if is_chunked else self._pieces.append

    def add(self, data: bytes) -> None:
        if data:
            self._add(data)

    def send(self) -> None:
        body = without_folders(b"".join(self._pieces))
        if self._rechunk:
            body = (chunk(body) if body else b"") + LAST_CHUNK
        if body:
            self._write(body)
