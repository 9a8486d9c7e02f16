"""Reads the pieces of a streamed answer, and says what they cost (pure)."""

from __future__ import annotations

import re
import unicodedata
from typing import Any, Final

import msgspec
from msgspec import Struct

from llamasup.core.system.text import INVALID_JSON
from llamasup.errors import ControlFailed

_DATA: Final = "data:"
_MOVES_THE_CURSOR: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


class Delta(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(Struct, frozen=True):
    delta: Delta = Delta()
    finish_reason: str | None = None


class PromptDetails(Struct, frozen=True):
    cached_tokens: int = 0


class Usage(Struct, frozen=True):
    """Tokens of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Timings(Struct, frozen=True):
    predicted_per_second: float | None = None


class Chunk(Struct, frozen=True):
    """A chunk of a streamed chat completion. ``error`` is the object of an error that ends the stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    timings: Timings | None = None
    error: dict[str, Any] | None = None


class Cost(Struct):
    """Sums up what an answer has cost, and why it ended (``length``: at a limit of tokens)."""

    usage: Usage | None = None
    tokens_per_s: float | None = None
    finish_reason: str | None = None

    def add(self, chunk: Chunk) -> None:
        self.usage = chunk.usage or self.usage
        if chunk.timings is not None:
            self.tokens_per_s = chunk.timings.predicted_per_second
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason

    def text(self, context: int | None) -> str:
        """Return the cost in one line of text. ``context``: tokens of one request, if known."""
        if self.usage is None:
            return ""
        used = self.usage.prompt_tokens + self.usage.completion_tokens
        parts = [f"{self.usage.completion_tokens} tokens"]
        if self.tokens_per_s:
            parts.append(f"{self.tokens_per_s:.1f} tok/s")
        details = self.usage.prompt_tokens_details
        if details is not None and details.cached_tokens:
            parts.append(f"{details.cached_tokens} of {self.usage.prompt_tokens} prompt tokens cached")
        if context:
            parts.append(f"context {used:,} of {context:,}")
        if self.finish_reason == "length":
            parts.append("stopped at the limit of tokens")
        return " · ".join(parts)


_decode: Final = msgspec.json.Decoder(Chunk).decode


def chunk_of(line: str) -> Chunk | None:
    """Return the chunk in one line of the stream; None for comments, blank lines and the end mark.

    Raises ControlFailed for anything else, for example if another program answers.
    """
    if not line.startswith(_DATA):
        return None
    data = line.removeprefix(_DATA).strip()
    if data in ("", "[DONE]"):
        return None
    try:
        return _decode(data)
    except INVALID_JSON as error:
        raise ControlFailed(
            f"The answer has an event that is no chunk of a chat completion: {error}.",
            remedy="Check that the address is that of a llamasup.",
        ) from None


def safe(text: str) -> str:
    """Return an answer's text without the characters that could move the cursor or change the terminal."""
    return _MOVES_THE_CURSOR.sub(lambda found: _shown(found[0]), text)


def _shown(letter: str) -> str:
    return "" if letter == "\r" else "\ufffd" if unicodedata.category(letter) != "Cf" else ""
