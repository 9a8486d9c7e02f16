"""Finds where the body of a response ends (RFC 9112 §6.3, pure)."""

from __future__ import annotations

from enum import Enum
from typing import Final

WITHOUT_BODY: Final = (204, 304)  # whatever their Content-Length or Transfer-Encoding announces
MAX_LENGTH_DIGITS: Final = 32  # 2^64 has 20; the parser accepts any number of zeros before them


class Framing(Enum):
    EMPTY = "no body"
    LENGTH = "Content-Length"
    CHUNKED = "chunked"
    UNTIL_CLOSE = "the end of the connection"


# Looking up a member of an Enum is a call of a Python function in Python 3.11.
EMPTY: Final = Framing.EMPTY
LENGTH: Final = Framing.LENGTH
CHUNKED: Final = Framing.CHUNKED
UNTIL_CLOSE: Final = Framing.UNTIL_CLOSE


def framing_of(
    status: int, transfer_coding: bytes | None, length: bytes | None, *, is_head: bool
) -> Framing | str:
    """The framing of the response to a request, from its head; or what is wrong with the response.

    ``transfer_coding``, ``length``: the values of Transfer-Encoding and Content-Length, which the parser has
    checked for characters; None: no such header. ``is_head``: whether the request is a HEAD request.
    Rule 2 is for CONNECT, which is never forwarded; rule 7 is for requests.
    """
    if is_head or status in WITHOUT_BODY:  # rule 1
        return EMPTY
    if transfer_coding is not None:  # rules 3 and 4: it overrules a Content-Length
        if transfer_coding.strip(b" ").lower() == b"chunked":
            return CHUNKED
        return f"used the transfer coding {transfer_coding.decode('latin-1')!r}"
    if length is None:  # rule 8
        return UNTIL_CLOSE
    if len(length) > MAX_LENGTH_DIGITS:  # rule 5
        return "sent a Content-Length with too many digits"
    return LENGTH  # rule 6


def ends_with_body(end: bytes) -> bool:
    """Whether a complete chunked body ends where these last bytes end (RFC 9112 §7.1).

    A last chunk or trailer ends with one empty line. After it the parser of httptools would skip stray line
    ends, and begin a next response.
    """
    return end.endswith(b"\r\n\r\n") and end[-5:-4] not in (b"\r", b"\n")
