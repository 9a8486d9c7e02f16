"""One request in Ollama's API: whether its model has the features that it needs, and its answer.

Takes the answer of llama-server in any pieces, and writes that of Ollama: lines of JSON while a stream
arrives, or one object once a whole answer has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from time import monotonic
from typing import Final

from msgspec import Struct

from llamasup.core.http.chunks import LAST_CHUNK, Dechunker, chunk
from llamasup.core.http.heads import HttpError, response, retry_after_line, status_line
from llamasup.core.models.spec import KeepResult
from llamasup.core.proxy.stages import Answered, ResponseForm
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.features.ollama.answer_format import (
    BrokenAnswer,
    Lines,
    Times,
    error_line,
    error_text,
    status_of_error,
    whole,
)
from llamasup.features.ollama.events import EVENT, Events
from llamasup.features.ollama.fields import Refused
from llamasup.features.ollama.requests import Features, OllamaRequest, check_features

MAX_BYTES: Final = 128 << 20
"""The most bytes of an answer that is held until it is complete: the embeddings of some thousand texts. Its
translation takes up to four times as much memory for a moment, which ``Bodies`` does not count."""

JSON: Final = b"Content-Type: application/json; charset=utf-8\r\n"
_NDJSON: Final = b"Content-Type: application/x-ndjson\r\n"


Keep = Callable[[str, float | None, int], KeepResult]


class Served(Struct, frozen=True):
    """The models, as an answer needs them. ``features_of``: what the model of this id can do. ``keep``: lets
    the model of an id stay loaded for some seconds (``Pool.keep``).
    """

    features_of: Callable[[str], Features]
    keep: Keep


def created_at() -> bytes:
    """Return the time now, as Go writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z").encode()


def sentence_of(error: HttpError) -> str:
    return f"{error.sentence}: {error.remedy}" if error.remedy else error.sentence


def error_response(error: HttpError, lines: bytes, *, method: bytes, close: bool) -> bytes:
    """Write the complete response for an error of llamasup."""
    challenge = b"WWW-Authenticate: Bearer\r\n" if error.status == 401 else b""
    body, more = error_line(sentence_of(error)), (JSON, lines, retry_after_line(error), challenge)
    return response(error.status, body, *more, method=method, close=close, json=False)


def stream_head(form: ResponseForm) -> bytes:
    """Write the head of a response whose body has lines of JSON."""
    framing = b"" if form.http_1_0 else b"Transfer-Encoding: chunked\r\n"
    end = b"Connection: close\r\n\r\n" if form.close or form.http_1_0 else b"\r\n"
    return b"".join((status_line(200), _NDJSON, framing, form.lines, end))


class ModelAnswer:
    """A ``Translation``. ``received_at``: when the request arrived (monotonic)."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_end",
        "_events",
        "_failed",
        "_form",
        "_lines",
        "_received_at",
        "_request",
        "_served",
        "_status",
        "_write",
        "has_begun",
    )

    def __init__(self, request: OllamaRequest, received_at: float, served: Served) -> None:
        self.has_begun = False
        self._request = request
        self._received_at = received_at
        self._served = served
        self._status = 0
        self._form = ResponseForm(b"")
        self._write: Callable[[bytes], None] = _has_not_begun
        self._end: Callable[[], None] = _has_not_begun
        self._lines: Lines | None = None
        self._events = Events()
        self._failed = False  # the stream has ended with an error
        self._body: list[bytes] = []  # of an answer that is held
        self._body_bytes = 0

    def admit(self, endpoint: Endpoint) -> HttpError | None:
        request, served = self._request, self._served
        if request.thinks or request.calls_tools:  # its file may have come after the request
            try:
                check_features(request, served.features_of(endpoint.model))
            except Refused as refused:
                return refused.error
        if endpoint.node is None:
            served.keep(endpoint.model, request.keep_s, 1)
        return None

    def begin(
        self,
        write: Callable[[bytes], None],
        status: int,
        form: ResponseForm,
        *,
        is_chunked: bool,
        streams_events: bool,
        end: Callable[[], None],
    ) -> Callable[[bytes], None]:
        self._form, self._status, self._write, self._end = form, status, write, end
        take = self._hold
        if streams_events and status == 200:
            take = self._translate
            self._lines = Lines(self._request)
            write(stream_head(form))
            self.has_begun = True
        return Dechunker(take).write if is_chunked else take

    def finish(self) -> Answered:
        times = Times(max(0.0, monotonic() - self._received_at), self._form.load_s)
        if self._lines is None:
            return self._send_whole(times)
        if not self._failed:
            self._send_last(self._lines, times)
        if self._failed:
            return Answered(200, complete=False, framed=False)
        if not self._form.http_1_0:
            self._write(LAST_CHUNK)
        return Answered(200)

    def fail(self, error: bytes) -> None:
        if not self._failed:
            self._send(error_line(error_text(error)))

    # --- a stream

    def _translate(self, data: bytes) -> None:
        """Called for every streamed token."""
        lines = self._lines
        assert lines is not None
        if self._failed:
            return
        now = created_at()
        found = b""
        try:
            for event in self._events.complete(data).split(b"\n\n"):
                if event.startswith(EVENT):
                    found += lines.add(event[6:], now)
        except BrokenAnswer as error:
            self._failed = True
            found += error_line(str(error))
        if found:
            self._send(found)
        if self._failed:
            self._end()

    def _send_last(self, lines: Lines, times: Times) -> None:
        try:
            self._send(lines.last(created_at(), times))
        except BrokenAnswer as error:
            self._failed = True
            self._send(error_line(str(error)))

    def _send(self, line: bytes) -> None:
        self._write(line if self._form.http_1_0 else chunk(line))

    # --- a whole answer

    def _hold(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes <= MAX_BYTES:
            self._body.append(data)

    def _send_whole(self, times: Times) -> Answered:
        answered, body = self._whole(times)
        form = self._form
        self.has_begun = True
        self._write(response(answered.status, body, JSON, form.lines, close=form.close, json=False))
        return answered

    def _whole(self, times: Times) -> tuple[Answered, bytes]:
        body = b"".join(self._body)
        self._body.clear()
        if self._body_bytes > MAX_BYTES:
            sentence = f"the answer is larger than {MAX_BYTES} bytes: ask for less at once"
            return Answered(502, complete=False), error_line(sentence)
        if self._status != 200:
            sentence = error_text(body)
            if self._request.has_webp and self._status == HTTPStatus.BAD_REQUEST:
                sentence += ": llama-server needs ffmpeg for WebP; install it there, or send PNG or JPEG"
            return Answered(status_of_error(self._status, sentence)), error_line(sentence)
        try:
            return Answered(200), whole(self._request, body, created_at(), times)
        except BrokenAnswer as error:
            return Answered(500, complete=False), error_line(str(error))


def _has_not_begun(_data: bytes = b"") -> None:
    raise AssertionError("the answer has not begun")
