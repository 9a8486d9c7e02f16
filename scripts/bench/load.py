"""The client of the measurement of proxies: connections that each repeat one request. Runs as a process.

``proxy.py`` starts it and reads the report from its standard output:

    python -m scripts.bench.load --to PATH_OR_PORT [--requests N] [--connections N] [--rate N] [--stream]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from typing import Any

from scripts.bench.streams import run

KEY = "bench-key"
BODY = json.dumps(
    {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me a story about a llama. " * 4}],
        "temperature": 0,
        "max_tokens": 16,
    },
    separators=(",", ":"),
)
STREAM_BODY = BODY[:-1] + ',"stream":true}'


class Client(asyncio.Protocol):
    """One keep-alive connection that repeats one request while there is work."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._sent_at = 0.0
        self._first = True
        self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._next()

    def _next(self) -> None:
        load = self._load
        if load.left <= 0:
            self._transport.close()
            return
        load.left -= 1
        if load.pause_s:
            load.loop.call_later(random.uniform(0, 2 * load.pause_s), self._send)
        else:
            self._send()

    def _send(self) -> None:
        self._first = True
        self._end = b""
        self._sent_at = time.perf_counter()
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        load = self._load
        if self._first:
            self._first = False
            load.first_byte_s.append(time.perf_counter() - self._sent_at)
            if not data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"not a 200: {data[:300]!r}")
        self._end = (self._end + data)[-8:] if len(data) < 8 else data[-8:]
        if self._end.endswith(load.end):
            load.done += 1
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.open -= 1
        if not self._load.open:
            self._load.over.set()


class Load:
    def __init__(self, args: argparse.Namespace) -> None:
        self.loop = asyncio.get_running_loop()
        self.over = asyncio.Event()
        self.left = args.requests
        self.done = 0
        self.open = args.connections
        self.pause_s = args.connections / args.rate if args.rate else 0.0
        body = (STREAM_BODY if args.stream else BODY).encode()
        self.end = b"\r\n0\r\n\r\n" if args.stream else b"0.0}}"
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\n"
            b"Accept-Encoding: gzip, deflate\r\nUser-Agent: bench\r\nAuthorization: Bearer %b\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (KEY.encode(), len(body), body)
        )
        self.first_byte_s: list[float] = []


async def send(args: argparse.Namespace) -> None:
    load = Load(args)
    began = time.perf_counter()
    for _ in range(args.connections):
        if args.to.isdigit():
            await load.loop.create_connection(lambda: Client(load), "127.0.0.1", int(args.to))
        else:
            await load.loop.create_unix_connection(lambda: Client(load), args.to)
    await load.over.wait()
    if load.done != args.requests:
        raise SystemExit(f"{args.requests - load.done} of {args.requests} requests were lost")
    took_s = time.perf_counter() - began
    ordered = sorted(load.first_byte_s)
    report = {
        "took_s": took_s,
        "median_s": statistics.median(ordered),
        "p99_s": ordered[int(len(ordered) * 0.99)],
    }
    sys.stdout.write(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(description="Sends requests, and reports their times.")
    parser.add_argument("--to", required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument(
        "--rate", type=int, default=0, help="requests per second; 0: as fast as they are answered"
    )
    parser.add_argument("--stream", action="store_true")
    run(send(parser.parse_args()))


if __name__ == "__main__":
    main()
