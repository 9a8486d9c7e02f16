"""Caches the head of a request, because a client repeats it on its connection with another body length.

The cache holds the bytes of a valid head, with a gap for the digits of the length. The same bytes need no
second parser pass. A head that differs by one byte, or has no length in plain digits, goes to the parser.
"""

from __future__ import annotations

import re
from typing import Final

HEAD_BYTES: Final = 4096  # longer heads are not cached; with cookies and tokens, a client sends 2 KiB
_DIGITS: Final = 9  # of a length; the parser reads the lengths of larger bodies
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,%d})\r\n" % _DIGITS, re.IGNORECASE)


class KnownHead:
    """A head ``before`` and ``after`` the digits of its Content-Length; ``after`` is empty without one."""

    __slots__ = ("_after", "_after_bytes", "_at", "_before", "_digits_end", "bytes_beside_digits")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._at = len(before)
        self._digits_end = self._at + _DIGITS + 1
        self._after_bytes = len(after)
        self.bytes_beside_digits = len(before) + len(after)

    def body_of(self, read: bytes) -> bytes | None:
        """Return the body if ``read`` is this whole head and the whole body, and nothing else.

        Most reads are.
        """
        if not read.startswith(self._before):
            return None
        after = self._after
        if not after:
            return b"" if len(read) == self._at else None
        end = read.find(b"\r", self._at, self._digits_end)
        if end < 0 or not read.startswith(after, end):
            return None
        body = read[end + self._after_bytes :]
        return body if read[self._at : end] == b"%d" % len(body) else None

    def length_in(self, read: bytes) -> bytes | None:
        """Return the digits of the Content-Length if ``read`` begins with this whole head.

        Returns an empty text if it has none.
        """
        if not read.startswith(self._before):
            return None
        after = self._after
        if not after:
            return b""
        at = self._at
        end = read.find(b"\r", at, self._digits_end)
        digits = read[at:end]
        if end >= 0 and digits.isdigit() and read.startswith(after, end):
            return digits
        return None


def compile_head(read: bytes) -> KnownHead | None:
    """Return the valid head at the beginning of ``read``; None if it cannot be cached."""
    end = read.find(b"\r\n\r\n", 0, HEAD_BYTES) + 4
    if end < 4 or read[0] in b"\r\n":  # parsers skip empty lines before a head
        return None
    match = _LENGTH.search(read, 0, end)
    if match is None:
        return None if b"\ncontent-length" in read[:end].lower() else KnownHead(read[:end], b"")
    return KnownHead(read[: match.start(1)], read[match.end(1) : end])
