"""Protocols: another API that a listener speaks, which llamasup translates to and from llama-server's.

A request in such an API is served by the same parts as every other: its head, key, limits and body are judged
before, and then it waits, is sent again, is counted and ends as a request in llama-server's own API.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from llamasup.core.http.heads import Head, HttpError
from llamasup.core.proxy.backend import Backend
from llamasup.core.proxy.request import Request


class LocalAnswer(Struct, frozen=True):
    """A complete answer of llamasup itself. ``lines``: header lines, such as that of its type."""

    body: bytes
    status: int = 200
    lines: bytes = b"Content-Type: application/json; charset=utf-8\r\n"


class Dialect(Protocol):
    """An API of one listener."""

    def speaks(self, head: Head) -> bool:
        """Whether a request with this head is in this API. Others are in llama-server's."""
        ...

    def translate(self, request: Request, backend: Backend) -> HttpError | LocalAnswer | None:
        """Put a complete request into llama-server's API, with its ``translation``; or the answer to it."""
        ...

    def error_response(self, error: HttpError, lines: bytes, *, method: bytes, close: bool) -> bytes:
        """The complete response for an error."""
        ...
