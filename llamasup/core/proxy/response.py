"""The stages of an answer that does not pass as it is: the stages that a request needs, and the stages of the
core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llamasup.core.http.chunks import LAST_CHUNK, Dechunker, chunk, is_chunked
from llamasup.core.http.heads import status_line
from llamasup.core.http.sse import error_event
from llamasup.core.llama_server.answers import error_of
from llamasup.core.models.redaction import without_folders
from llamasup.core.proxy.context import ClientConnection
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.stages import AnswerHead, Attempt, Between, Ended, Position, Stage

NEVER: Final = float("inf")
MAX_HELD: Final = 64 * 1024  # of an answer that is not a stream; llama-server's errors have less than 1 KiB
_STREAM_HEAD = status_line(200) + b"Content-Type: text/event-stream\r\nX-Accel-Buffering: no\r\n"


# --- the stages of a request


def compose(client: ClientConnection, request: Request) -> Stage:
    """From the client to llama-server: write or translate, redact, name tools back, keep for another server,
    hold.
    """
    stage: Stage = Response(client, request) if request.translation is None else request.translation
    if request.head.route.has_paths and request.hides_paths:
        stage = Redacted(stage)
    if request.translator is not None:
        request.translator.next = stage
        stage = request.translator
    route, keep = request.model_route, client.proxy.stages.keep
    if keep is not None and route is not None and route.served.queue.continues_streams:
        stage = keep(request, stage)
    if request.holder is not None:
        request.holder.next = stage
        stage = request.holder
    request.stages = stage
    return stage


class Response(Stage):
    """The last stage of an answer in llama-server's own API.

    Its head is that of the answer. Where the client already has the head of a stream, because comments came
    before the answer, llama-server's stream follows them. If the answer is then not a stream, the client gets
    an error event of its API, and the connection is closed without a last chunk, so that no failed stream
    looks complete (S12).
    """

    __slots__ = ("_client", "_rechunks", "_request", "_unstreamed")

    def __init__(self, client: ClientConnection, request: Request) -> None:
        self._client = client
        self._request = request
        self._rechunks = False
        self._unstreamed: Unstreamed | None = None

    def comment(self, text: str) -> None:
        request, client = self._request, self._client
        if not request.has_head:
            request.has_head = True
            framing = b"" if request.http_1_0 else b"Transfer-Encoding: chunked\r\n"
            close = b"" if client.keeps_alive(request) else b"Connection: close\r\n"
            client.send(b"".join((_STREAM_HEAD, framing, request.response_lines, close, b"\r\n")))
        self._send(f": {text}\n\n".encode())

    def begin(self, attempt: Attempt, head: AnswerHead, framing: bytes | None) -> None:
        request, client = self._request, self._client
        self.write = client.send
        chunked = is_chunked(framing)
        if request.has_head and not (head.status == 200 and head.streams_events):
            self._unstreamed = Unstreamed(framing)
            self.write = self._unstreamed.write
        elif request.http_1_0 and chunked:
            framing, self.write = b"", Dechunker(client.send).write
        elif request.has_head and not chunked:
            self._rechunks = not request.http_1_0
            self.write = self._send
        if not request.has_head:
            if framing is None:  # the end of the connection ends the body (RFC 9112 §6.3, rule 8)
                request.keep_alive = False
            client.send(attempt.response_head(head, framing or b""))

    def end(self, status: int) -> Ended:
        if self._unstreamed is not None:
            self.fail(self._unstreamed.error(status))
            return Ended("error_event")
        if self._rechunks:
            self._client.send(LAST_CHUNK)
        return super().end(status)

    def fail(self, error: bytes) -> None:
        self._request.keep_alive = False
        self._send(error_event(self._request.head.path, error))

    def position(self, plain: Position) -> Position:
        return plain if self._unstreamed is None else Position.NOTHING

    def _send(self, data: bytes) -> None:
        if data:
            self._client.send(data if self._request.http_1_0 else chunk(data))


class Unstreamed:
    """The body of an answer that is not a stream, while the client waits for one."""

    __slots__ = ("_bytes", "_pieces", "write")

    def __init__(self, framing: bytes | None) -> None:
        self._pieces: list[bytes] = []
        self._bytes = 0
        self.write: Callable[[bytes], None] = self._hold
        if is_chunked(framing):
            self.write = Dechunker(self._hold).write

    def error(self, status: int) -> bytes:
        """The error body that the client gets in place of this answer."""
        return error_of(status, b"".join(self._pieces))

    def _hold(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes <= MAX_HELD:
            self._pieces.append(data)


class Redacted(Between):
    """Buffers a complete answer, and forwards it without the folders of this machine.

    Its size depends on the chat template of the model; clients cannot choose it.
    """

    __slots__ = ("_is_chunked", "_pieces")

    def __init__(self, behind: Stage) -> None:
        self.next = behind
        self._pieces: list[bytes] = []

    def begin(self, attempt: Attempt, head: AnswerHead, framing: bytes | None) -> None:
        self.next.begin(attempt, head, framing)
        self._is_chunked = is_chunked(framing)
        self.write = self._pieces.append
        if self._is_chunked:
            self.write = Dechunker(self._pieces.append).write

    def end(self, status: int) -> Ended:
        body = without_folders(b"".join(self._pieces))
        if self._is_chunked:
            body = (chunk(body) if body else b"") + LAST_CHUNK
        if body:
            self.next.write(body)
        return super().end(status)


# --- comments


def send_comment_if_due(
    client: ClientConnection, request: Request, now: float, text: Callable[[], str] = lambda: "waiting"
) -> None:
    """Send an SSE comment to a stream whose request waits for long (``stream_keepalive_s``), so that no proxy
    closes it. Called every ``Limits.sweep_s`` before the response begins.

    Clients skip comments, so the request can still be sent again (S10). ``text``: what the comment says about
    the wait. No key, path or name of a file: its client reads it.
    """
    interval_s = client.proxy.config.stream_keepalive_s
    if interval_s is None or request.body_sink is not None or client.paused:
        return
    if request.translation is not None:  # another API has no comments
        return
    if now < (request.next_comment_at or request.received_at + interval_s):
        return
    if not request.has_head:
        # If llama-server checks the Origin, only its own head shows whether the page may read the answer.
        hides = request.head.origin is not None and client.proxy.config.rules.transparent
        if hides or not request.wants_events():
            request.next_comment_at = NEVER
            return
    (request.stages or compose(client, request)).comment(text())
    request.next_comment_at = now + interval_s
