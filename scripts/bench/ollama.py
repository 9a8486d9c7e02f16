"""The CPU time of the proxy for a streamed token: through Ollama's API, and untouched.

    python -m scripts.bench ollama [--tokens N] [--rounds N]

The server sends the next token once the client has the last one, so each token is a read and a write of its
own. The rounds alternate, and the median of their ratios counts: it may be 3 at most.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable

import psutil
import uvloop

from llamasup.core.http.address import UnixAddress
from llamasup.core.proxy import Proxy, ProxyConfig, bind
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.features.ollama.dialect import OllamaDialect
from scripts.bench.streams import HEAD
from scripts.pages import ROOT, spread
from tests.core.proxy.rig import OneModel

TOKEN = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":" token"}}],"created":1795774247,'
    b'"id":"chatcmpl-bSLsWjHedEpNl7S9PrxCzYq3K1d7gx2a","model":"tiny.gguf",'
    b'"system_fingerprint":"b0-unknown","object":"chat.completion.chunk"}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
MESSAGES = b'"model":"tiny","messages":[{"role":"user","content":"hi"}]'
REQUESTS = {
    "untouched": (b"/v1/chat/completions", b'{"stream":true,' + MESSAGES + b"}"),
    "ollama": (b"/api/chat", b"{" + MESSAGES + b"}"),
}


def serve(upstream: str) -> None:
    """Run only the proxy, until the end of standard input."""

    async def run() -> None:
        (sock,) = bind("127.0.0.1", 0)
        proxy = Proxy(OneModel(Endpoint("tiny", 1, UnixAddress(upstream)), 1.0, 1), ProxyConfig())
        dialect = OllamaDialect(lambda *_: "kept")
        await proxy.start([sock], dialect=dialect)
        print(sock.getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await proxy.aclose()

    uvloop.run(run())


def until(sock: socket.socket, end: bytes) -> None:
    """Receive until ``end`` is the last that has arrived."""
    read = b""
    while not read.endswith(end):
        more = sock.recv(1 << 16)
        if not more:
            raise SystemExit(f"the connection was closed after {read!r}")
        read += more


def stream(port: int, upstream: socket.socket, api: str, tokens: int, cpu_s: Callable[[], float]) -> float:
    """Microseconds of CPU time for each token."""
    path, body = REQUESTS[api]
    with socket.create_connection(("127.0.0.1", port)) as client:
        head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path, len(body))
        client.sendall(head + body)
        server, _ = upstream.accept()
        with server:
            until(server, b"}")
            server.sendall(HEAD + CHUNK)
            until(client, b"\n\r\n" if api == "ollama" else CHUNK[-8:])
            began = cpu_s()
            for _ in range(tokens):
                server.sendall(CHUNK)
                until(client, b"\n\r\n" if api == "ollama" else CHUNK[-8:])
            spent = cpu_s() - began
            server.sendall(END)
            until(client, b"0\r\n\r\n")
    return spent / tokens * 1e6


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", metavar="SOCKET", help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> None:
    if args.serve:
        serve(args.serve)
        return
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as upstream:
        path = f"{folder}/upstream.sock"
        upstream.bind(path)
        upstream.listen()
        command = [sys.executable, "-m", "scripts.bench", "ollama", "--serve", path]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as proxy:
            assert proxy.stdout is not None
            port, process = int(proxy.stdout.readline()), psutil.Process(proxy.pid)
            found: dict[str, list[float]] = {api: [] for api in REQUESTS}
            for _ in range(args.rounds):
                for api, times in found.items():
                    times.append(
                        stream(port, upstream, api, args.tokens, lambda: sum(process.cpu_times()[:2]))
                    )
            proxy.communicate()
    for api, times in found.items():
        print(f"{api:10} {statistics.median(times):6.1f} µs of CPU time for a token")
    ratios = [own / plain for own, plain in zip(found["ollama"], found["untouched"], strict=True)]
    print(f"ratio      {spread(ratios)}; at most 3")
