"""The chunked transfer coding (RFC 9112 §7.1): decoded for HTTP/1.0 clients, written for own streams."""

from __future__ import annotations

from collections.abc import Callable

import httptools

LAST_CHUNK = b"0\r\n\r\n"


def chunk(payload: bytes) -> bytes:
    """Return one chunk of ``payload``, which must not be empty: an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def is_chunked(framing: bytes | None) -> bool:
    """Whether the header line that frames a body says that it comes in chunks. None: its end is that of the
    connection.
    """
    return framing is not None and framing.startswith(b"Transfer")


class Dechunker:
    """Decodes a chunked body and passes its payload to ``write``."""

    __slots__ = ("_parser", "on_body")

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.on_body = write
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    def write(self, data: bytes) -> None:
        self._parser.feed_data(data)  # well formed, because it was parsed before
