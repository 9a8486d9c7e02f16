"""Sends requests that came through Ray Serve to the llamasup of a replica, over TLS and with the key of the
fleet, as a front does. This module knows nothing of Ray.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator

from msgspec import Struct

from llamasup.core.http.heads import HeadRules, HttpError, error_body, error_lines, pairs_of
from llamasup.core.http.httpx_client import httpx
from llamasup.core.http.response_heads import read_response_headers
from llamasup.fleet.certificates import authority
from llamasup.fleet.secret import node_key

_CONNECT_S = 5.0
_KEPT_CONNECTIONS = 64
_UNREACHABLE = HttpError(
    503,
    "The llamasup of the replica accepts no connections",
    "unavailable_error",
    "upstream_unreachable",
    "try again",
    1.0,
)


class AnswerBegin(Struct, frozen=True):
    """The status, the header lines, and the first bytes of the body: most answers have no more."""

    status: int
    lines: bytes
    piece: bytes


class NodeRequests:
    """Sends requests to the llamasup of this machine at ``url``."""

    def __init__(self, url: str, secret: str) -> None:
        self._url = url
        self._key = f"Bearer {node_key(secret)}".encode()
        self._client = httpx.AsyncClient(
            verify=ssl.create_default_context(cadata=authority(secret)),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # the node has its own limits
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT_CONNECTIONS),
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def forward(
        self, target: bytes, lines: bytes, body: bytes
    ) -> AsyncGenerator[AnswerBegin | bytes, None]:
        """Yield ``AnswerBegin``, then the further pieces of the body. Closing the iterator aborts the
        request.

        Raises httpx.HTTPError if the answer is cut.
        """
        headers = [*pairs_of(lines), (b"authorization", self._key)]
        request = httpx.Request(
            "POST", self._url, headers=headers, content=body, extensions={"target": target}
        )
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.TransportError:
            error = _UNREACHABLE
            kind = b"Content-Type: application/json; charset=utf-8\r\n"
            yield AnswerBegin(error.status, kind + b"".join(error_lines(error)), error_body(error))
            return
        try:
            pieces = aiter(answer.aiter_raw())
            first = await anext(pieces, b"")
            yield AnswerBegin(answer.status_code, _lines_of(answer), first)
            async for piece in pieces:
                yield piece
        finally:
            await answer.aclose()


def _lines_of(answer: httpx.Response) -> bytes:
    """Return the header lines, with the length of the unchanged body. Serve adds a date and a server."""
    own = [(name, value) for name, value in answer.headers.raw if name.lower() not in (b"date", b"server")]
    lines, _ = read_response_headers(own, HeadRules(data_only=True))
    length = answer.headers.get("content-length")
    return lines if length is None else lines + b"Content-Length: " + length.encode() + b"\r\n"
