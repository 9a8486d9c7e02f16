"""The model that a request names (in its body, query or path), and the number of its jobs.

**Models.** The name is read as llama.cpp's own router reads it (b11434): of two ``model`` the last counts, in
a body and in a query; a value that is empty or not a string is no name. The router reads the name of a POST
only from its body; llamasup then also tries the query.

A name is the client's text, neither checked nor bounded, and must never be logged.

**Jobs.** A job is a task that llama-server puts into its own slot: each prompt of an array, each text to
embed, each document to rank, each question; and each of them ``n`` times. An array with an integer in it is
one prompt, of token ids (b11434). If a body cannot be counted exactly, the number errs towards more.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote, unquote, unquote_plus

import msgspec

from llamasup.core.http.body_scan import MANY_JOBS, scanned, times

MAX_DELIMITER: Final = 128  # bytes; RFC 2046 allows 72 and its line's end
MAX_PART_HEAD: Final = 4096  # bytes: two lines, with a file's name in one of them
MAX_NAME: Final = 1024  # bytes of a form's field; no model has a name of a quarter of that
MAX_PARTS: Final = 64  # of a form; a transcription has a dozen fields


class BodyTooDeep(Exception):
    """A JSON body nested more than about 1,000 deep, which llama-server would read and llamasup cannot."""


_ABSENT: Final = msgspec.Raw(b"")
_UNREADABLE = (msgspec.MsgspecError, ValueError)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# --- jobs ------------------------------------------------------------------------------------------

FORMS_ONLY: Final = ("/audio/transcriptions", "/v1/audio/transcriptions")
"""Routes that take a form with one file: one job."""
LISTS: Final = ("prompt", "input", "content", "documents", "texts", "questions")
"""The fields whose items are jobs on some route."""
PROMPTS: Final = ("prompt",)
"""The fields of a route that reports the prompt tokens of each item, or only of the first."""
_LISTS: dict[str, tuple[str, ...]] = dict.fromkeys(
    # No list: the messages make one prompt. But ``n`` counts.
    [
        "/chat/completions",
        "/v1/chat/completions",
        "/responses",
        "/v1/responses",
        "/v1/messages",
        "/infill",
        *FORMS_ONLY,
    ],
    (),
)
_LISTS |= dict.fromkeys(("/completion", "/completions", "/v1/completions"), PROMPTS)
_LISTS |= dict.fromkeys(("/embedding", "/embeddings", "/v1/embeddings"), ("input", "content"))
_LISTS |= dict.fromkeys(("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), ("documents", "texts"))

_COUNTED: Final = 256  # items that are examined one by one
_few_items = msgspec.json.Decoder(
    msgspec.defstruct(
        "_Few", [(f"item_{at}", msgspec.Raw, _ABSENT) for at in range(_COUNTED)], array_like=True
    )
).decode
_begins_with_number = re.compile(rb"\[[ \t\r\n]*[-0-9]").match


def lists_of(label: str) -> tuple[str, ...]:
    """Return the fields whose items are jobs on this route; for an unknown route, all of them."""
    return _LISTS.get(label, LISTS)


class _Shape:
    """Decodes the bodies of some routes: ``model``, the lists, and ``n``; skips everything else."""

    __slots__ = ("lists", "read", "read_anything")

    def __init__(self, lists: tuple[str, ...]) -> None:
        raw = [(name, msgspec.Raw, _ABSENT) for name in ("n", "n_cmpl", *lists)]
        named = msgspec.defstruct("_Named", [("model", str | None, None), *raw])
        anything = msgspec.defstruct("_Anything", [("model", msgspec.Raw, _ABSENT), *raw])
        self.lists = lists
        self.read: Callable[[bytes], Any] = msgspec.json.Decoder(named).decode
        self.read_anything: Callable[[bytes], Any] = msgspec.json.Decoder(anything).decode

    def jobs(self, asked: Any) -> int:
        items = 1
        for name in self.lists:
            raw = getattr(asked, name)
            if raw is not _ABSENT:
                items = max(items, _scanned_items(raw, b"questions") if name == "questions" else _items(raw))
        if asked.n is not _ABSENT or asked.n_cmpl is not _ABSENT:
            items *= max(times(bytes(asked.n)), times(bytes(asked.n_cmpl)))
        return min(items, MANY_JOBS)


_SHAPES = {lists: _Shape(lists) for lists in {(), LISTS, *_LISTS.values()}}
_SHAPE_OF = {label: _SHAPES[lists] for label, lists in _LISTS.items()}
_ANY_SHAPE = _SHAPES[LISTS]


def _items(raw: msgspec.Raw) -> int:
    """The items of a list; any other value is one job. Beyond ``_COUNTED`` items, a scan counts them."""
    if memoryview(raw)[0] != 0x5B or _begins_with_number(raw):
        return 1
    count = 0
    for count, item in enumerate(msgspec.structs.astuple(_few_items(raw))):
        if item is _ABSENT:
            return max(1, count)
        if memoryview(item)[0] in b"0123456789-":
            return 1
    return _scanned_items(raw, b"prompt")


def _scanned_items(raw: msgspec.Raw, name: bytes) -> int:
    return scanned(b'{"%b":%b}' % (name, bytes(raw)), (name,)).jobs


# --- bodies ----------------------------------------------------------------------------------------


def read_body(body: bytes, query: bytes, label: str) -> tuple[str | None, int]:
    """Return the model that a JSON body or a form names, or else the query, and the number of jobs on the
    route of this label. llama-server refuses bodies that are neither JSON nor a form. Raises BodyTooDeep.

    Costs 0.4 µs for a small body, 10 µs with an array of prompts; 5 ms for 32 MiB with an image, 17 ms with
    token ids, and 0.13 s in the worst known case: ten million empty lists before a model that is a number.
    """
    name, jobs = None, 1
    if body:
        shape = _SHAPE_OF.get(label, _ANY_SHAPE)
        try:
            asked = shape.read(body)
            name = asked.model
            if shape.lists or asked.n is not _ABSENT or asked.n_cmpl is not _ABSENT:
                jobs = shape.jobs(asked)
        except msgspec.ValidationError:
            name, jobs = _last_name(body, shape)
        except RecursionError:
            raise BodyTooDeep from None
        except _UNREADABLE:
            plain = plain_json(body)
            if len(plain) < len(body):
                name, jobs = _last_name(plain, shape)
            else:
                if body.startswith(b"--") and (place := _model_in_form(body)) is not None:
                    name = body[place].decode("utf-8", "replace")
                if label not in FORMS_ONLY:
                    jobs = scanned(body, (field.encode() for field in shape.lists)).jobs
    if not name and query:
        name = _named_in_query(query)
    return name or None, jobs


def plain_json(body: bytes) -> bytes:
    """Drop what llama-server skips: a byte order mark, and NULs at the end, where it stops reading."""
    return body.removeprefix(_BYTE_ORDER_MARK).rstrip(b"\0")


def _last_name(body: bytes, shape: _Shape) -> tuple[str | None, int]:
    """The last ``model``, if it is a string, and the jobs. For bodies in which an earlier ``model`` is not a
    string, or that begin with a byte order mark.
    """
    try:
        asked = shape.read_anything(body)
        jobs = shape.jobs(asked)
    except RecursionError:
        raise BodyTooDeep from None
    except _UNREADABLE:
        return None, scanned(body, (field.encode() for field in shape.lists)).jobs
    try:
        return msgspec.json.decode(asked.model, type=str), jobs
    except _UNREADABLE:
        return None, jobs


# --- forms -----------------------------------------------------------------------------------------

_NAME = re.compile(
    rb'^content-disposition:[ \t]*form-data[ \t]*;.*?\bname=(?:"([^"]*)"|([^\s;"]+))', re.IGNORECASE | re.M
)
_FILE_NAME = re.compile(rb"^content-disposition:[^\r\n]*;[ \t]*filename\*?=", re.IGNORECASE | re.M)


def renamed_form(body: bytes, name: str) -> bytes:
    """Return the form with this model, if it names one."""
    found = _model_in_form(body)
    return body if found is None else body[: found.start] + name.encode() + body[found.stop :]


def _model_in_form(body: bytes) -> slice | None:
    """The place of the first field ``model`` of ``multipart/form-data`` (RFC 7578).

    The delimiter is the first line of the body. If the Content-Type has another one, llama-server finds no
    field and refuses the request. Parts are not copied: 2 to 13 ms for 32 MiB.
    """
    at = body.find(b"\r\n", 0, MAX_DELIMITER)
    if at < 0:
        return None
    delimiter = b"\r\n" + body[:at]
    for _ in range(MAX_PARTS):
        head_end = body.find(b"\r\n\r\n", at, at + MAX_PART_HEAD)
        if head_end < 0:  # the end of the last part, or no head
            return None
        head = body[at:head_end]
        begin = head_end + 4
        name = _NAME.search(head)
        if name is not None and b"model" in name.groups() and not _FILE_NAME.search(head):
            end = body.find(delimiter, begin, begin + MAX_NAME + len(delimiter))
            return None if end < 0 else slice(begin, end)
        end = body.find(delimiter, begin)
        if end < 0:
            return None
        at = end + len(delimiter)
    return None


# --- targets ---------------------------------------------------------------------------------------


def _named_in_query(query: bytes) -> str | None:
    """The last ``model=`` of a raw query."""
    name = None
    for pair in query.split(b"&"):
        if pair.startswith(b"model="):
            name = unquote_plus(pair[6:].decode("latin-1"))
    return name or None


def autoload_of(query: bytes) -> bool | None:
    """Return the first ``autoload=`` of a raw query, as llama.cpp's router reads it; None without one."""
    for pair in query.split(b"&"):
        if pair.startswith(b"autoload="):
            return pair[9:] in (b"true", b"1") if pair[9:] else None
    return None


def renamed_query(query: bytes, name: str) -> bytes:
    """Return the raw query with this model, if it names one."""
    pairs = query.split(b"&")
    own = b"model=" + quote(name, safe="/:@").encode()
    return b"&".join(own if pair.startswith(b"model=") else pair for pair in pairs)


def named_in_path(path: bytes) -> str | None:
    """Return ``{id}`` of a raw path ``/v1/models/{id}`` or ``/models/{id}``, decoded.

    It may contain slashes.
    """
    _, found, name = path.partition(b"/models/")
    return (unquote(name.decode("latin-1")) or None) if found else None
