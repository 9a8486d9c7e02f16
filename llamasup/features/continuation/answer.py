"""Reads what a client has received of a streamed answer, as events (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from llamasup.core.http.sse import FRAMING

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class NotContinued(Exception):
    """The answer cannot be continued. The message is the reason, for the client and the log."""


class Event(msgspec.Struct, frozen=True):
    """A server-sent event. ``name``: of its ``event`` field, or empty. ``data``: decoded JSON, or text."""

    name: str
    data: Any

    def encoded(self) -> bytes:
        data = self.data.encode() if isinstance(self.data, str) else _encode(self.data)
        named = b"event: %b\n" % self.name.encode() if self.name else b""
        return b"%bdata: %b\n\n" % (named, data)


def events_in(answer: bytes) -> Iterator[Event]:
    """The events of a body that ends with a whole event; it may have the framing of chunks.

    Raises NotContinued if the data of an event is not JSON.
    """
    for block in FRAMING.sub(b"", b"\r\n" + answer).split(b"\n\n"):
        if (event := event_of(block)) is not None:
            yield event


def event_of(block: bytes) -> Event | None:
    """The event of these lines; None if they have no data: a comment. Raises NotContinued."""
    name, data = "", None
    for line in block.split(b"\n"):
        field, _, rest = line.partition(b": ")
        if field == b"event":
            name = rest.decode("utf-8", "replace")
        elif field == b"data":
            data = rest
    return None if data is None else Event(name, _data(data))


def _data(text: bytes) -> Any:
    if text == b"[DONE]":
        return text.decode()
    try:
        return _decode(text)
    except msgspec.DecodeError:
        raise NotContinued("an event of the stream is not JSON") from None


class Sent(msgspec.Struct):
    """The answer so far, which the client has.

    ``opening``: the data of the first event of each name or kind, by which the stream is recognized.
    ``pieces``: its tokens, as far as they are known: the events with text. Such an event has more tokens if
    llama-server held text back until a character was whole, or a stop string excluded. ``is_counted``: the
    stream itself has counted them. ``tokens``: those of ``text``, if the stream has them all.
    """

    opening: dict[str, Any] = {}
    text: str = ""
    reasoning: str = ""
    tokens: list[int] = []
    pieces: int = 0
    is_counted: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no text has arrived, so that the first request is to be sent again."""
        return not (self.text or self.reasoning)


class Prefix:
    """Removes the text that the client already has from the beginning of the new stream.

    Some builds repeat it, in their first event with text (b11434). Others do not (xllamacpp 2026.10).
    """

    def __init__(self, had: str) -> None:
        self._had = had
        self.is_repeated = False

    def beyond(self, text: str) -> str:
        """The new part of ``text``. Raises NotContinued if it repeats something else."""
        if not (self.is_repeated and self._had and text):
            return text
        had, self._had = self._had, ""
        if not text.startswith(had):
            raise NotContinued("llama-server reads the begun answer in another way")
        return text[len(had) :]
