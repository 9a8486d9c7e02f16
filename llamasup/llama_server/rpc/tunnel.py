"""The end of a tunnel on the side of llama-server: a loopback port that leads to a worker over mutual TLS.

The relays have a thread with an event loop of their own: weights of many gigabytes pass through them, which
would delay the streams of clients in the main loop. A port is opened at the first use and stays until
llamasup ends, because plans and running llama-servers name it.
"""

from __future__ import annotations

import asyncio
import atexit
import socket
import threading
from collections.abc import Coroutine
from typing import Any

from llamasup.errors import ConfigInvalid
from llamasup.http.rpc_address import WorkerAddress, parse_worker
from llamasup.llama_server.rpc.relay import Relay, Stream, client_context
from llamasup.llama_server.rpc.workers import TunnelFiles

__all__ = ["TUNNELS", "Tunnels"]

_TIMEOUT_S = 10.0


class _Tunnel:
    """One open tunnel. ``problem``: why the last connection failed; empty if it did not."""

    def __init__(self) -> None:
        self.port = 0
        self.problem = ""

    async def open(self, address: WorkerAddress, files: TunnelFiles) -> None:
        client_context(files)  # an unusable file is an error of the settings

        async def connect() -> Stream:
            return await asyncio.open_connection(
                address.host, address.port, ssl=client_context(files), server_hostname=address.host
            )

        self._listening = socket.create_server(("127.0.0.1", 0))
        relay = Relay(self._listening, connect, on_problem=self._note)
        self.port = relay.port
        self._running = asyncio.ensure_future(relay.run())  # noqa: TID251 - ``_serve`` ends it

    def close(self) -> None:
        """After its loop has ended."""
        self._listening.close()

    def _note(self, problem: str) -> None:
        self.problem = problem


class Tunnels:
    """The tunnels of this process. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._open: dict[tuple[str, TunnelFiles | None], _Tunnel] = {}  # bounded by the config

    def port(self, name: str, files: TunnelFiles | None) -> int:
        """The loopback port that leads to the worker ``name``. Raises ConfigInvalid without certificates."""
        if files is None:
            raise ConfigInvalid(
                f"The RPC worker {name} needs certificates: TLS here is always mutual.",
                remedy="Set rpc_ca, rpc_cert and rpc_key (--rpc-ca, --rpc-cert, --rpc-key).",
            )
        with self._lock:
            found = self._open.get((name, files))
            if found is None:
                found = _Tunnel()
                self._run(found.open(parse_worker(name), files))
                self._open[(name, files)] = found
        return found.port

    def problem(self, name: str, files: TunnelFiles | None) -> str:
        """Why the last connection of the tunnel failed; empty if it did not, or there is no tunnel."""
        with self._lock:
            found = self._open.get((name, files))
        return "" if found is None else found.problem

    def close(self) -> None:
        """End all tunnels and their connections. A later use opens new ones."""
        with self._lock:
            loop, thread, opened = self._loop, self._thread, tuple(self._open.values())
            self._loop, self._thread, self._open = None, None, {}
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_TIMEOUT_S)
        for tunnel in opened:
            tunnel.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        if self._loop is None:
            self._loop = asyncio.SelectorEventLoop()  # a relay needs add_reader
            self._thread = threading.Thread(
                target=_serve, args=(self._loop,), name="rpc-tunnels", daemon=True
            )
            self._thread.start()
            atexit.register(self.close)
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_TIMEOUT_S)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run ``loop`` until it is stopped, and then end its tasks."""
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    finally:
        loop.close()


TUNNELS = Tunnels()
