"""Requests that came through Ray Serve, to a played llamasup of a replica."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from llamasup.core.http.heads import pairs_of
from llamasup.fleet.certificates import node_certificate
from llamasup.fleet.node_requests import AnswerBegin, NodeRequests
from llamasup.fleet.secret import node_key
from tests.kit.async_tests import async_test
from tests.kit.patience import PATIENCE_S
from tests.kit.ports import free_port

SECRET = "s" * 40
HEAD = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nETag: 1\r\nContent-Type: text/event-stream\r\n"


class PlayedNode:
    """Sends ``parts`` in answer to each request, and ends the connection after the last one, unless it
    ``holds`` it.
    """

    def __init__(self, *parts: bytes, holds: bool = False) -> None:
        self.parts = parts
        self.holds = holds
        self.asked = b""
        self.url = ""
        self.gone = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(dict(pairs_of(head.partition(b"\r\n")[2]))[b"content-length"])
            self.asked = head + await reader.readexactly(length)
            for part in self.parts:
                writer.write(part)
                await writer.drain()
            if self.holds:
                await reader.read()
        self.gone.set()
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


@asynccontextmanager
async def requests_to(node: PlayedNode, folder: Path) -> AsyncIterator[NodeRequests]:
    certificate, pem = node_certificate(SECRET, "127.0.0.1"), folder / "node.pem"
    pem.write_bytes(certificate.private_key + certificate.chain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    server = await asyncio.start_server(node.serve, "127.0.0.1", 0, ssl=context)
    node.url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    requests = NodeRequests(node.url, SECRET)
    try:
        yield requests
    finally:
        await requests.aclose()
        async with asyncio.timeout(PATIENCE_S):
            await node.gone.wait()
        server.close()
        await server.wait_closed()


@async_test
async def test_request_and_answer_pass_unchanged(tmp_path: Path) -> None:
    node = PlayedNode(HEAD + b"Content-Length: 3\r\n\r\nabc")
    async with requests_to(node, tmp_path) as requests:
        lines = b"accept: text/plain\r\nX-Own: a: b\r\n"
        pieces = [piece async for piece in requests.forward(b"/v1/%7Ex?a=%20", lines, b"\x00{}")]
    begin = pieces[0]
    assert isinstance(begin, AnswerBegin)
    assert begin.status == 200
    assert pairs_of(begin.lines) == [
        (b"etag", b"1"),
        (b"content-type", b"text/event-stream"),
        (b"content-security-policy", b"sandbox; default-src 'none'"),
        (b"x-content-type-options", b"nosniff"),
        (b"content-length", b"3"),
    ]
    assert begin.piece + b"".join(piece for piece in pieces[1:] if isinstance(piece, bytes)) == b"abc"
    head, _, body = node.asked.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/%7Ex?a=%20 HTTP/1.1\r\n")
    assert body == b"\x00{}"
    sent = dict(pairs_of(head.partition(b"\r\n")[2]))
    assert sent.keys() == {b"host", b"accept", b"x-own", b"authorization", b"content-length"}
    assert sent[b"authorization"] == f"Bearer {node_key(SECRET)}".encode()
    assert sent[b"x-own"] == b"a: b"


@async_test
async def test_answer_that_breaks_off_raises_after_its_pieces(tmp_path: Path) -> None:
    node = PlayedNode(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"3\r\ndef\r\n")
    got = b""
    async with requests_to(node, tmp_path) as requests:
        with pytest.raises(httpx.HTTPError):
            async for piece in requests.forward(b"/", b"", b""):
                got += piece.piece if isinstance(piece, AnswerBegin) else piece
    assert got == b"abcdef"


@async_test
async def test_end_of_the_iterator_ends_the_connection_so_that_the_slot_is_free(tmp_path: Path) -> None:
    node = PlayedNode(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", holds=True)
    async with requests_to(node, tmp_path) as requests:
        answer = requests.forward(b"/", b"", b"")
        await anext(answer)
        assert not node.gone.is_set()
        await answer.aclose()
        async with asyncio.timeout(PATIENCE_S):
            await node.gone.wait()


@async_test
async def test_llamasup_that_has_ended_is_a_503() -> None:
    requests = NodeRequests(f"https://127.0.0.1:{free_port()}", SECRET)
    (begin,) = [piece async for piece in requests.forward(b"/", b"", b"")]
    await requests.aclose()
    assert isinstance(begin, AnswerBegin)
    assert begin.status == 503
    assert (b"retry-after", b"1") in pairs_of(begin.lines)
    assert b"upstream_unreachable" in begin.piece
