"""Both ends of the many-streams measurement (promise P4): a steady sender of tokens and their receiver.

Every event contains its number and its time by the monotonic clock, which all processes of a machine share.
The receiver checks the numbers and computes the delays. ``fast_server.py`` sends; ``proxy.py`` runs

    python -m scripts.bench.streams --to PATH_OR_PORT --streams 1000 --tokens 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Coroutine
from typing import Any

import httptools

TOKENS_PER_S = 20
PHASES = 50  # the streams are spread over them, so that each millisecond has its share of the tokens
CONNECTS_AT_ONCE = 64

HEAD = (
    b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
)
EVENT = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":" token"}}],"created":1795000000,'
    b'"id":"chatcmpl-1","model":"tiny","object":"chat.completion.chunk","n":%010d,"t":%020d}\n\n'
)
STAMP = re.compile(rb'"n":(\d{10}),"t":(\d{20})\}\n\n')
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def run(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


# --- sending ---------------------------------------------------------------------------------------


class Senders:
    """Lets its senders send one token after another. They are spread over ``PHASES`` of each interval."""

    def __init__(self) -> None:
        self.phases: list[dict[Sender, None]] = [{} for _ in range(PHASES)]
        self._loop = asyncio.get_running_loop()
        self._ticks = False

    def add(self, sender: Sender) -> dict[Sender, None]:
        phase = min(self.phases, key=len)
        phase[sender] = None
        if not self._ticks:
            self._ticks = True
            self._loop.call_soon(self._tick, 0, self._loop.time())  # the head of the response comes first
        return phase

    def _tick(self, number: int, began: float) -> None:
        for sender in tuple(self.phases[number % PHASES]):
            sender.send()
        self._ticks = any(self.phases)
        if self._ticks:
            at = began + (number + 1) / TOKENS_PER_S / PHASES
            self._loop.call_at(at, self._tick, number + 1, began)


class Sender:
    """One stream of ``tokens`` events on a connection."""

    def __init__(self, senders: Senders, transport: asyncio.Transport, tokens: int) -> None:
        self._transport = transport
        self._number = 0
        self._tokens = tokens
        self._phase = senders.add(self)
        transport.write(HEAD)

    def send(self) -> None:
        if self._number == self._tokens:
            self._transport.write(LAST)
            self.stop()
            return
        event = EVENT % (self._number, time.monotonic_ns())
        self._number += 1
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))

    def stop(self) -> None:
        self._phase.pop(self, None)


# --- receiving -------------------------------------------------------------------------------------


class Receiver(asyncio.Protocol):
    def __init__(self, results: Results) -> None:
        self._results = results
        self._parser = httptools.HttpResponseParser(self)
        self._expected = 0
        self._rest = b""
        self._received_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._transport.write(self._results.request)

    def data_received(self, data: bytes) -> None:
        self._received_ns = time.monotonic_ns()
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            raise SystemExit(f"a stream was answered {self._parser.get_status_code()}")

    def on_body(self, body: bytes) -> None:
        payload = self._rest + body if self._rest else body
        results, end = self._results, 0
        for stamp in STAMP.finditer(payload):
            number, end = int(stamp[1]), stamp.end()
            if number != self._expected:
                results.out_of_order += 1
            self._expected = number + 1
            results.delays_ns.append(self._received_ns - int(stamp[2]))
        self._rest = payload[end:] if end < len(payload) else b""

    def on_message_complete(self) -> None:
        self._results.whole += self._rest.endswith(b"data: [DONE]\n\n")
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._results.lost_one()


class Results:
    def __init__(self, streams: int, tokens: int) -> None:
        body = b'{"model":"tiny","stream":true,"messages":[],"tokens":%d}' % tokens
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer bench-key\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.out_of_order = 0
        self.whole = 0
        self.delays_ns: list[int] = []
        self.over = asyncio.Event()
        self._open = streams

    def lost_one(self) -> None:
        self._open -= 1
        if not self._open:
            self.over.set()


async def receive(to: str, streams: int, tokens: int) -> None:
    loop = asyncio.get_running_loop()
    results = Results(streams, tokens)
    connecting = asyncio.Semaphore(CONNECTS_AT_ONCE)

    async def connect() -> None:
        async with connecting:
            if to.isdigit():
                await loop.create_connection(lambda: Receiver(results), "127.0.0.1", int(to))
            else:
                await loop.create_unix_connection(lambda: Receiver(results), to)

    await asyncio.gather(*(connect() for _ in range(streams)))
    await results.over.wait()
    delays = sorted(results.delays_ns)
    report = {
        "lost": streams * tokens - len(delays) + streams - results.whole,
        "out_of_order": results.out_of_order,
        "delay_median_ms": delays[len(delays) // 2] / 1e6,
        "delay_p999_ms": delays[len(delays) * 999 // 1000] / 1e6,
        "delay_max_ms": delays[-1] / 1e6,
        "late": sum(delay > 50e6 for delay in delays),
    }
    sys.stdout.write(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(description="Receives many streams.")
    parser.add_argument("--to", required=True)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    run(receive(args.to, args.streams, args.tokens))


if __name__ == "__main__":
    main()
