"""The service of ``llamasup rpc-worker``: one rpc-server, supervised as a llama-server is.

It uses the same state machine and runner. A worker has no HTTP, so its prober connects, and closes: a worker
that works does the same at once. It serves one client at a time, so while one is connected nothing is sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.http.address import TcpAddress, is_loopback, refuse_reachable
from llamasup.core.llama_server.answers import ContextWindow, Health
from llamasup.core.llama_server.client import PROBE_TIMEOUT_S, Prober
from llamasup.core.llama_server.rpc.find import FoundWorker, find_rpc_server, worker_environment
from llamasup.core.llama_server.rpc.relay import Relay, RelayLoop, Stream, server_context
from llamasup.core.llama_server.rpc.worker_line import WorkerOptions, check_memory, worker_line
from llamasup.core.llama_server.rpc.workers import TunnelFiles
from llamasup.core.observability.observer import Observer
from llamasup.core.observability.own_log import OwnLog
from llamasup.core.proxy.listeners.bind import bind
from llamasup.core.queueing.request_queue import RequestQueue
from llamasup.core.settings.kinds import Listen
from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.events import (
    Bus,
    PublishedEvent,
    Ready,
    ServerExited,
    ServerWarned,
    Stopped,
    as_json,
)
from llamasup.core.supervision.liveness import LivenessPolicy
from llamasup.core.supervision.not_serving import failure_of
from llamasup.core.supervision.plan_protocol import ChildPlan, FixedPlanner, WorkerPlan
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import (
    Instance,
    KillRequested,
    Policy,
    RestartRequested,
    StartRequested,
    State,
    StopRequested,
)
from llamasup.core.system.hardware.probe import hardware
from llamasup.core.system.process.guardian import guarded_run_folder
from llamasup.core.system.process.log_tail import LogFiles
from llamasup.core.system.process.platform import free_loopback_port
from llamasup.core.system.process.run_folder import ReadyFile, remove_stale
from llamasup.core.system.process.sweep import record_ready_file, sweep
from llamasup.errors import LlamasupError, UnsafeBind, UsageInvalid

__all__ = ["NAME", "RpcWorker", "RpcWorkerOptions", "listening"]

NAME = "rpc-worker"
_FIRST_PROBE_S = 0.01
_LONGEST_PROBE_S = 0.5
_WARN_EVERY_S = 60.0


class RpcWorkerOptions(Struct, frozen=True, kw_only=True):
    """``tunnel``: HOST:PORT of the TLS listener; None: clients connect to ``host`` and ``port``."""

    host: str = "127.0.0.1"
    port: int = 50_052
    runtime: str | None = None
    worker: WorkerOptions = WorkerOptions()
    tunnel: TcpAddress | None = None
    files: TunnelFiles | None = None
    ready_file: Path | None = None
    stop_timeout_s: float = 10.0
    restart: RestartPolicy = RestartPolicy()
    liveness: LivenessPolicy = LivenessPolicy()

    @property
    def policy(self) -> Policy:
        # A worker has no requests to drain, and its first token is that of its llama-server.
        return Policy(
            warm_up=False,
            stop_timeout_s=self.stop_timeout_s,
            restart=self.restart,
            liveness=self.liveness,
        )


class WorkerPlanner(FixedPlanner):
    """Plans each generation with the memory that is free then."""

    def __init__(
        self, options: RpcWorkerOptions, found: FoundWorker, folder: Path, environ: Mapping[str, str]
    ) -> None:
        self._options = options
        self._found = found
        self._folder = folder
        self._environ = environ

    def plan(self, generation: int) -> WorkerPlan:
        """Raises DoesNotFit, PortInUse or PortNotAllowed: for a port, rpc-server ends with 0 (b11434)."""
        options, machine = self._options, hardware()
        host, port = ("127.0.0.1", free_loopback_port()) if options.tunnel else (options.host, options.port)
        for listening in bind(host, port):
            listening.close()
        line = worker_line((self._found.path,), self._found.capabilities, machine, options.worker, host, port)
        return WorkerPlan(
            line.argv,
            worker_environment(self._environ, self._found.path, str(self._folder)),
            address=TcpAddress(host, port),
            limit_bytes=line.limit_bytes,
            reasons=line.reasons,
        )


class WorkerProber(Prober):
    """Whether an rpc-server answers. ``pid``: None if it is not known yet."""

    def __init__(self, address: TcpAddress, pid: Callable[[], int | None]) -> None:
        super().__init__(address)
        self._address = address
        self._pid = pid

    async def until_healthy(self, log_ready: asyncio.Event, on_loading: Callable[[], None]) -> None:
        delay_s = _FIRST_PROBE_S
        while await self.health() is not Health.OK:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_PROBE_S)

    async def health(self, timeout_s: float = PROBE_TIMEOUT_S) -> Health:
        """A worker that serves a client answers no other: its connection is the sign that it serves."""
        if await asyncio.to_thread(self._serves):
            return Health.OK
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
                try:
                    writer.write_eof()
                    await reader.read(1)  # the worker also closes
                finally:
                    writer.transport.abort()
        except (OSError, TimeoutError):
            # A client may have connected first.
            return Health.OK if await asyncio.to_thread(self._serves) else Health.SILENT
        return Health.OK

    def _serves(self) -> bool:
        """Whether a client is connected: its connection is accepted, and its other end is not closed."""
        pid = self._pid()
        if pid is None:
            return False
        with suppress(psutil.Error):
            connections = psutil.Process(pid).net_connections("tcp")
            return any(
                each.status == psutil.CONN_ESTABLISHED and each.laddr.port == self._address.port
                for each in connections
            )
        return False

    async def context_window(self) -> ContextWindow | None:
        return None


class RpcWorker:
    """The service. The constructor finds every error that can be found before a process is started.

    Raises UnsafeBind, UsageInvalid, ConfigInvalid, RuntimeMissing, BrokenRuntime or DoesNotFit.
    """

    in_flight = 0
    drain_timeout_s = 0.0

    def __init__(self, options: RpcWorkerOptions, bus: Bus, environ: Mapping[str, str] | None = None) -> None:
        check_listen(options)
        if options.files is not None:
            server_context(options.files)  # an unusable file is an error of the start
        sweep()
        self.options = options
        self._environ = os.environ if environ is None else environ
        self.launch = find_rpc_server(options.runtime, self._environ)
        machine = hardware()
        check_memory(machine, options.worker)
        worker_line((self.launch.path,), self.launch.capabilities, machine, options.worker, "", 1)
        if options.ready_file is not None:
            remove_stale(options.ready_file)
        self.on_log: Callable[[list[bytes]], None] | None = None
        self.on_asked: Callable[[str, str], None] | None = None
        self.own_log = OwnLog()
        self.stops_asked = 0
        self.runner: InstanceRunner | None = None
        self._bus = bus
        self._warned_s = float("-inf")

    def observe(self, observer: Observer) -> None:
        """Call ``event`` of the observer with each event: a worker has no requests."""
        if observer.event is not None:
            self._bus.listen(observer.event)

    @property
    def address(self) -> TcpAddress:
        """The address to which clients connect."""
        return self.options.tunnel or TcpAddress(self.options.host, self.options.port)

    def ask_stop(self) -> None:
        """Stop; on the second call at once."""
        self.stops_asked += 1
        if self.runner is not None:
            self.runner.post(StopRequested() if self.stops_asked == 1 else KillRequested())

    def ask_reload(self) -> None:
        """Restart the worker, and with it the llama-server that uses it."""
        if self.runner is not None and not self.stops_asked:
            self.runner.post(RestartRequested())

    async def run(self) -> None:
        """Serve until a stop is requested, and clean up.

        Raises PortInUse, PortNotAllowed, ServerFailed if rpc-server cannot be started, GaveUp if it crashed
        too often.
        """
        options, logs = self.options, LogFiles()
        ready_file = None if options.ready_file is None else ReadyFile(options.ready_file)
        tunnel = [] if options.tunnel is None else bind(options.tunnel.host, options.tunnel.port)
        relays = RelayLoop() if tunnel else None
        error: LlamasupError | None = None
        try:
            with guarded_run_folder() as (folder, guardian):
                if ready_file is not None:
                    record_ready_file(folder, ready_file.path)
                runner = self.runner = self._runner(folder, logs)
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(runner.run(), name=NAME)]
                    if relays is not None:
                        running += [
                            tasks.create_task(self._accept(each, relays), name="tunnel") for each in tunnel
                        ]
                    if not self.stops_asked:
                        runner.post(StartRequested())
                    try:
                        await runner.until(lambda now: now.state is State.READY or self._is_over(now))
                        await asyncio.to_thread(guardian.wait_until_started)
                        if runner.instance.state is State.READY:
                            self._report_ready(ready_file, tunnel)
                        await runner.until(self._is_over)
                        if runner.instance.state is State.FAILED:
                            error = failure_of(runner.instance, log=runner.log_path)
                    finally:
                        for task in running:
                            task.cancel()
        finally:
            if relays is not None:
                await asyncio.to_thread(relays.close)
            for each in tunnel:
                each.close()
            logs.close()
            if ready_file is not None:
                ready_file.remove()
            self._bus.publish(Stopped())
        if error is not None:
            error.message, error.remedy = _text_of_worker(error.message), _text_of_worker(error.remedy)
            raise error

    def _is_over(self, instance: Instance) -> bool:
        is_stopped = instance.state is State.STOPPED and self.stops_asked > 0
        return is_stopped or (instance.state is State.FAILED and instance.is_settled)

    def _report_ready(self, ready_file: ReadyFile | None, tunnel: Sequence[socket.socket]) -> None:
        address = self.address
        if tunnel:  # port 0 was any free one
            address = replace(address, port=tunnel[0].getsockname()[1])
        ready = Ready(_Shown(address.host, address.port, tunnel != []), os.getpid(), (NAME,))
        if ready_file is not None:
            ready_file.write(as_json(ready))
        self._bus.publish(ready)
        if not tunnel and not is_loopback(self.options.host):  # other machines reach it
            self._bus.publish(
                ServerWarned(
                    NAME,
                    1,
                    f"Every program that reaches {self.options.host} can use this worker: RPC has no keys.",
                    "Use --tunnel in a network that you share with others.",
                )
            )

    def _runner(self, folder: Path, logs: LogFiles) -> InstanceRunner:
        bus = Bus()
        bus.listen(lambda event: self._bus.publish(_renamed(event)))

        def prober(plan: ChildPlan) -> Prober:
            assert isinstance(plan, WorkerPlan)
            return WorkerProber(plan.address, lambda: runner.pid)

        runner = InstanceRunner(
            NAME,
            WorkerPlanner(self.options, self.launch, folder, self._environ),
            policy=self.options.policy,
            bus=bus,
            queue=RequestQueue(lambda: runner.unavailable(), timeout_s=0.0),
            work_folder=folder,
            log_path=logs.path_of(NAME),
            prober=prober,
            log_passed_on=self.on_log,
        )
        return runner

    async def _accept(self, listening: socket.socket, relays: RelayLoop) -> None:
        """Serve one socket of the tunnel."""
        loop = asyncio.get_running_loop()

        async def connect() -> Stream:
            plan = None if self.runner is None else self.runner.plan
            if not isinstance(plan, WorkerPlan):
                raise ConnectionRefusedError("rpc-server does not run")
            return await asyncio.open_connection(plan.address.host, plan.address.port)

        def on_problem(problem: str) -> None:
            loop.call_soon_threadsafe(self._warn_of_tunnel, problem)

        relay = Relay(listening, connect, files=self.options.files, on_problem=on_problem)
        await asyncio.wrap_future(relays.start(relay.run()))

    def _warn_of_tunnel(self, problem: str) -> None:
        """Once a minute at most: any client that reaches the port can cause problems."""
        now_s = time.monotonic()
        if not problem or self.runner is None or now_s - self._warned_s < _WARN_EVERY_S:
            return
        self._warned_s = now_s
        self._bus.publish(
            ServerWarned(
                NAME,
                self.runner.instance.generation,
                f"A connection through the tunnel failed: {problem}.",
                "Further ones are not reported for a minute. Check the certificates of both ends.",
            )
        )


class _Shown(TcpAddress, frozen=True):
    """An address in the form of a model's ``rpc:``."""

    @property
    def url(self) -> str:
        return f"{'tls' if self.tls else 'rpc'}://{self.authority}"


def listening(
    host: str | None,
    port: int | None,
    tunnel: str | None,
    *,
    cert: Path | None = None,
    key: Path | None = None,
    client_ca: Path | None = None,
) -> dict[str, Any]:
    """The options about where to listen, of those on the command line. Raises UsageInvalid."""
    files = {"--cert": cert, "--key": key, "--client-ca": client_ca}
    if tunnel is None:
        if given := [name for name, path in files.items() if path is not None]:
            raise UsageInvalid(
                f"{' and '.join(given)} would have no effect: without --tunnel there is no TLS.",
                remedy="Add --tunnel HOST:PORT, or leave the certificates out.",
            )
        plain: dict[str, Any] = {}
        if host is not None:
            plain["host"] = "127.0.0.1" if host.lower() == "localhost" else host  # rpc-server knows no names
        if port is not None:
            plain["port"] = port
        return plain
    if host is not None or port is not None:
        raise UsageInvalid(
            "--tunnel excludes --host and --port: behind a tunnel, rpc-server listens on loopback.",
            remedy="Give the address and the port to --tunnel HOST:PORT alone.",
        )
    address = Listen().parse(tunnel)
    if not isinstance(address, TcpAddress):
        raise UsageInvalid(
            f"--tunnel {tunnel} is a socket file, which other machines cannot reach.",
            remedy="Give HOST:PORT such as 0.0.0.0:7000.",
        )
    if cert is None or key is None or client_ca is None:
        missing = [name for name, path in files.items() if path is None]
        raise UsageInvalid(
            f"--tunnel also needs {' and '.join(missing)}: both ends of the tunnel show a certificate.",
            remedy="Give three PEM files. That of --client-ca signed the certificates of the clients.",
        )
    return {
        "tunnel": address,
        "files": TunnelFiles(*(str(path.absolute()) for path in (client_ca, cert, key))),
    }


def check_listen(options: RpcWorkerOptions) -> None:
    """Raises UnsafeBind for an address that is not private, UsageInvalid for one that is impossible."""
    if options.tunnel is not None:
        return
    try:
        refuse_reachable(options.host)
    except UsageInvalid as error:
        raise UnsafeBind(error.message, remedy=error.remedy) from None
    if ":" in options.host:
        raise UsageInvalid(
            f"{options.host} is an IPv6 address, which llama.cpp's RPC does not support.",
            remedy="Give an IPv4 address, or use --tunnel.",
        )
    if not 0 < options.port <= 65_535:
        raise UsageInvalid(f"--port {options.port} is not a port.", remedy="Give 1 to 65535.")


def _text_of_worker(text: str) -> str:
    """The supervision speaks of llama-server, and of a log that ``llamasup logs`` shows."""
    for of_server, of_worker in _WORDS:
        text = text.replace(of_server, of_worker)
    return text


_WORDS = (
    ("/health requests", "connections"),
    ("See its log (llamasup logs). ", ""),
    ("llama-server", "rpc-server"),
)


def _renamed(event: PublishedEvent) -> PublishedEvent:
    if not isinstance(event, ServerExited):
        return event
    diagnosis: Any = event.diagnosis
    changed = replace(
        diagnosis, message=_text_of_worker(diagnosis.message), remedy=_text_of_worker(diagnosis.remedy)
    )
    return replace(event, diagnosis=changed)
