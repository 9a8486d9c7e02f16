"""Recognises conversations: hashes of a prompt up to each message boundary, from the request body alone.

Two requests with the same beginning have the same first marks. A chat template may render different
conversations alike, or the other way round; an estimate of the prompt caches does not need more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct

BLOCK: Final = 1024
"""Characters between two marks in one text, so that questions about the same document share marks. Some 250
tokens, which cost little compared with the answer."""
FIRST_MARKS: Final = 64
LAST_MARKS: Final = 192
"""Marks in the middle are dropped. Other conversations share the first ones (system prompt, tools, a
document), and the turn before shares the last ones.
"""
MAX_OBJECTS: Final = 16_384
"""Opening braces in a body; one with more is not read. So many messages, parts and calls take 20 ms and 3 MB;
the ten million empty messages that 32 MiB can hold took 15 s and 2 GB."""
_PICTURE: Final = BLOCK  # the size of an image or a sound, which become some hundred tokens

_NOTHING: Final = msgspec.Raw()


class _Part(msgspec.Struct, gc=False):
    """A part of a message. Ignores other fields: ``cache_control`` moves from turn to turn."""

    text: str | None = None
    image_url: msgspec.Raw = _NOTHING
    input_audio: msgspec.Raw = _NOTHING
    source: msgspec.Raw = _NOTHING  # Anthropic's images and documents
    name: str | None = None  # of a tool
    input: msgspec.Raw = _NOTHING
    content: msgspec.Raw = _NOTHING  # a tool's result


class _Message(msgspec.Struct, gc=False):
    """One of ``messages``, or an item of a response's ``input``."""

    role: str | None = None
    content: str | list[_Part] | None = None
    tool_calls: msgspec.Raw = _NOTHING
    name: str | None = None
    arguments: str | None = None
    output: msgspec.Raw = _NOTHING


class _RequestBody(msgspec.Struct, gc=False):
    messages: list[_Message] | None = None
    input: str | list[_Message] | None = None
    system: str | list[_Part] | None = None
    instructions: str | None = None
    tools: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    input_prefix: msgspec.Raw = _NOTHING


_read = msgspec.json.Decoder(_RequestBody).decode


class Conversation(Struct, frozen=True):
    """``marks[i]`` is the hash of about the first ``sizes[i]`` of ``size`` characters. Python keys its hashes
    per process: clients cannot make collisions.
    """

    marks: tuple[int, ...]
    sizes: tuple[int, ...]
    size: int


def read_conversation(body: bytes) -> Conversation | None:
    """For chat completions, messages, responses, completions and infill; None without a recognisable
    prompt.
    """
    if body.count(b"{") > MAX_OBJECTS:
        return None
    try:
        request = _read(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    marker = _Marker()
    items = request.messages if request.messages is not None else request.input
    if items is None:
        marker.text(_json(request.prompt) or _json(request.input_prefix))
    else:
        # Templates put the system prompt and the tools first, in any order.
        marker.parts(request.system)
        marker.text(request.instructions or "")
        marker.text(_json(request.tools))
        marker.end("")
        for message in (_Message("user", items),) if isinstance(items, str) else items:
            marker.message(message)
    return marker.conversation()


class _Marker:
    """Collects the marks of a request."""

    def __init__(self) -> None:
        self._mark = 0
        self._size = 0
        self._marks: list[tuple[int, int]] = []

    def message(self, message: _Message) -> None:
        self.parts(message.content)
        for json in (message.tool_calls, message.output):
            self.text(_json(json))
        self.text(message.arguments or "")
        self.end(f"{message.role}/{message.name}")

    def parts(self, content: str | Iterable[_Part] | None) -> None:
        """A text is equal to a list with one text part."""
        if isinstance(content, str):
            self.text(content)
            return
        for part in content or ():
            self.text(part.text or "")
            for picture in (part.image_url, part.input_audio, part.source):
                if given := _json(picture):
                    self._add(given, _PICTURE)
            self.text(part.name or "")
            for json in (part.input, part.content):
                self.text(_json(json))

    def text(self, text: str | bytes) -> None:
        for at in range(0, len(text), BLOCK):
            piece = text[at : at + BLOCK]
            self._add(piece, len(piece))
            if len(piece) == BLOCK:
                self._marks.append((self._mark, self._size))

    def end(self, what: str) -> None:
        """Mark the end of a message or section; no mark before the first text."""
        if self._size:
            self._add(what, 0)
            self._marks.append((self._mark, self._size))

    def conversation(self) -> Conversation | None:
        marks = self._marks
        if len(marks) > FIRST_MARKS + LAST_MARKS:
            marks = marks[:FIRST_MARKS] + marks[-LAST_MARKS:]
        if not marks:
            return None
        return Conversation(tuple(mark for mark, _ in marks), tuple(size for _, size in marks), self._size)

    def _add(self, piece: str | bytes, size: int) -> None:
        self._mark = hash((self._mark, piece))
        self._size += size


def _json(raw: msgspec.Raw) -> bytes:
    """The raw JSON; empty for ``null`` and a missing field."""
    text = bytes(raw)
    return b"" if text == b"null" else text
