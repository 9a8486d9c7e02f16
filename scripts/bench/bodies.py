"""Memory of the proxy before, during and after a burst of request bodies whose last bytes never come.

    python -m scripts.bench bodies [--clients N] [--bound MiB]

Each of 100 clients, at ``--addresses`` loopback addresses, sends 31 MiB of a body of 32 MiB. With
``--bound 8000`` nothing is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import selectors
import socket
import subprocess
import sys
import time

import psutil
import uvloop

from llamasup.core.http.address import UnixAddress
from llamasup.core.proxy import Limits, Proxy, ProxyConfig, bind
from llamasup.core.queueing.endpoint import Endpoint
from scripts.pages import ROOT
from tests.core.proxy.rig import OneModel

MIB = 1 << 20
SENT = 31 * MIB


def serve(bound: int) -> None:
    """Run only the proxy, until the end of standard input."""

    async def run() -> None:
        limits = Limits(bodies_bytes=bound * MIB, bodies_per_client_bytes=bound * MIB // 2)
        (sock,) = bind("127.0.0.1", 0)
        backend = OneModel(Endpoint("tiny", 1, UnixAddress("/nowhere")), 1.0, 1)
        proxy = Proxy(backend, ProxyConfig(limits=limits))
        await proxy.start([sock])
        print(sock.getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await proxy.aclose()

    uvloop.run(run())


def is_answered(sock: socket.socket) -> bool:
    """Whether a response has arrived, or the connection has ended."""
    try:
        sock.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def burst(port: int, clients: int, addresses: int) -> list[socket.socket]:
    """Send as much as the proxy accepts. Returns the connections."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (32 * MIB)
    body = memoryview(bytes(SENT))
    waiting = selectors.DefaultSelector()
    sent: dict[socket.socket, int] = {}
    for number in range(clients):
        sock = socket.socket()
        sock.bind((f"127.0.1.{1 + number % addresses}", 0))
        sock.connect(("127.0.0.1", port))
        sock.sendall(head)
        sock.setblocking(False)
        sent[sock] = 0
        waiting.register(sock, selectors.EVENT_WRITE)
    while waiting.get_map():
        for key, _ in waiting.select():
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                sent[sock] += sock.send(body[sent[sock] : sent[sock] + MIB])
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                waiting.unregister(sock)
                continue
            if sent[sock] == SENT:
                waiting.unregister(sock)
    return list(sent)


def measure(clients: int, addresses: int, bound: int) -> None:
    command = [sys.executable, "-m", "scripts.bench", "bodies", "--serve", "--bound", str(bound)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        port = int(child.stdout.readline())
        process = psutil.Process(child.pid)

        def rss() -> float:
            return process.memory_info().rss / MIB

        print(f"{clients} clients at {addresses} addresses, bound {bound} MiB")
        print("| | RSS |\n|---|---:|")
        print(f"| before | {rss():.0f} MiB |")
        for round_ in (1, 2):
            connections = burst(port, clients, addresses)
            time.sleep(3)  # until lingering connections are closed
            refused = sum(map(is_answered, connections))
            print(f"| burst {round_}: {clients - refused} bodies held, {refused} refused | {rss():.0f} MiB |")
            for sock in connections:
                sock.close()
            time.sleep(3)
            print(f"| after it | {rss():.0f} MiB |")
        child.stdin.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--addresses", type=int, default=10)
    parser.add_argument("--bound", type=int, default=256, help="the proxy's limit for all bodies, in MiB")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> None:
    if args.serve:
        serve(args.bound)
    else:
        measure(args.clients, args.addresses, args.bound)
