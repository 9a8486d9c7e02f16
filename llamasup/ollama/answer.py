"""One request in Ollama's API: whether its server has the context that it asks for, and its answer.

Takes the answer of llama-server in any pieces, and writes that of Ollama: lines of JSON while a stream
arrives, or one object once a whole answer has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic
from typing import Final

from llamasup.http.chunks import LAST_CHUNK, Dechunker, chunk
from llamasup.http.heads import HttpError, response, status_line
from llamasup.ollama.answers import BrokenAnswer, Lines, Times, error_line, error_text, status_of_error, whole
from llamasup.ollama.requests import Asked
from llamasup.proxy.translation import ResponseForm
from llamasup.queueing.endpoint import Endpoint

__all__ = ["Answer", "Served", "created_at", "error_response", "sentence_of"]

MAX_BYTES: Final = 256 << 20
"""Of an answer that is held until it is complete: the embeddings of some thousand texts."""

_EVENT: Final = b"data: "
_JSON: Final = b"Content-Type: application/json; charset=utf-8\r\n"
_NDJSON: Final = b"Content-Type: application/x-ndjson\r\n"


class Served:
    """What an answer needs of the models. ``context_of``: the context of a request to the model of this id;
    None: not known. ``keep``: lets the model of an id stay loaded for some seconds (``Pool.keep``).
    """

    __slots__ = ("context_of", "keep")

    def __init__(
        self, context_of: Callable[[str], int | None], keep: Callable[[str, float | None, int], bool]
    ) -> None:
        self.context_of = context_of
        self.keep = keep


def created_at() -> bytes:
    """The time now, as Go writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z").encode()


def sentence_of(error: HttpError) -> str:
    return f"{error.message}: {error.remedy}" if error.remedy else error.message


def error_response(error: HttpError, lines: bytes, *, method: bytes, close: bool) -> bytes:
    """The complete response for an error of llamasup."""
    more = [_JSON, lines]
    if error.retry_after_s is not None:
        more.append(b"Retry-After: %d\r\n" % max(1, -(-error.retry_after_s // 1)))
    if error.status == 401:
        more.append(b"WWW-Authenticate: Bearer\r\n")
    body = error_line(sentence_of(error))
    return response(error.status, body, *more, method=method, close=close, json=False)


class Answer:
    """A ``Translation``. ``received_at``: when the request arrived (monotonic)."""

    __slots__ = (
        "_asked",
        "_body",
        "_body_bytes",
        "_form",
        "_lines",
        "_received_at",
        "_rest",
        "_served",
        "_status",
        "_write",
        "has_begun",
    )

    def __init__(self, asked: Asked, received_at: float, served: Served) -> None:
        self.has_begun = False
        self._asked = asked
        self._received_at = received_at
        self._served = served
        self._status = 0
        self._form = ResponseForm(b"")
        self._write: Callable[[bytes], None] = _write_nothing
        self._lines: Lines | None = None
        self._rest = b""  # the beginning of an event
        self._body: list[bytes] = []  # of an answer that is held
        self._body_bytes = 0

    def admit(self, endpoint: Endpoint) -> HttpError | None:
        asked, served = self._asked, self._served
        if asked.n_ctx is not None:
            window = endpoint.window
            n_ctx = served.context_of(endpoint.model) if window is None else window.n_ctx
            if n_ctx is not None and asked.n_ctx > n_ctx:
                return HttpError(
                    400,
                    f"num_ctx is {asked.n_ctx}, but a request to this model has a context of {n_ctx} tokens",
                    cause="num_ctx",
                    remedy=f"ask for at most {n_ctx}, or set ctx_size of the model in llamasup's config",
                )
        if endpoint.node is None:
            served.keep(endpoint.model, asked.keep_s, 1)
        return None

    def begin(
        self,
        write: Callable[[bytes], None],
        status: int,
        form: ResponseForm,
        *,
        is_chunked: bool,
        streams_events: bool,
    ) -> Callable[[bytes], None]:
        self._form, self._status, self._write = form, status, write
        take = self._hold
        if streams_events and status == 200:
            take = self._translate
            self._lines = Lines(self._asked)
            framing = b"" if form.http_1_0 else b"Transfer-Encoding: chunked\r\n"
            end = b"Connection: close\r\n\r\n" if form.close or form.http_1_0 else b"\r\n"
            write(b"".join((status_line(200), _NDJSON, framing, form.lines, end)))
            self.has_begun = True
        return Dechunker(take).write if is_chunked else take

    def finish(self) -> int:
        times = Times(max(0.0, monotonic() - self._received_at), self._form.load_s)
        if self._lines is None:
            return self._send_whole(times)
        if not self._lines.done:
            self._send_last(self._lines, times)
        if not self._form.http_1_0:
            self._write(LAST_CHUNK)
        return 200

    def fail(self, error: HttpError) -> None:
        if self._lines is None or not self._lines.done:
            self._send(error_line(sentence_of(error)))

    # --- a stream

    def _translate(self, data: bytes) -> None:
        """Called for every streamed token."""
        lines = self._lines
        assert lines is not None
        if self._rest:
            data, self._rest = self._rest + data, b""
        *events, rest = data.split(b"\n\n")
        self._rest = rest
        now = created_at()
        found = b""
        for event in events:
            if event.startswith(_EVENT) and not lines.done:
                try:
                    found += lines.add(event[6:], now)
                except BrokenAnswer as error:
                    lines.done = True
                    found += error_line(str(error))
        if found:
            self._send(found)

    def _send_last(self, lines: Lines, times: Times) -> None:
        try:
            self._send(lines.last(created_at(), times))
        except BrokenAnswer as error:
            self._send(error_line(str(error)))

    def _send(self, line: bytes) -> None:
        self._write(line if self._form.http_1_0 else chunk(line))

    # --- a whole answer

    def _hold(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes <= MAX_BYTES:
            self._body.append(data)

    def _send_whole(self, times: Times) -> int:
        status, body = self._whole(times)
        form = self._form
        self.has_begun = True
        self._write(response(status, body, _JSON, form.lines, close=form.close, json=False))
        return status

    def _whole(self, times: Times) -> tuple[int, bytes]:
        body = b"".join(self._body)
        self._body.clear()
        if self._body_bytes > MAX_BYTES:
            return 502, error_line(f"the answer is larger than {MAX_BYTES} bytes: ask for less at once")
        if self._status != 200:
            sentence = error_text(body)
            return status_of_error(self._status, sentence), error_line(sentence)
        try:
            return 200, whole(self._asked, body, created_at(), times)
        except BrokenAnswer as error:
            return 500, error_line(str(error))


def _write_nothing(_data: bytes) -> None:
    raise AssertionError("the answer has not begun")
