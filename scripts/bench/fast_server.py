"""A llama-server that answers at once, for the measurement of the proxies in front of it.

``install`` writes an executable that takes llama-server's command line, so that `llamasup run` starts it as
it starts any llama-server. A plain request gets a canned chat completion. A request with ``"stream":true``
gets chunks, and one with ``"tokens":N`` gets N tokens at a steady rate (``streams.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from scripts.bench.streams import Sender, Senders, run
from scripts.pages import ROOT
from tests.kit import fake_server
from tests.kit.upstream import FastUpstream, plain_response

_ANSWERS = {
    b"/health": plain_response(b'{"status":"ok"}'),
    b"/slots": plain_response(b'[{"id":0,"n_ctx":8192,"is_processing":false}]'),
    b"/completion": plain_response(b'{"content":"x","tokens_predicted":1,"tokens_evaluated":1}'),
}
_TOKENS = re.compile(rb'"tokens":(\d+)\}')  # the end of the body


def install(path: Path, *options: str) -> Path:
    """Write an executable that is this llama-server. ``options``: ``--chunks N``, ``--interval-ms T``."""
    fake_server.install(path)
    asked, _, _ = path.read_text().partition("export PYTHONPATH")  # the questions before a start, as the fake
    serve = shlex.join([sys.executable, "-P", "-m", "scripts.bench.fast_server", *options])
    path.write_text(f'{asked}export PYTHONPATH={shlex.quote(str(ROOT))}\nexec {serve} "$@"\n')
    return path


class FastServer(FastUpstream):
    """One connection."""

    def __init__(self, senders: Senders, chunks: int, interval_s: float) -> None:
        super().__init__(chunks, interval_s)
        self._senders = senders
        self._sender: Sender | None = None
        self._url = b""

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_message_complete(self) -> None:
        if (answer := _ANSWERS.get(self._url)) is not None:
            self.transport.write(answer)
        elif (tokens := _TOKENS.search(self._body)) is not None:
            self._sender = Sender(self._senders, self.transport, int(tokens[1]))
        else:
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._sender is not None:
            self._sender.stop()


async def serve(args: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    senders = Senders()

    def connection() -> asyncio.Protocol:
        return FastServer(senders, args.chunks, args.interval_ms / 1000)

    options: dict[str, Any] = {"backlog": 4096}
    if args.host.endswith(".sock"):
        server = await loop.create_unix_server(connection, args.host, **options)
        where = f"unix://{args.host}"
    else:
        server = await loop.create_server(connection, args.host, args.port, **options)
        where = f"http://{args.host}:{args.port}"
    async with server:
        sys.stderr.write(f"0.00.000.000 I srv  llama_server: listening on {where}\n")
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="A fast llama-server without a model.", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1", help="a path ending in .sock is a Unix socket")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=50)
    parser.add_argument("--interval-ms", type=float, default=0.0)
    args, _ = parser.parse_known_args()  # the rest are llama-server's own options
    run(serve(args))


if __name__ == "__main__":
    main()
