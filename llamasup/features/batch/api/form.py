"""Reads the form of an upload piece by piece: small fields, and one file that is never held whole (pure).

Each byte is searched once, in C, and a form has few parts, so no form costs more than its length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from email.message import Message
from email.utils import collapse_rfc2231_value
from functools import partial
from typing import Final

from llamasup.errors import UsageInvalid

__all__ = ["UploadForm"]

MAX_PARTS: Final = 17  # the file, and more fields than OpenAI's client has
MAX_FIELD_BYTES: Final = 4096
MAX_HEAD_BYTES: Final = 4096  # of a part
MAX_OUTSIDE_BYTES: Final = 64 << 10  # of the fields, the heads, and what follows the form
_MAX_BOUNDARY: Final = 200
_MAX_TYPE: Final = 1000  # letters; the parser needs the square of the time for a longer one
_LINE: Final = b"\r\n"
# RFC 8187 names the first. What else Python decodes, and how, depends on its version.
_CHARACTER_SETS: Final = "utf-8", "iso-8859-1", "us-ascii"


class UploadForm:
    """The fields of an upload and the bytes of its file. ``filename`` is None before the file has begun."""

    def __init__(self, content_type: str) -> None:
        """Raises UsageInvalid."""
        kind = _header(content_type if len(content_type) <= _MAX_TYPE else "")
        boundary = _parameter(kind, "boundary").rstrip()
        if kind.get_content_type() != "multipart/form-data" or not boundary or len(boundary) > _MAX_BOUNDARY:
            raise _invalid("the Content-Type is not multipart/form-data with a boundary")
        self._delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._fields: dict[str, bytearray] = {}
        self.filename: str | None = None
        self._unread = bytearray(_LINE)  # the first delimiter has no line before it
        self._read: Callable[[], bool] | None = self._read_content
        self._add: Callable[[bytearray], None] = _refuse_preamble
        self._parts = 0
        self._file = bytearray()
        self._outside_bytes = 0

    @property
    def fields(self) -> Mapping[str, str]:
        """The fields so far, by name."""
        return {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}

    @property
    def is_complete(self) -> bool:
        return self._read is None

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the file in this piece of the body. Raises UsageInvalid."""
        waiting = len(self._unread) + len(data)
        self._unread += data
        while self._read is not None and self._read():
            pass
        if self._read is None:
            self._unread.clear()
        self._outside_bytes += waiting - len(self._unread) - len(self._file)
        if self._outside_bytes > MAX_OUTSIDE_BYTES:
            raise _invalid(f"it has more than {MAX_OUTSIDE_BYTES} bytes outside its file")
        piece = bytes(self._file)
        self._file.clear()
        return piece

    # --- The steps. Each one returns whether the next step may have enough bytes.

    def _read_content(self) -> bool:
        at = self._unread.find(self._delimiter)
        end = at if at >= 0 else max(0, len(self._unread) - len(self._delimiter) + 1)
        if end:
            self._add(self._unread[:end])
        del self._unread[: end if at < 0 else end + len(self._delimiter)]
        if at >= 0:
            self._read = self._read_delimiter_end
        return at >= 0

    def _read_delimiter_end(self) -> bool:
        if len(self._unread) < len(_LINE):
            return False
        if self._unread.startswith(b"--"):
            self._read = None
            return False
        if not self._unread.startswith(_LINE):
            raise _invalid("its boundary is followed by other bytes")
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _invalid(f"it has more than {MAX_PARTS} parts")
        self._read = self._read_head
        return True

    def _read_head(self) -> bool:
        end = self._unread.find(_LINE * 2, 0, MAX_HEAD_BYTES)
        if end < 0:
            if len(self._unread) >= MAX_HEAD_BYTES:
                raise _invalid(f"the head of a part has more than {MAX_HEAD_BYTES} bytes")
            return False
        self._begin_part(bytes(self._unread[:end]))
        del self._unread[: end + 2 * len(_LINE)]
        self._read = self._read_content
        return True

    def _begin_part(self, head: bytes) -> None:
        part = _header("")
        for line in head.split(_LINE):
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-disposition":
                part = _header(value.decode("utf-8", "replace"))
        name_given = _parameter(part, "name")
        if name_given != "file":
            self._fields[name_given] = bytearray()
            self._add = partial(_add_to_field, self._fields[name_given])
        elif self.filename is not None:
            raise _invalid("it has two files")
        else:
            self.filename = _parameter(part, "filename")
            self._add = self._file.extend


def _header(value: str) -> Message:
    """A header with parameters, such as ``form-data; name="file"``."""
    header = Message()
    header["content-type"] = value
    return header


def _parameter(header: Message, name: str) -> str:
    """A parameter; empty if there is none. Raises UsageInvalid."""
    try:
        value = header.get_param(name, "")
    except TypeError:  # some versions of Python cannot sort them
        raise _invalid("a parameter has parts with and without a number") from None
    if isinstance(value, tuple) and (value[0] or "us-ascii").lower() not in _CHARACTER_SETS:
        raise _invalid(f"a {name} has a character set other than {', '.join(_CHARACTER_SETS)}")
    return collapse_rfc2231_value(value)


def _add_to_field(field: bytearray, piece: bytearray) -> None:
    field += piece
    if len(field) > MAX_FIELD_BYTES:
        raise _invalid(f"one of its fields has more than {MAX_FIELD_BYTES} bytes")


def _refuse_preamble(piece: bytearray) -> None:
    raise _invalid("it does not begin with its boundary")


def _invalid(reason: str) -> UsageInvalid:
    return UsageInvalid(
        f"The form of the upload is invalid: {reason}.",
        remedy="Send multipart/form-data with the fields purpose and file.",
    )
