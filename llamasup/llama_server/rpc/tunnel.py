"""The end of a tunnel on the side of llama-server: a loopback port that leads to a worker over mutual TLS.

The relays have a thread with an event loop of their own: weights of many gigabytes pass through them, which
would delay the streams of clients in the main loop. A port is opened at the first use and stays until
llamasup ends, because plans and running llama-servers name it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from llamasup.errors import ConfigInvalid
from llamasup.http.rpc_address import WorkerAddress, parse_worker
from llamasup.llama_server.rpc.relay import Relay, Stream, client_context
from llamasup.llama_server.rpc.workers import TunnelFiles

__all__ = ["TUNNELS", "Tunnels"]

_START_TIMEOUT_S = 10.0


class _Tunnel:
    """One open tunnel. ``problem``: why the last connection failed; empty if it did not."""

    def __init__(self) -> None:
        self.port = 0
        self.problem = ""

    async def open(self, address: WorkerAddress, files: TunnelFiles) -> None:
        context = client_context(files)

        async def connect() -> Stream:
            return await asyncio.open_connection(
                address.host, address.port, ssl=context, server_hostname=address.host
            )

        server = await asyncio.start_server(Relay(connect, self._note), "127.0.0.1", 0)
        self._server = server  # else it would be collected
        self.port = server.sockets[0].getsockname()[1]

    def _note(self, problem: str) -> None:
        self.problem = problem


class Tunnels:
    """The tunnels of this process. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
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

    def _run(self, work: Any) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rpc-tunnels", daemon=True).start()
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_TIMEOUT_S)


TUNNELS = Tunnels()
