"""Reads the lines of a batch: OpenAI's format for batch files, or prompts that a template completes (pure).

A file is read line by line, and never held whole. ``prefix_key`` orders the lines of a model by their shared
beginning: llama-server computes a common system prompt once in each slot, and finds it there for the next
line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from string import Template
from typing import Any, BinaryIO, Final

import msgspec
from msgspec import Struct

from llamasup.core.pool.replicas.conversation import read_conversation
from llamasup.core.system.text import INVALID_JSON

MAX_LINE_BYTES: Final = 50_000_000
"""A longer line is a mistake. A batch holds at most one line for each request in flight, and the proxy
refuses bodies above its own limit, which is smaller by default."""
MAX_ID: Final = 512
"""Characters of a ``custom_id``. OpenAI documents no limit; ids of clients have some tens."""

URLS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/responses",
    "/v1/messages",
)
_BOM: Final = b"\xef\xbb\xbf"
_SKIP_BYTES: Final = 1 << 20


class RawLine(Struct, frozen=True):
    """A line of the input. ``number`` counts from 1. ``text`` is None if the line is too long; ``size`` is
    its length.
    """

    number: int
    offset: int
    size: int
    text: bytes | None


class BatchLine(Struct, frozen=True):
    """The request of a line. ``body`` is the JSON object as it is in the line. ``model`` is empty if it names
    none.
    """

    custom_id: str
    url: str
    body: bytes
    model: str


class _Line(Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(Struct):
    model: str | None = None
    stream: bool | None = None


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(_Body).decode


def raw_lines(file: BinaryIO, most_bytes: int = MAX_LINE_BYTES) -> Iterator[RawLine]:
    """Return the lines that are not blank, without their ends, and without a byte order mark at the
    beginning.
    """
    offset = number = 0
    while piece := file.readline(most_bytes + 2):  # room for CRLF
        number += 1
        begin, size = offset, len(piece)
        text: bytes | None = piece.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1 and piece.startswith(_BOM) and text is not None:
            text = text[len(_BOM) :]
            begin += len(_BOM)
        if text is not None and len(text) > most_bytes:
            text = None
            while not piece.endswith(b"\n") and (piece := file.readline(_SKIP_BYTES)):
                size += len(piece)
        offset += size
        if text is None or text.strip():
            yield RawLine(number, begin, size if text is None else len(text), text)


def read_line(text: bytes) -> BatchLine | str:
    """Read the request of one line, or return what is wrong with the line."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start + 1}: 0x{text[error.start]:02x}"
    try:
        line = _decode_line(text)
    except INVALID_JSON as error:
        return _invalid(error, text)
    if not 0 < len(line.custom_id) <= MAX_ID:
        return f"custom_id has {len(line.custom_id)} characters; it must have 1 to {MAX_ID}"
    if line.method != "POST":
        return f"method is {line.method[:40]!r}; it must be 'POST'"
    if line.url not in URLS:
        return f"url is {line.url[:100]!r}; it must be one of {', '.join(URLS)}"
    body = bytes(line.body)
    if not body.startswith(b"{"):
        return "body is not a JSON object"
    try:
        asked = _decode_body(body)
        msgspec.json.decode(body)  # all of it: a number may be out of range
    except INVALID_JSON as error:
        return f"body: {error}"
    if asked.stream:
        return "body has stream: true, which a batch cannot return"
    return BatchLine(line.custom_id, line.url, body, asked.model or "")


def _invalid(error: Exception, text: bytes) -> str:
    if isinstance(error, msgspec.ValidationError):
        return str(error).replace("Object missing required field", "missing field")
    return f"invalid JSON: {error}" if text.lstrip().startswith(b"{") else "the line is not a JSON object"


# --- prompts


class TemplateInvalid(ValueError):
    """The template is not a JSON object, or names a field in a wrong way."""


class PromptTemplate(Struct, frozen=True):
    """The body of each request, in which ``$field`` stands for a field of the line."""

    url: str
    body: dict[str, Any]

    def fill(self, text: bytes, number: int) -> bytes:
        """Return the line in the batch format. Raises TemplateInvalid with what is wrong with the line.

        A line is a JSON string (then its field is ``prompt``) or an object. Its ``custom_id`` is the field of
        that name, or ``line-N``.
        """
        try:
            given = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TemplateInvalid(f"invalid JSON: {error}") from None
        fields = {"prompt": given} if isinstance(given, str) else given
        if not isinstance(fields, dict):
            raise TemplateInvalid("the line is neither a string nor an object")
        custom_id = fields.get("custom_id", f"line-{number}")
        if not isinstance(custom_id, str):
            raise TemplateInvalid("custom_id is not a string")
        body = _filled(self.body, fields)
        return msgspec.json.encode({"custom_id": custom_id, "url": self.url, "body": body})


_PROMPT_FIELDS: Final = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/v1/responses": "input"}


def template_of(text: str | None, url: str) -> PromptTemplate:
    """Return the template of a file's text; None: the usual one of the URL. Raises TemplateInvalid."""
    if text is None:
        field = _PROMPT_FIELDS.get(url)
        chat = {"messages": [{"role": "user", "content": "$prompt"}]}
        body: Any = chat if field is None else {field: "$prompt"}
        return PromptTemplate(url, body)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TemplateInvalid(f"invalid JSON: {error}") from None
    if not isinstance(body, dict):
        raise TemplateInvalid("it is not a JSON object")
    return PromptTemplate(url, body)


def _filled(value: Any, fields: dict[str, Any]) -> Any:
    if isinstance(value, str):
        return _filled_text(value, fields)
    if isinstance(value, list):
        return [_filled(item, fields) for item in value]
    if isinstance(value, dict):
        return {key: _filled(item, fields) for key, item in value.items()}
    return value


def _filled_text(text: str, fields: dict[str, Any]) -> Any:
    if text.startswith("$") and text[1:] in fields:
        return fields[text[1:]]  # also a number or a list
    try:
        return Template(text).substitute(fields)
    except KeyError as error:
        raise TemplateInvalid(f"the template needs the field {error.args[0]!r}") from None
    except ValueError as error:
        raise TemplateInvalid(
            f"the template has an invalid $: {error} (write $$ for a dollar sign)"
        ) from None


# --- the order of the lines of a model

MAX_MARKS: Final = 16
"""Marks of a prompt that are compared: its first messages, or its first 16 KiB."""
_MARK_BYTES: Final = 4
_MASK: Final = (1 << (8 * _MARK_BYTES)) - 1


def prefix_key(body: bytes) -> bytes:
    """Return a key that begins like those of lines with the same beginning. Only for one process: hashes are
    keyed.
    """
    conversation = read_conversation(body)
    if conversation is None:
        return b""
    return b"".join((mark & _MASK).to_bytes(_MARK_BYTES, "big") for mark in conversation.marks[:MAX_MARKS])
