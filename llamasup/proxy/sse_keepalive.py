"""A stream that we begin ourselves, because its request has waited for long without a byte.

Whoever opted in (``stream_keepalive_s``) gets SSE comments, which clients skip, so that nobody on the way
takes the connection for dead. They are no byte of a response: the request can still be sent again (S10). When
llama-server's stream comes, its body goes on where the comments end. Whatever else comes is told as the error
event of the API, and then the connection is closed without a last chunk: no stream that failed looks complete
(S12).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llamasup.http.chunks import LAST_CHUNK, Dechunker, chunk
from llamasup.http.heads import status_line
from llamasup.http.sse import error_event, error_of
from llamasup.proxy.interfaces import ClientConnection
from llamasup.proxy.request import Request

__all__ = ["EarlyStream", "send_keepalive_if_due"]

NEVER: Final = float("inf")
MAX_HELD: Final = 64 * 1024  # of an answer that is no stream; llama-server's errors are below 1 KiB
_COMMENT = b": waiting\n\n"
_HEAD = status_line(200) + b"Content-Type: text/event-stream\r\nX-Accel-Buffering: no\r\n"


def send_keepalive_if_due(downstream: ClientConnection, request: Request, now: float) -> None:
    """Called every ``Limits.sweep_s`` for a request without a byte of a response: comment, if that is due."""
    interval_s = downstream.proxy.config.stream_keepalive_s
    if interval_s is None or request.body_sink is not None or downstream.paused:
        return
    if now < (request.comment_at or request.received_at + interval_s):
        return
    if request.early is None:
        # With the Origin left to llama-server, only its own head says whether the page may read the answer.
        hides = request.head.origin is not None and downstream.proxy.config.rules.transparent
        if hides or not request.wants_events():
            request.comment_at = NEVER
            return
        request.early = EarlyStream(downstream, request)
    request.early.comment()
    request.comment_at = now + interval_s


class EarlyStream:
    """Of one request, through all that it waits for. Its head is sent when it is made."""

    __slots__ = ("_body", "_body_bytes", "_downstream", "_rechunks", "_request")

    def __init__(self, downstream: ClientConnection, request: Request) -> None:
        self._downstream = downstream
        self._request = request
        self._body: list[bytes] | None = None  # of an answer that is no stream
        self._body_bytes = 0
        self._rechunks = False
        framing = b"" if request.http_1_0 else b"Transfer-Encoding: chunked\r\n"
        close = b"" if downstream.keeps_alive(request) else b"Connection: close\r\n"
        downstream.transport.write(b"".join((_HEAD, framing, request.response_lines, close, b"\r\n")))

    def comment(self) -> None:
        self._write(_COMMENT)

    # --- llama-server's answer

    @property
    def is_passed_on(self) -> bool:
        """Whether what llama-server answers goes to the client as it is; meant for after ``join``."""
        return self._body is None

    def join(self, *, is_stream: bool, framing: bytes | None) -> Callable[[bytes], None]:
        """What takes the body of the answer, whose head cannot be passed on any more."""
        chunked = framing is not None and framing.startswith(b"Transfer")
        write = self._downstream.transport.write
        if not is_stream:
            self._body = []
            return Dechunker(self._hold).write if chunked else self._hold
        if self._request.http_1_0:
            return Dechunker(write).write if chunked else write
        if chunked:
            return write
        self._rechunks = True
        return self._write

    def finish(self, status: int) -> bytes | None:
        """The answer is whole. The error body that has to be told if it was no stream, else None."""
        if self._body is not None:
            return error_of(status, b"".join(self._body))
        if self._rechunks:
            self._downstream.transport.write(LAST_CHUNK)
        return None

    def fail(self, error: bytes) -> None:
        """Say why there is no stream: an error body. The connection ends with it."""
        self._request.keep_alive = False
        self._write(error_event(self._request.head.path, error))

    # --- within

    def _hold(self, data: bytes) -> None:
        assert self._body is not None
        self._body_bytes += len(data)
        if self._body_bytes <= MAX_HELD:
            self._body.append(data)

    def _write(self, data: bytes) -> None:
        if data:
            self._downstream.transport.write(data if self._request.http_1_0 else chunk(data))
