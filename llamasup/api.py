"""Serving as a Python program uses it: options in, a service that runs until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from ssl import SSLContext

from llamasup.control.app import ControlServer
from llamasup.control.one_model import OneModel
from llamasup.core.address import addresses, is_loopback, why_no_host
from llamasup.core.errors import FolderUnusable, UsageInvalid
from llamasup.core.failure import failure_of
from llamasup.core.instance import Instance, KillAsked, Policy, RestartAsked, StartAsked, State, StopAsked
from llamasup.core.model_spec import ModelSpec
from llamasup.core.settings import Settings
from llamasup.core.slow_requests import SlowLog, slow_after, tell_slow
from llamasup.effects.access_log import AccessLog, check_log_file
from llamasup.effects.descriptors import raise_limit
from llamasup.effects.files import private_folder, state_folder
from llamasup.effects.guardian import Guardian, guarded_run_folder
from llamasup.effects.keys import KeyFile
from llamasup.effects.leftovers import remember_ready_file, sweep
from llamasup.effects.ready_file import ReadyFile, clear_place
from llamasup.jobs import Job, ServiceOptions, WrapOptions, given_front, refuse_outside, wrap_job
from llamasup.proxy.connections import most_connections
from llamasup.proxy.front import Front, listen
from llamasup.proxy.listener import Proxy
from llamasup.proxy.tls import tls_context
from llamasup.runtime.access_line import access_line
from llamasup.runtime.events import Bus, Notice, Ready, ServerExited, StateChanged, Stopped, as_json
from llamasup.runtime.instance import STOPPING, InstanceRunner
from llamasup.runtime.launch import Launch, prepare
from llamasup.runtime.metrics import Metrics, RequestRecord
from llamasup.runtime.planner import Planner
from llamasup.runtime.served import ServedModel
from llamasup.runtime.supervisor import Supervisor
from llamasup.runtime.wrapped import Wrapping

__all__ = ["RunOptions", "Service", "WrapOptions", "is_loopback"]


_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
STANDARD_ERROR = Path("-")
_NOWHERE = Path("/nonexistent")


@dataclass(frozen=True, slots=True)
class RunOptions(ServiceOptions):
    """What ``llamasup run`` can be told. ``host`` is a name, an address, a path that ends in ``.sock``, or
    several with commas between them; port 0 takes any free one; ``tls_cert`` and ``tls_key`` are PEM files,
    both or neither.
    """

    model: str
    settings: Settings = field(default_factory=Settings)
    host: str = "127.0.0.1"
    port: int = 8080
    tls_cert: Path | None = None
    tls_key: Path | None = None
    runtime: str | None = None
    api_keys: tuple[str, ...] = ()
    """Keys that may infer, beside those of ``api_key_file``."""
    api_key_file: Path | None = None

    @property
    def policy(self) -> Policy:
        return self.shared_policy()


class Service:
    """One model, served. Preparing it finds every mistake that can be found before anything is started.

    Raises ModelMissing, ModelInvalid, RuntimeMissing, DoesNotFit, UsageInvalid, ConfigInvalid or UnsafeBind.
    """

    def __init__(
        self, options: RunOptions | WrapOptions, bus: Bus, environ: Mapping[str, str] | None = None
    ) -> None:
        if isinstance(options, RunOptions):
            refuse_bad_address(options)
            key_file = None if options.api_key_file is None else KeyFile(options.api_key_file)
        if options.access_log is not None and options.access_log != STANDARD_ERROR:
            check_log_file(options.access_log)
        # First of all: what an earlier run left alive has the memory that this one asks for.
        for swept in sweep():
            _log.warning("%s", swept)
        self.options = options
        self.launch: Launch | Wrapping
        if isinstance(options, RunOptions):
            self.launch = launch = prepare(
                options.model,
                options.settings,
                runtime=options.runtime,
                environ=os.environ if environ is None else environ,
            )
            Planner(launch, _NOWHERE).check()
            self._job = _run_job(options, launch, key_file)
        else:
            self.launch = options.wrapping
            self._job = wrap_job(options)
        if options.ready_file is not None:
            clear_place(options.ready_file)
        self.on_request: Callable[[RequestRecord], None] | None = None
        self.on_slow_request: Callable[[RequestRecord, int], None] | None = None
        """Hears of slow requests, at a bounded rate: with how many since the last one it did not hear of."""
        self.on_log: Callable[[list[bytes]], None] | None = None
        """Gets llama-server's output line by line, in a thread of its own; must neither wait nor raise."""
        self.on_asked: Callable[[str], None] | None = None
        """Hears what the control API asks for, before it is done: see ``control.one_model.Owner``."""
        self._bus = bus
        self._metrics = Metrics()
        self._runner: InstanceRunner | None = None
        self._proxy: Proxy | None = None
        self._stops_asked = 0
        self._load_began_s = 0.0
        self._access_log: AccessLog[RequestRecord] | None = None
        self._slow = SlowLog(time.monotonic())

    @property
    def runner(self) -> InstanceRunner | None:
        """The instance, once the service runs."""
        return self._runner

    @property
    def stops_asked(self) -> int:
        return self._stops_asked

    def ask_stop(self) -> None:
        """Stop kindly; asked again, stop now. For the event loop's thread, at any time."""
        self._stops_asked += 1
        if self._runner is not None:
            self._runner.post(StopAsked() if self._stops_asked == 1 else KillAsked())

    def control_asks(self, what: str) -> None:
        if self.on_asked is not None:
            self.on_asked(what)

    def ask_restart(self) -> None:
        """Let the requests in flight finish, then start the server anew. Nothing while stopping."""
        if self._runner is not None and not self._stops_asked:
            self._runner.post(RestartAsked())

    async def run(self) -> None:
        """Serve until asked to stop, and leave nothing behind.

        Raises PortInUse or PortNotAllowed before anything is started, ServerFailed when llama-server
        cannot be started, GaveUp when it crashed too often.
        """
        options = self.options
        front = self._job.listen()
        ready_file = None if options.ready_file is None else ReadyFile(options.ready_file)
        if (path := options.access_log) is not None:
            self._access_log = AccessLog(None if path == STANDARD_ERROR else path, access_line)
            self._metrics.lines_dropped = self._access_log.dropped
        try:
            with guarded_run_folder() as (folder, guardian):
                if ready_file is not None:
                    remember_ready_file(folder, ready_file.path)
                last = await self._serve(front, folder, guardian, ready_file)
        finally:
            front.close()
            if self._access_log is not None:
                self._access_log.close()
            if ready_file is not None:
                ready_file.remove()
            self._bus.publish(Stopped())
        if last.state is State.FAILED:
            raise failure_of(last, self._exit_code_of_child())

    async def _serve(
        self, front: Front, folder: Path, guardian: Guardian, ready_file: ReadyFile | None
    ) -> Instance:
        job = self._job
        policy = self.options.policy
        served = ServedModel(ModelSpec(job.name, "", job.aliases), policy=policy)
        log_path = _log_path(job.name)
        runner = self._runner = InstanceRunner(
            job.name,
            job.planner(folder),
            aliases=job.aliases,
            policy=policy,
            bus=self._bus,
            room=served.room,
            work_folder=folder,
            log_path=log_path,
            cwd=job.cwd,
            prober=job.prober,
            log_passed_on=self.on_log,
        )
        served.add(runner)
        supervisor = Supervisor(served, front.address, os.getpid(), job.facts)
        controlled = OneModel(self, supervisor, self._bus, log_path)
        control = ControlServer(folder / "control.sock", controlled, self._metrics)
        limits = job.proxy.limits
        most = min(limits.connections, most_connections(raise_limit()))
        proxy = self._proxy = Proxy(
            supervisor,
            replace(job.proxy, limits=replace(limits, connections=most)),
            metrics=self._metrics,
            control=control.endpoint,
            on_finished=self._finished,
        )
        self._bus.listen(self._notice)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(runner.run(), name=f"{job.name}/run")
            try:
                control.start(tasks)
                runner.post(StartAsked())
                for stop in (StopAsked(), KillAsked())[: self._stops_asked]:
                    runner.post(stop)
                await runner.reached(State.STARTING)
                # No earlier: a request must find a model that it may wait for.
                await proxy.start(front.sockets, tls=front.tls)
                while (await runner.until(self._is_ready_or_over)).state is State.READY:
                    await asyncio.to_thread(guardian.established)
                    if runner.instance.state is not State.READY:
                        continue  # it crashed before we came round to say so
                    ready = Ready(front.address, os.getpid(), (job.name,))
                    if ready_file is not None:
                        ready_file.write(as_json(ready))
                    self._bus.publish(ready)
                    break
                return await runner.until(self._is_over)
            finally:
                # The control API first: its answers and streams come to their ends through the proxy.
                for close in (control.aclose, proxy.aclose):
                    try:
                        async with asyncio.timeout(CLOSE_TIMEOUT_S):
                            await close()
                    except Exception:
                        _log.exception("closing failed")  # the child must be put down all the same
                served.shut(STOPPING)
                running.cancel()

    def _is_over(self, instance: Instance) -> bool:
        """One that is stopped, and nobody has asked us to stop, is unloaded: it may be loaded again."""
        return instance.at_rest and (instance.state is State.FAILED or self._stops_asked > 0)

    def _is_ready_or_over(self, instance: Instance) -> bool:
        return instance.state is State.READY or self._is_over(instance)

    def _exit_code_of_child(self) -> int | None:
        """As a shell would have seen it; None where it does not decide how we end."""
        exit_ = self._runner.last_exit if self._runner and self._job.passes_exit_code else None
        if exit_ is None or exit_.signal is None:
            return None if exit_ is None else exit_.code
        return 128 + getattr(signal, exit_.signal, 0)

    def _notice(self, notice: Notice) -> None:
        match notice:
            case StateChanged(_, State.STARTING, _):
                self._load_began_s = asyncio.get_running_loop().time()
            case StateChanged(model, State.READY, _):
                self._metrics.observe_load(model, asyncio.get_running_loop().time() - self._load_began_s)
            case StateChanged(_, State.DRAINING | State.STOPPING, _) if self._stops_asked:
                if self._proxy is not None:
                    self._proxy.drain()
            case ServerExited(model, _, _, diagnosis, restart_in_s) if restart_in_s is not None:
                self._metrics.count_restart(model, diagnosis.cause)
            case _:
                pass

    def _finished(self, record: RequestRecord) -> None:
        if self._access_log is not None:
            self._access_log.write(record)
        if self.on_request is not None:
            self.on_request(record)
        limit_s = self.options.slow_request_s
        is_for_model = record.model or record.outcome == "unavailable"
        if limit_s and is_for_model and slow_after(record.first_byte_s, record.duration_s) > limit_s:
            left_out = self._slow.left_out
            self._slow, told = tell_slow(self._slow, time.monotonic())
            if told and self.on_slow_request is not None:
                self.on_slow_request(record, left_out)


def _run_job(options: RunOptions, launch: Launch, key_file: KeyFile | None) -> Job:
    tls = _tls(options)
    return Job(
        name=launch.model_id,
        aliases=launch.aliases,
        planner=lambda folder: Planner(launch, folder),
        facts=launch.model,
        listen=lambda: (
            given_front(options.sockets, tls)
            if options.sockets
            else listen(addresses(options.host), options.port, tls=tls)
        ),
        proxy=replace(options.shared_proxy(), api_keys=options.api_keys, key_file=key_file),
    )


def _tls(options: RunOptions) -> SSLContext | None:
    certificate, key = options.tls_cert, options.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, missing = ("--tls-key", "--tls-cert") if certificate is None else ("--tls-cert", "--tls-key")
        raise UsageInvalid(f"{given} without {missing}.", remedy="TLS takes both files: give the other one.")
    if any(host.endswith(".sock") for host in addresses(options.host)) and not options.sockets:
        raise UsageInvalid(
            f"TLS on a Unix socket (--host {options.host}) protects nothing: no network is between.",
            remedy="Leave --tls-cert and --tls-key out, or listen on an address.",
        )
    return tls_context(str(key), str(certificate))


def refuse_bad_address(options: RunOptions) -> None:
    """X1: whoever can reach the port can use the model, so a way in from outside needs a key."""
    if not 0 <= options.port <= 65535:
        raise UsageInvalid(
            f"--port {options.port} is no port.", remedy="Give 1 to 65535, or 0 for any free one."
        )
    if not addresses(options.host):
        raise UsageInvalid(f"--host {options.host!r} names no address.", remedy="Leave it out for 127.0.0.1.")
    for host in addresses(options.host):
        if remedy := why_no_host(host):
            raise UsageInvalid(f"--host {host!r} is no address.", remedy=remedy)
    if options.api_keys or options.api_key_file or options.insecure_no_auth:
        return
    refuse_outside(addresses(options.host), options.sockets)


def _log_path(model_id: str) -> Path | None:
    """Where the child's output is kept. Without a place for it the model is served all the same."""
    # A model's name may hold a slash; the name of its log may not.
    name = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in model_id)
    try:
        return private_folder(state_folder() / "logs") / f"{name or 'model'}.log"
    except FolderUnusable as error:
        _log.warning("llama-server's output is not kept: %s", error.message)
        return None
