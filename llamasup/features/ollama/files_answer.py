"""The answers to ``/api/pull`` and ``/api/delete``, which the control API of llamasup carries out.

Its stream of events becomes lines of JSON, or one object once the download has ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

import msgspec

from llamasup.core.models.redaction import redact_paths
from llamasup.core.proxy.stages import Ended
from llamasup.features.ollama.answer_format import EVENT, Events, error_line, error_text
from llamasup.features.ollama.model_answer import OllamaAnswer

_encode: Final = msgspec.json.Encoder().encode
_SUCCESS: Final = b'{"status":"success"}\n'


class _Failure(msgspec.Struct):
    code: int = 500


class _Event(msgspec.Struct):
    event: str
    done_bytes: int = 0
    total_bytes: int | None = None
    error: _Failure | None = None


_read_event = msgspec.json.Decoder(_Event).decode


class FilesAnswer(OllamaAnswer):
    """The answer to a change of files. ``streams``: the client wants lines. ``pulls``: it answers a download,
    otherwise a removal.
    ``hides_paths``: the client must not learn folders of this machine.
    """

    def __init__(self, name: str, *, pulls: bool, streams: bool, hides_paths: bool) -> None:
        super().__init__()
        self._name = name
        self._pulls = pulls
        self._streams = streams
        self._hides_paths = hides_paths
        self._events = Events()
        self._body = bytearray()  # of an answer that is no stream of events
        self._outcome: tuple[int, bytes] | None = None  # of a download: the status, and the last line

    def _take(self, *, streams_events: bool) -> Callable[[bytes], None]:
        if not streams_events:
            return self._body.extend
        if self._streams:
            self._begin_stream()
            self._send(b'{"status":"pulling manifest"}\n')
        return self._translate

    def end(self, status: int) -> Ended:
        if self.has_begun:
            self._send(error_line("the download broke off") if self._outcome is None else self._outcome[1])
            self._end_stream()
            return Ended("ok", 200)
        if self._outcome is not None:
            status, body = self._outcome
        elif self._status == 200:
            status, body = (502, error_line("the download broke off")) if self._pulls else (200, b"")
        else:
            body = self._error(bytes(self._body))
        self._send_response(status, body)
        return Ended("ok", status)

    # --- a download

    def _translate(self, data: bytes) -> None:
        for event in self._events.complete(data).split(b"\n\n"):
            if event.startswith(EVENT):
                self._note(event[len(EVENT) :])

    def _note(self, event: bytes) -> None:
        seen = _read_event(event)
        if seen.event == "done":
            self._outcome = (200, _SUCCESS)
        elif seen.event == "error":
            failure = seen.error or _Failure()
            self._outcome = (failure.code, self._error(event))
        elif self._streams:
            self._send(self._progress(seen))

    def _progress(self, seen: _Event) -> bytes:
        """Clients know the bars of a download by their digests: this one is that of the name."""
        line = {
            "status": f"pulling {self._name}",
            "digest": f"sha256:{hashlib.sha256(self._name.encode()).hexdigest()}",
            "completed": seen.done_bytes,
        }
        if seen.total_bytes is not None:
            line["total"] = seen.total_bytes
        return _encode(line) + b"\n"

    def _error(self, body: bytes) -> bytes:
        sentence = error_text(body)
        if self._hides_paths:
            sentence = redact_paths(sentence, ()) or "it failed: llamasup's log says why"
        return error_line(sentence)
