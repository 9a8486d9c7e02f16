"""The floor of what a proxy in Python costs: two protocols on uvloop that copy bytes, and do nothing else.

It reads no HTTP: each client connection has one upstream connection for as long as it lives.

    python -m scripts.bench.bare_relay --port N --to UNIX_PATH
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any


class End(asyncio.Protocol):
    """One of the two connections. ``other`` is the transport of the other one."""

    def __init__(self, other: Any = None) -> None:
        self.other = other
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early.append(data)
        else:
            self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


class ClientEnd(End):
    def __init__(self, upstream: str) -> None:
        super().__init__()
        self._upstream = upstream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self.other, _ = await loop.create_unix_connection(lambda: End(self.transport), self._upstream)
        for data in self.early:
            self.other.write(data)


async def relay(port: int, upstream: str) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ClientEnd(upstream), "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="Copies bytes between connections.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--to", required=True, metavar="UNIX_PATH")
    args = parser.parse_args()
    try:
        import uvloop
    except ImportError:
        asyncio.run(relay(args.port, args.to))
    else:
        uvloop.run(relay(args.port, args.to))


if __name__ == "__main__":
    main()
