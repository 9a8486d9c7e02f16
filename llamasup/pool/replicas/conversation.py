"""What a request continues: hashes of its prompt up to each of its boundaries, from its body alone.

Two requests that begin alike have the same first marks. Says nothing of tokens: a chat template may render
two conversations alike that differ here, or the other way round; it is good enough to guess whose prompt
cache holds the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

__all__ = ["BLOCK", "FIRST_MARKS", "LAST_MARKS", "MAX_OBJECTS", "Conversation", "read_conversation"]

BLOCK: Final = 1024
"""Letters between two marks within one text, so that questions about the same document share its marks. Some
250 tokens: what less than that costs to compute again is little beside the answer."""
FIRST_MARKS: Final = 64
LAST_MARKS: Final = 192
"""Of more marks, those in the middle are left out. The first ones are shared with other conversations (system
prompt, tools, a document), the last ones with the turn before: it ended a few messages ago."""
MAX_OBJECTS: Final = 16_384
"""Opening braces in a body; one with more is not read. No conversation has so many messages, parts and calls.
So many take 20 ms and 3 MB; the ten million empty messages that 32 MiB can hold took 15 s and 2 GB."""
_PICTURE: Final = BLOCK  # of an image or a sound, whatever its bytes: they become some hundred tokens

_NOTHING: Final = msgspec.Raw()


class _Part(msgspec.Struct, gc=False):
    """A piece of a message. What is not named here is left out: ``cache_control`` moves from turn to turn."""

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


class _Asked(msgspec.Struct, gc=False):
    messages: list[_Message] | None = None
    input: str | list[_Message] | None = None
    system: str | list[_Part] | None = None
    instructions: str | None = None
    tools: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    input_prefix: msgspec.Raw = _NOTHING


_read = msgspec.json.Decoder(_Asked).decode


@dataclass(frozen=True, slots=True)
class Conversation:
    """``marks[i]`` is the hash of the first ``sizes[i]`` letters or so, of ``size`` in all. Hashes are those
    of this process, keyed: nobody outside can make two that are alike.
    """

    marks: tuple[int, ...]
    sizes: tuple[int, ...]
    size: int


def read_conversation(body: bytes) -> Conversation | None:
    """Of chat completions, messages, responses, completions and infill; None: there is nothing to go by."""
    if body.count(b"{") > MAX_OBJECTS:
        return None
    try:
        asked = _read(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    trail = _Trail()
    items = asked.messages if asked.messages is not None else asked.input
    if items is None:
        trail.text(_json(asked.prompt) or _json(asked.input_prefix))
    else:
        # As templates have it: system prompt and tools come first, in whatever order.
        trail.parts(asked.system)
        trail.text(asked.instructions or "")
        trail.text(_json(asked.tools))
        trail.end("")
        for message in (_Message("user", items),) if isinstance(items, str) else items:
            trail.message(message)
    return trail.conversation()


class _Trail:
    """Marks, as they are made on the way through a request."""

    __slots__ = ("_mark", "_marks", "_size")

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
        """A text means the same as a list with one part that holds it."""
        if isinstance(content, str):
            self.text(content)
            return
        for part in content or ():
            self.text(part.text or "")
            for picture in (part.image_url, part.input_audio, part.source):
                self._picture(picture)
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
        """Of something that is whole; of nothing at all there is no mark."""
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

    def _picture(self, picture: msgspec.Raw) -> None:
        if given := _json(picture):
            self._add(given, _PICTURE)

    def _add(self, piece: str | bytes, size: int) -> None:
        self._mark = hash((self._mark, piece))
        self._size += size


def _json(raw: msgspec.Raw) -> bytes:
    """As it came; of ``null`` and of what is not there, nothing."""
    text = bytes(raw)
    return b"" if text == b"null" else text
