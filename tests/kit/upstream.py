"""A fast upstream that answers as llama-server does, to measure the proxy with. Real sockets, no model.

    python -m tests.kit.upstream --unix PATH | --port N [--chunks N] [--interval-ms T]

Every request gets canned JSON, or, if its body says ``"stream":true``, N chunks of SSE, one every T ms.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import cast

import httptools

__all__ = ["CHUNK", "PLAIN_BODY", "STREAM_END", "FastUpstream", "main", "plain_response", "stream_head"]

PLAIN_BODY = (
    b'{"choices":[{"finish_reason":"length","index":0,"message":{"role":"assistant","content":"hello"}}],'
    b'"created":1795000000,"model":"tiny","system_fingerprint":"b11434","object":"chat.completion",'
    b'"usage":{"completion_tokens":16,"prompt_tokens":24,"total_tokens":40,'
    b'"prompt_tokens_details":{"cached_tokens":23}},'
    b'"id":"chatcmpl-1","timings":{"cache_n":23,"prompt_n":1,"prompt_ms":0.4,"prompt_per_token_ms":0.4,'
    b'"prompt_per_second":2500.0,"predicted_n":16,"predicted_ms":1.6,"predicted_per_token_ms":0.1,'
    b'"predicted_per_second":10000.0}}'
)
_EVENT = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":" token"}}],"created":1795000000,'
    b'"id":"chatcmpl-1","model":"tiny","system_fingerprint":"b11434","object":"chat.completion.chunk"}\n\n'
)
_LAST_EVENT = (
    b'data: {"choices":[{"finish_reason":"length","index":0,"delta":{}}],"created":1795000000,'
    b'"id":"chatcmpl-1","model":"tiny","system_fingerprint":"b11434","object":"chat.completion.chunk","timings":{"cache_n":23,'
    b'"prompt_n":1,"prompt_ms":0.4,"predicted_n":16,"predicted_ms":1.6,"predicted_per_second":10000.0}}\n\n'
)


def _chunk(payload: bytes) -> bytes:
    return b"%X\r\n%b\r\n" % (len(payload), payload)


CHUNK = _chunk(_EVENT)
STREAM_END = _chunk(_LAST_EVENT) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_COMMON = b"Server: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"


def plain_response(body: bytes = PLAIN_BODY) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\n" + _COMMON + b"Content-Type: application/json; charset=utf-8\r\n"
        b"Content-Length: %d\r\nKeep-Alive: timeout=5, max=100\r\n\r\n" % len(body)
    ) + body


def stream_head() -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\n" + _COMMON + b"Content-Type: text/event-stream\r\n"
        b"Transfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
    )


class FastUpstream(asyncio.Protocol):
    """One connection. Streams ``chunks`` chunks, each a write of its own, ``interval_s`` apart."""

    transport: asyncio.Transport

    def __init__(self, chunks: int = 50, interval_s: float = 0.0) -> None:
        self._chunks = chunks
        self._interval_s = interval_s
        self._left = 0
        self._body = b""
        self._parser = httptools.HttpRequestParser(self)
        self._plain = plain_response()
        self._head = stream_head()
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop"s are no subclasses of it

    def connection_lost(self, exc: Exception | None) -> None:
        self._left = 0

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if b'"stream":true' not in self._body:
            self.transport.write(self._plain)
            return
        self.transport.write(self._head)
        self._left = self._chunks
        self._later()

    def _later(self) -> None:
        if self._interval_s:
            self._loop.call_later(self._interval_s, self._next_chunk)
        else:
            self._loop.call_soon(self._next_chunk)

    def _next_chunk(self) -> None:
        if self.transport.is_closing():
            return
        if self._left:
            self._left -= 1
            self.transport.write(CHUNK)
            self._later()
        else:
            self.transport.write(STREAM_END)


async def _serve(unix: str | None, port: int, chunks: int, interval_s: float) -> None:
    loop = asyncio.get_running_loop()

    def connection() -> FastUpstream:
        return FastUpstream(chunks, interval_s)

    if unix is not None:
        server = await loop.create_unix_server(connection, unix, backlog=1024)
    else:
        server = await loop.create_server(connection, "127.0.0.1", port, backlog=1024)
    async with server:
        sys.stderr.write("ready\n")
        await server.serve_forever()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kit.upstream")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--unix")
    where.add_argument("--port", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=50)
    parser.add_argument("--interval-ms", type=float, default=0.0)
    given = parser.parse_args(argv)
    serving = _serve(given.unix, given.port, given.chunks, given.interval_ms / 1000.0)
    try:
        import uvloop
    except ImportError:
        asyncio.run(serving)
    else:
        uvloop.run(serving)


if __name__ == "__main__":
    main()
