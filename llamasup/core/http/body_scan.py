"""Scans a JSON body, or a form, that arrives in pieces, without keeping it.

The scan finds two facts: how many jobs llama-server starts for the body, and which of its strings
llama-server would fetch as URLs. It reads both as llama-server (b11434) does. If a key is duplicate, the
value with more jobs is used. The scan does not validate: llama-server refuses invalid bodies itself.

Regular expressions skip strings and arrays of numbers. Every other token costs a step in Python, and the
number of steps is limited: a body with more tokens, or with deeper nesting, is ``unclear``.

``refused_media`` decides which of the URLs llama-server may fetch (X7). llama-server takes every string that
begins with ``http`` for a URL, and parses it by its own rules: the text before an ``@``, anywhere in the URL,
is a user, so it fetches ``http://good.example/@bad.example/`` from bad.example. Only URLs that all parsers
read in the same way are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import ceil
from typing import Final

import msgspec

from llamasup.core.http.heads import HttpError

MANY_JOBS: Final = 1 << 20
"""The number of jobs of a body that cannot be counted. No server has so many slots."""
MAX_STEPS: Final = 100_000  # 0.1 s in total; 8,000 messages of a chat whose contents are arrays
MAX_DEPTH: Final = 512
_SMALL: Final = 1 << 18
"""Bytes of a body that takes a few milliseconds, whatever is in it."""
WINDOW: Final = 1 << 16  # bytes per match: the memory of a regular expression grows with them
_MAX_KEY: Final = 128  # raw bytes; the longest relevant name has 66, with every letter escaped
_MAX_URL: Final = 8192  # raw bytes
_MAX_NUMBER: Final = 64  # digits of ``n``; longer numbers count as MANY_JOBS
_MAX_FOUND: Final = 64  # different URLs

_OUTSIDE = re.compile(rb'[^"\[\]{}]*').match
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL).match
_CONTENT = re.compile(rb"[^\s,\]]").search
_DIGIT = re.compile(rb"[0-9]").search
_MAX_LINE: Final = 4096  # bytes of a line in the head of a form's part
_DISPOSITION = re.compile(rb"\r\n(?i:content-disposition:)").finditer
# A field whose name is plain. Any other spelling counts as the name of a list.
_FIELD = re.compile(
    rb'[ \t]*form-data[ \t]*;[ \t]*name=("?)([\w.\[\]-]+)\1'
    rb'(?:[ \t]*;[ \t]*filename\*?=(?:"[^"\r\n]*"|[^";\r\n]*))*[ \t]*',
    re.IGNORECASE,
).fullmatch
_NOT_A_NUMBER = b": \t\r\n"

# The first four characters of a string that may be a URL for llama-server (b11434: it begins with "http").
_begins_with_http = re.compile(rb"(?:h|\\u0068)(?:t|\\u0074){2}(?:p|\\u0070)").match
_escaped_letter = re.compile(rb"\\u00(?:68|7[04])").search  # h, t or p, which never need an escape
_OVERLAP: Final = 5  # length of the longest match of these, minus one

_TIMES = (b"n", b"n_cmpl")
# An object under one of these keys holds ``url`` or ``data``; ``image_url`` may be the URL itself.
_MEDIA = frozenset(
    {b"image_url", b"input_image", b"input_audio", b"audio_url", b"input_video", b"video_url", b"source"}
)
_URL_KEYS = frozenset({b"url", b"data"})
# The values of these keys go to the model as text: tools, schemas, the arguments of a tool.
_TEXT_ON_TOP = frozenset({b"tools", b"functions", b"response_format", b"json_schema", b"metadata"})
_TEXT_WITHIN = frozenset({b"input", b"arguments"})

_QUOTE, _BACKSLASH = b'"\\'
_OPENS, _CLOSES, _OBJECT = b"[{", b"]}", 0x7B


class BodyScan(msgspec.Struct, eq=False):
    """Scan of a body. ``lists``: top-level fields whose items are jobs. ``urls``: whether to find URLs.
    ``most_steps``: a body with more tokens is unclear.
    """

    lists: Iterable[bytes] = ()
    urls: bool = False
    most_steps: int = MAX_STEPS
    unclear: bool = False  # too many tokens, or nested too deeply
    suspect: bool = False  # some string in the body may be a URL
    remote: list[str | None] = []  # URLs that llama-server would fetch; None: an unreadable one
    _lists: frozenset[bytes] = frozenset()
    _steps: int = 0
    _end: bytes = b""  # the last bytes of the previous piece
    _opening: bytes = b""  # the first two bytes of the body
    # State of a form.
    _fields: int = 0  # whose names may be those of lists
    _line: bytes = b""  # the begin of a line of a part's head that is not complete
    # For each open array and object, outermost first: its key, and whether it is an object.
    _keys: list[bytes] = []
    _is_object: list[bool] = []
    _key: bytes = b""  # the last key that was read
    _is_value: bool = False  # the next token is the value of ``_key``
    _text_from: int = 0  # the depth at which text for the model begins; 0: not inside it
    # State of the current string.
    _in_string: bool = False
    _escape: bool = False  # the last piece ended with a backslash
    _keep: int = 0  # how many of its bytes to keep
    _kept: bytes = b""
    _overlong: bool = False
    # State of the array or object whose items are counted.
    _counts: bool = False
    _commas: int = 0
    _content: bool = False
    _integers: bool = False
    _items: int = 1  # the highest count so far
    # The digits of ``n``; None: the current value is not ``n``.
    _number: bytes | None = None
    _times: int = 1

    def __post_init__(self) -> None:
        self._lists = frozenset(self.lists)

    @property
    def jobs(self) -> int:
        if self.unclear:
            return MANY_JOBS
        items = max(self._items, self._fields) if self._lists else 1
        return min(items * self._times, MANY_JOBS)

    def feed(self, piece: bytes) -> None:
        before, head = self._end, piece[:_OVERLAP]
        if self.urls and not self.suspect:
            self.suspect = may_hold_url(piece) or may_hold_url(before + head)
        if self._lists:
            self._find_fields(piece)
        if len(self._opening) < 2:
            self._opening = (self._opening + piece)[:2]
        self._end = (before + piece if len(piece) < _OVERLAP else piece)[-_OVERLAP:]
        if self._opening == b"--":  # a form: its values are text, and its files may be anything
            return
        for begin in range(0, len(piece), WINDOW):
            if self.unclear:
                return
            self._read(piece[begin : begin + WINDOW])

    def _find_fields(self, piece: bytes) -> None:
        """Count the fields of a form (b11434: fields of one name become an array). No JSON has such a line.

        Also before a form's first delimiter, and whatever its delimiter is: a field needs this line.
        """
        text = self._line + piece if self._line else piece
        self._line = b""
        for found in _DISPOSITION(text):
            self._steps += 1
            begin = found.end()
            end = text.find(b"\r\n", begin, begin + _MAX_LINE)
            if end < 0 and len(text) - begin < _MAX_LINE:
                self._line = text[found.start() :]
                return
            field = _FIELD(text, begin, end) if end >= 0 else None
            self._fields += field is None or field[2] in self._lists
        if self._steps > self.most_steps:
            self.unclear = True
        tail = text[1 - len(b"\r\ncontent-disposition:") :]
        at = tail.find(b"\r")
        if at >= 0:
            self._line = tail[at:]

    def _read(self, piece: bytes) -> None:
        at, size = 0, len(piece)
        while at < size:
            if self._in_string:
                at = self._string(piece, at)
                continue
            end = _OUTSIDE(piece, at).end()  # type: ignore[union-attr]  # it always matches, also an empty string
            if end > at and self._keys:
                self._between(piece, at, end)
            if end == size:
                return
            self._steps += 1
            if self._steps > self.most_steps:
                self.unclear = True
                return
            byte, at = piece[end], end + 1
            if byte == _QUOTE:
                self._begin_string()
            elif byte in _OPENS:
                self._open(byte == _OBJECT)
                if self.unclear:
                    return
            elif self._keys:
                self._close()

    # --- strings

    def _begin_string(self) -> None:
        self._in_string = True
        self._kept = b""
        self._overlong = False
        if self._counts and len(self._keys) == 2:
            self._content = True
        if self._keys and self._is_object[-1] and not self._is_value:
            self._keep = _MAX_KEY
            return
        self._number = None
        self._keep = _MAX_URL if self.urls and self._is_media() else 0

    def _string(self, piece: bytes, at: int) -> int:
        """Read more of a string. Returns the position behind it."""
        begin = at
        if self._escape:
            at += 1
            self._escape = False
        end = _INSIDE(piece, at).end()  # type: ignore[union-attr]  # it always matches, also an empty string
        size = len(piece)
        closed = end < size and piece[end] == _QUOTE
        self._escape = end < size and not closed
        if self._keep:
            room = self._keep - len(self._kept)
            text = piece[begin : end if closed else size]
            self._overlong |= len(text) > room
            self._kept += text[:room]
        if not closed:
            return size
        self._in_string = False
        if self._keep:
            self._end_string()
        return end + 1

    def _end_string(self) -> None:
        if self._is_value:
            if _begins_with_http(self._kept) and len(self.remote) < _MAX_FOUND:
                url = None if self._overlong else _decoded(self._kept)
                if url not in self.remote:
                    self.remote.append(url)
            return
        self._key = b"" if self._overlong else self._kept
        if b"\\" in self._key:
            self._key = (_decoded(self._key) or "").encode("utf-8", "replace")
        self._number = b"" if len(self._keys) == 1 and self._key in _TIMES else None

    def _is_media(self) -> bool:
        if self._text_from or not self._keys or not self._is_object[-1]:
            return False
        return self._key == b"image_url" or (self._key in _URL_KEYS and self._keys[-1] in _MEDIA)

    # --- arrays and objects

    def _open(self, is_object: bool) -> None:
        keys, depth = self._keys, len(self._keys)
        if depth == MAX_DEPTH:
            self.unclear = True
            return
        if self._counts and depth == 2:
            self._content = True
        key = self._key if depth and self._is_object[-1] else keys[-1] if depth else b""
        keys.append(key)
        self._is_object.append(is_object)
        if depth == 1 and self._is_object[0] and key in self._lists and is_object == (key == b"questions"):
            self._counts = True
            self._commas = 0
            self._content = self._integers = False
        if not self._text_from and (
            key in _TEXT_ON_TOP
            if depth == 1
            else depth > 1 and key in _TEXT_WITHIN and keys[1] == b"messages"
        ):
            self._text_from = depth + 1
        self._number = None
        self._is_value = False

    def _close(self) -> None:
        depth = len(self._keys)
        if depth == 2 and self._counts:
            self._counts = False
            if self._content and not self._integers:
                self._items = max(self._items, self._commas + 1)
        elif depth == 1:
            self._end_number()
        if depth == self._text_from:
            self._text_from = 0
        self._keys.pop()
        self._is_object.pop()
        self._is_value = False

    def _between(self, piece: bytes, begin: int, end: int) -> None:
        """Read bytes between strings, brackets and ends of the piece: commas, colons, numbers, literals."""
        if self._counts and len(self._keys) == 2:
            self._commas += piece.count(b",", begin, end)
            self._content = self._content or bool(_CONTENT(piece, begin, end))
            if not self._is_object[-1]:
                self._integers = self._integers or bool(_DIGIT(piece, begin, end))
        if self._is_object[-1]:
            comma, colon = piece.rfind(b",", begin, end), piece.rfind(b":", begin, end)
            if self._number is not None:
                first = piece.find(b",", begin, end)
                text = piece[begin : end if first < 0 else first].translate(None, _NOT_A_NUMBER)
                self._number = (self._number + text)[: _MAX_NUMBER + 1]
                if first >= 0:
                    self._end_number()
            if comma != colon:
                self._is_value = colon > comma

    def _end_number(self) -> None:
        if self._number is not None:
            self._times = max(
                self._times, MANY_JOBS if len(self._number) > _MAX_NUMBER else times(self._number)
            )
            self._number = None


def may_hold_url(piece: bytes) -> bool:
    """Return whether a string in ``piece`` could be a URL.

    Fast, with false positives but no false negatives.
    """
    return b'"http' in piece or (b"\\u00" in piece and _escaped_letter(piece) is not None)


def scanned(
    body: bytes, lists: Iterable[bytes] = (), *, urls: bool = False, most_steps: int = MAX_STEPS
) -> BodyScan:
    """Return the scan of a complete body."""
    scan = BodyScan(lists, urls, most_steps)
    scan.feed(body)
    return scan


def is_too_complex(body: bytes) -> bool:
    """Return whether an object for each field of this JSON would take seconds, and GiB."""
    return len(body) > _SMALL and scanned(body).unclear


def times(number: bytes) -> int:
    """Return ``n`` as llama-server reads it. An invalid number is 1 here, because llama-server refuses it."""
    try:
        value = float(number)
    except ValueError:
        return 1
    return ceil(value) if 1.0 < value < MANY_JOBS else MANY_JOBS if value >= MANY_JOBS else 1


def _decoded(raw: bytes) -> str | None:
    try:
        return msgspec.json.decode(b'"%b"' % raw, type=str)
    except (msgspec.MsgspecError, ValueError):
        return None


# --- which URLs are allowed ------------------------------------------------------------------------

# Visible ASCII, but no @ and no backslash.
_PLAIN = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?(?:/[!-?A-\[\]-~]*)?"
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_MAX_SHOWN = 80


def refused_media(urls: Iterable[str | None], allowed: tuple[str, ...]) -> HttpError | None:
    """Return the refusal of the first URL whose host is not in ``allowed``: ``HOST:PORT``, or ``HOST`` for
    the default port of the scheme. A None in ``urls`` is an unreadable URL.
    """
    for url in urls:
        plain = None if url is None else _PLAIN.fullmatch(url)
        if plain is None:
            what = "an ambiguous or overlong URL" if allowed else "a remote URL"
        else:
            port = plain["port"] or _DEFAULT_PORTS[plain["scheme"]]
            host = plain["host"].lower()
            if f"{host}:{port}" in allowed or (port == _DEFAULT_PORTS[plain["scheme"]] and host in allowed):
                continue
            shown = host if plain["port"] is None else f"{host}:{port}"
            what = f"a URL of {shown[:_MAX_SHOWN]!r}"
        return HttpError(
            400,
            f"The body contains {what} that llama-server would fetch as media",
            cause="remote_media",
            remedy="send the media itself as a data: URL, or allow the host with --remote-media or"
            " http.remote_media",
        )
    return None
