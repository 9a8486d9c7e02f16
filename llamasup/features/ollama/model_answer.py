"""One request in Ollama's API: whether its model has the features that it needs, and its answer.

Takes the answer of llama-server in any pieces, and writes the answer of Ollama: lines of JSON while a stream
arrives, or one object once a whole answer has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from time import monotonic
from typing import Final

from msgspec import Struct

from llamasup.core.http.chunks import LAST_CHUNK, Dechunker, chunk, is_chunked
from llamasup.core.http.heads import HttpError, response, retry_after_line, status_line
from llamasup.core.models.spec import KeepResult
from llamasup.core.proxy.stages import AnswerHead, Attempt, Ended, Position, ResponseForm, Stage
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.features.ollama.answer_format import (
    EVENT,
    BrokenAnswer,
    Events,
    Lines,
    Times,
    error_line,
    error_text,
    status_of_error,
    whole,
)
from llamasup.features.ollama.fields import Refused
from llamasup.features.ollama.requests import Features, OllamaRequest, check_features

MAX_BYTES: Final = 128 << 20
"""The most bytes of an answer that is held until it is complete: the embeddings of some thousand texts. Its
translation takes up to four times as much memory for a moment, which ``Bodies`` does not count."""

JSON: Final = b"Content-Type: application/json; charset=utf-8\r\n"
_FAILED: Final = "translation_failed"  # the outcome of an answer that could not be translated
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


class OllamaAnswer(Stage):
    """The last stage of an answer in Ollama's API."""

    _attempt: Attempt

    def __init__(self) -> None:
        self.has_begun = False
        self._status = 0
        self._form = ResponseForm(b"")

    def begin(self, attempt: Attempt, head: AnswerHead, framing: bytes | None) -> None:
        self._attempt, self._status, self._form = attempt, head.status, attempt.form
        take = self._take(streams_events=head.streams_events and head.status == 200)
        self.write = Dechunker(take).write if is_chunked(framing) else take

    def _take(self, *, streams_events: bool) -> Callable[[bytes], None]:
        """Begin the response. Returns the function that takes the body of the answer."""
        raise NotImplementedError

    def position(self, plain: Position) -> Position:
        return Position.BETWEEN if self.has_begun else Position.NOTHING

    def fail(self, error: bytes) -> None:
        self._send(error_line(error_text(error)))

    def _begin_stream(self) -> None:
        self._attempt.send(stream_head(self._form))
        self.has_begun = True

    def _send(self, line: bytes) -> None:
        self._attempt.send(line if self._form.http_1_0 else chunk(line))

    def _end_stream(self) -> None:
        if not self._form.http_1_0:
            self._attempt.send(LAST_CHUNK)

    def _send_response(self, status: int, body: bytes) -> None:
        self.has_begun = True
        form = self._form
        self._attempt.send(response(status, body, JSON, form.lines, close=form.close, json=False))


class ModelAnswer(OllamaAnswer):
    """The answer of a model. ``received_at``: when the request arrived (monotonic)."""

    def __init__(self, request: OllamaRequest, received_at: float, served: Served) -> None:
        super().__init__()
        self._request = request
        self._received_at = received_at
        self._served = served
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

    def _take(self, *, streams_events: bool) -> Callable[[bytes], None]:
        if not streams_events:
            return self._hold
        self._lines = Lines(self._request)
        self._begin_stream()
        return self._translate

    def end(self, status: int) -> Ended:
        times = Times(max(0.0, monotonic() - self._received_at), self._form.load_s)
        if self._lines is None:
            return self._send_whole(times)
        if not self._failed:
            self._send_last(self._lines, times)
        if self._failed:
            return Ended(_FAILED, 200, is_whole=False)
        self._end_stream()
        return Ended("ok", 200)

    def fail(self, error: bytes) -> None:
        if not self._failed:
            super().fail(error)

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
            self._attempt.end_soon(_FAILED)

    def _send_last(self, lines: Lines, times: Times) -> None:
        try:
            self._send(lines.last(created_at(), times))
        except BrokenAnswer as error:
            self._failed = True
            self._send(error_line(str(error)))

    # --- a whole answer

    def _hold(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes <= MAX_BYTES:
            self._body.append(data)

    def _send_whole(self, times: Times) -> Ended:
        status, body, is_complete = self._whole(times)
        self._send_response(status, body)
        return Ended("ok" if is_complete else _FAILED, status)

    def _whole(self, times: Times) -> tuple[int, bytes, bool]:
        """The status and the body for the client, and whether they are the answer of llama-server."""
        body = b"".join(self._body)
        self._body.clear()
        if self._body_bytes > MAX_BYTES:
            sentence = f"the answer is larger than {MAX_BYTES} bytes: request less at once"
            return 502, error_line(sentence), False
        if self._status != 200:
            sentence = error_text(body)
            if self._request.has_webp and self._status == HTTPStatus.BAD_REQUEST:
                sentence += ": llama-server needs ffmpeg for WebP; install it there, or send PNG or JPEG"
            return status_of_error(self._status, sentence), error_line(sentence), True
        try:
            return 200, whole(self._request, body, created_at(), times), True
        except BrokenAnswer as error:
            return 500, error_line(str(error)), False
