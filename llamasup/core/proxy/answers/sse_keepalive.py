"""SSE comments to a stream whose request waits for long (``stream_keepalive_s``), so that no proxy closes it.

Clients skip comments, so the request can still be sent again (S10). The body of llama-server's stream follows
the comments. If the answer is not a stream, the client gets an error event of its API, and the connection is
closed without a last chunk, so that no failed stream looks complete (S12).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llamasup.core.http.chunks import LAST_CHUNK, Dechunker, chunk, is_chunked
from llamasup.core.http.heads import status_line
from llamasup.core.http.sse import error_event
from llamasup.core.llama_server.answers import error_of
from llamasup.core.proxy.interfaces import ClientConnection
from llamasup.core.proxy.request import Request

__all__ = ["KeepaliveStream", "send_keepalive_if_due"]

NEVER: Final = float("inf")
MAX_HELD: Final = 64 * 1024  # of an answer that is not a stream; llama-server's errors have less than 1 KiB
_HEAD = status_line(200) + b"Content-Type: text/event-stream\r\nX-Accel-Buffering: no\r\n"


def send_keepalive_if_due(
    downstream: ClientConnection, request: Request, now: float, text: Callable[[], str] = lambda: "waiting"
) -> None:
    """Send a comment if one is due. Called every ``Limits.sweep_s`` before the response begins.

    ``text``: what the comment says about the wait. No key, path or name of a file: its client reads it.
    """
    interval_s = downstream.proxy.config.stream_keepalive_s
    if interval_s is None or request.body_sink is not None or downstream.paused:
        return
    if request.translation is not None:  # another API has no comments
        return
    if now < (request.next_comment_at or request.received_at + interval_s):
        return
    if request.keepalive_stream is None:
        # If llama-server checks the Origin, only its own head shows whether the page may read the answer.
        hides = request.head.origin is not None and downstream.proxy.config.rules.transparent
        if hides or not request.wants_events():
            request.next_comment_at = NEVER
            return
        request.keepalive_stream = KeepaliveStream(downstream, request)
    request.keepalive_stream.comment(text())
    request.next_comment_at = now + interval_s


class KeepaliveStream:
    """An early stream of one request (``BegunStream``), through all its waits.

    The head is sent at once, unless the client ``has_head`` already.
    """

    __slots__ = ("_body", "_body_bytes", "_downstream", "_rechunks", "_request")

    def __init__(self, downstream: ClientConnection, request: Request, *, has_head: bool = False) -> None:
        self._downstream = downstream
        self._request = request
        self._body: list[bytes] | None = None  # of an answer that is not a stream
        self._body_bytes = 0
        self._rechunks = False
        if has_head:
            return
        framing = b"" if request.http_1_0 else b"Transfer-Encoding: chunked\r\n"
        close = b"" if downstream.keeps_alive(request) else b"Connection: close\r\n"
        downstream.send(b"".join((_HEAD, framing, request.response_lines, close, b"\r\n")))

    def comment(self, text: str) -> None:
        self._write(f": {text}\n\n".encode())

    # --- llama-server's answer

    @property
    def is_relayed(self) -> bool:
        return self._body is None

    def join(self, *, is_stream: bool, framing: bytes | None) -> Callable[[bytes], None]:
        chunked = is_chunked(framing)
        write = self._downstream.send
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
        if self._body is not None:
            return error_of(status, b"".join(self._body))
        if self._rechunks:
            self._downstream.send(LAST_CHUNK)
        return None

    def fail(self, error: bytes) -> None:
        """Send the error event. The connection ends with it."""
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
            self._downstream.send(data if self._request.http_1_0 else chunk(data))
