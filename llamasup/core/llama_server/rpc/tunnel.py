"""The end of a tunnel on the side of llama-server: a loopback port that leads to a worker over mutual TLS.

A port is opened at the first use and stays until llamasup ends, because plans and running llama-servers name
it.
"""

from __future__ import annotations

import asyncio
import atexit
import socket
import threading

from llamasup.core.http.rpc_address import WorkerAddress, parse_worker
from llamasup.core.llama_server.rpc.relay import Relay, RelayLoop, Stream, client_context
from llamasup.core.llama_server.rpc.workers import TunnelFiles
from llamasup.errors import ConfigInvalid


class _Tunnel:
    """One tunnel. ``problem``: why the last connection failed; empty if it did not."""

    def __init__(self, address: WorkerAddress, files: TunnelFiles) -> None:
        """Open its port. Raises ConfigInvalid for an unusable file: it is an error of the settings."""
        client_context(files)

        async def connect() -> Stream:
            return await asyncio.open_connection(
                address.host, address.port, ssl=client_context(files), server_hostname=address.host
            )

        self.problem = ""
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.relay = Relay(self.listening, connect, on_problem=self._note)

    def _note(self, problem: str) -> None:
        self.problem = problem


class Tunnels:
    """The tunnels of this process. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._relays: RelayLoop | None = None
        self._open: dict[tuple[str, TunnelFiles], _Tunnel] = {}  # bounded by the config

    def port(self, name: str, files: TunnelFiles | None) -> int:
        """Return the loopback port that leads to the worker ``name``.

        Raises ConfigInvalid without certificates.
        """
        if files is None:
            raise ConfigInvalid(
                f"The RPC worker {name} needs certificates: TLS here is always mutual.",
                remedy="Set rpc_ca, rpc_cert and rpc_key (--rpc-ca, --rpc-cert, --rpc-key).",
            )
        with self._lock:
            found = self._open.get((name, files))
            if found is None:
                found = self._open[(name, files)] = _Tunnel(parse_worker(name), files)
                if self._relays is None:
                    self._relays = RelayLoop()
                    atexit.register(self.close)
                self._relays.start(found.relay.run())
        return found.relay.port

    def problem(self, name: str, files: TunnelFiles | None) -> str:
        """Return the reason why the last connection of the tunnel failed.

        Returns an empty text if it did not, or there is no tunnel.
        """
        with self._lock:
            found = None if files is None else self._open.get((name, files))
        return "" if found is None else found.problem

    def close(self) -> None:
        """End all tunnels and their connections. A later use opens new ones."""
        with self._lock:
            relays, opened = self._relays, tuple(self._open.values())
            self._relays, self._open = None, {}
        if relays is not None:
            relays.close()
        for tunnel in opened:
            tunnel.listening.close()


TUNNELS = Tunnels()
