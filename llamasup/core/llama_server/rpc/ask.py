"""Asks RPC workers for their devices with ``llama-server --rpc ADDRESS --list-devices``.

llama.cpp's protocol has no stable version, so only a llama-server can tell whether this worker suits it. The
last answers are kept: a worker that serves a llama-server answers no other.

A ``tls://`` worker is asked through a loopback port that leads to it over mutual TLS. A port is opened at the
first use and stays until llamasup ends, because plans and running llama-servers name it.
"""

from __future__ import annotations

import asyncio
import atexit
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.http.address import WorkerAddress, parse_worker
from llamasup.core.llama_server.inspect import Runtime, run_runtime
from llamasup.core.llama_server.rpc.in_use import USED
from llamasup.core.llama_server.rpc.relay import Relay, RelayLoop, Stream, client_context
from llamasup.core.llama_server.rpc.workers import TunnelFiles, WorkerAnswer
from llamasup.core.system.hardware.devices import Device, parse_devices, problem_in
from llamasup.core.system.process.run_once import CommandResult
from llamasup.errors import ConfigInvalid, UsageInvalid

ESTIMATE_TIMEOUT_S = 3.0
"""An answer takes 60 ms on this machine (b11434); a worker that hangs or is busy never answers."""
START_TIMEOUT_S = 10.0
"""At a start, which does without a worker that does not answer: a machine that swaps may need seconds."""
_NO_RPC = "RPC not supported in this build"
_KEPT_S = 2.0
"""The time for which an answer is new: one start asks several times."""


class _Kept(Struct, frozen=True):
    at_s: float
    answer: WorkerAnswer


_Key = tuple[str, str, TunnelFiles | None]
"""The runtime, the worker, and the certificates: another certificate may be refused."""

_kept: dict[_Key, _Kept] = {}  # bounded by the config
_lock = threading.Lock()


def ask_workers(
    runtime: Runtime,
    environ: Mapping[str, str],
    workers: Sequence[str],
    files: TunnelFiles | None,
    *,
    again: bool = False,
    timeout_s: float = ESTIMATE_TIMEOUT_S,
    attempts: int = 1,
) -> tuple[WorkerAnswer, ...]:
    """Return the answers of ``workers``, in their order, all asked together. Blocks for ``timeout_s`` at
    most, and again for each further attempt with the workers that are not ready.

    ``again``: do not use a kept answer. ``files``: for the workers with a tunnel. Raises UsageInvalid.
    """
    now_s = time.monotonic()
    recent = {} if again else {name: _recent((runtime.path, name, files), now_s) for name in workers}
    known = {name: answer for name, answer in recent.items() if answer is not None}
    for name in workers:
        if (user := USED.user_of(name)) is not None:
            problem = f"{user} of this llamasup uses it"
            busy = WorkerAnswer(name, _endpoint(name, files), "busy", problem=problem)
            known[name] = _keep((runtime.path, name, files), busy, now_s)
    wanted = [name for name in workers if name not in known]
    for _ in range(attempts):
        if wanted:
            known |= _ask(runtime, environ, wanted, files, timeout_s)
            wanted = [name for name in wanted if known[name].state != "ready"]
    return tuple(known[name] for name in workers)


def _ask(
    runtime: Runtime,
    environ: Mapping[str, str],
    names: Sequence[str],
    files: TunnelFiles | None,
    timeout_s: float,
) -> dict[str, WorkerAnswer]:
    endpoints = [_endpoint(name, files) for name in names]
    # llama-server lists the devices of those workers only that come before --list-devices (b11434).
    commands = [("--rpc", endpoint, "--list-devices") for endpoint in endpoints]
    results = run_runtime(runtime, environ, commands, timeout_s)
    known = {}
    for name, endpoint, result in zip(names, endpoints, results, strict=True):
        answer = _read(name, endpoint, result, timeout_s, TUNNELS.problem(name, files))
        known[name] = _keep((runtime.path, name, files), answer, time.monotonic())
    return known


def _endpoint(name: str, files: TunnelFiles | None) -> str:
    address = parse_worker(name)
    if not address.tunnelled:
        return str(address)
    return f"127.0.0.1:{TUNNELS.port(name, files)}"


def _read(name: str, endpoint: str, result: CommandResult, timeout_s: float, tunnel: str) -> WorkerAnswer:
    # Also an integrated GPU has memory of its own here: that of the worker's machine.
    devices = tuple(
        replace(device, remote=True, shares_host_memory=False)
        for device in parse_devices(result.stdout)
        if device.description == endpoint
    )
    if devices:
        return WorkerAnswer(name, endpoint, "ready", devices)
    if _NO_RPC in result.stderr:  # b11434 lists --rpc in its help also without it
        raise UsageInvalid(
            "rpc is not supported: this llama-server was built without RPC.",
            remedy="Use a llama-server that was built with GGML_RPC=ON (--runtime), or leave rpc out.",
        )
    if tunnel:
        return WorkerAnswer(name, endpoint, "absent", problem=tunnel)
    if result.too_slow:
        problem = f"no answer within {timeout_s:g} s; it hangs, or another llama-server uses it"
        return WorkerAnswer(name, endpoint, "busy", problem=problem)
    if "Failed to connect" in result.stderr:
        return WorkerAnswer(name, endpoint, "absent", problem="it accepts no connection")
    why = problem_in(result.stderr) or f"llama-server --list-devices ended with {result.exit_code}"
    return WorkerAnswer(name, endpoint, "absent", problem=why)


def _recent(key: _Key, now_s: float) -> WorkerAnswer | None:
    with _lock:
        kept = _kept.get(key)
    if kept is None or now_s - kept.at_s > _KEPT_S or kept.answer.state != "ready":
        return None
    return kept.answer


def _keep(key: _Key, answer: WorkerAnswer, now_s: float) -> WorkerAnswer:
    """Keep an answer with devices; a busy worker gets its last ones."""
    with _lock:
        if answer.devices:
            _kept[key] = _Kept(now_s, answer)
            return answer
        kept = _kept.get(key)
        if kept is not None:  # the next start asks again
            _kept[key] = replace(kept, at_s=float("-inf"))
    devices: tuple[Device, ...] = () if kept is None else kept.answer.devices
    return replace(answer, devices=devices) if answer.state == "busy" else answer


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
