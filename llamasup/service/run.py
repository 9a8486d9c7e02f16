"""The service of ``llamasup run`` and ``wrap``: one model, served until a stop is requested."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import field

from llamasup.control.interface import ServiceOwner
from llamasup.control.single_target import SingleModelTarget
from llamasup.errors import LlamasupError
from llamasup.http.address import Address
from llamasup.planning.attempts import Planner
from llamasup.planning.facts import Launch, prepare
from llamasup.pool.catalog.single import Supervisor
from llamasup.pool.replicas.replica_set import ReplicaSet
from llamasup.proxy.settings import ProxyConfig
from llamasup.service.hosting import ServiceHost, sweep_and_check
from llamasup.service.options import (
    ListenOptions,
    ServiceSpec,
    WrapOptions,
    check_address,
    load_tls,
    open_listeners,
    proxy_config,
    wrap_spec,
)
from llamasup.settings.model import Settings
from llamasup.supervision.availability import STOPPING
from llamasup.supervision.events import Bus
from llamasup.supervision.failure import failure_of
from llamasup.supervision.runner import InstanceRunner
from llamasup.supervision.states import (
    Instance,
    KillRequested,
    Policy,
    RestartRequested,
    StartRequested,
    State,
    StopRequested,
)
from llamasup.supervision.wrap.planner import Wrapping
from llamasup.system.process.log_tail import LogFiles
from llamasup.system.process.ready_file import remove_stale

__all__ = ["RunOptions", "Service", "WrapOptions"]

_NOWHERE = Path("/nonexistent")


class RunOptions(ListenOptions, frozen=True):
    """The options of ``llamasup run``."""

    model: str
    settings: Settings = field(default_factory=Settings)
    runtime: str | None = None

    @property
    def policy(self) -> Policy:
        return self.shared_policy()


class HostedModel:
    """A ``Workload``. ``log_passed_on`` gets llama-server's output, in its own thread."""

    def __init__(
        self,
        spec: ServiceSpec,
        policy: Policy,
        owner: ServiceOwner,
        bus: Bus,
        folder: Path,
        address: Address,
        *,
        log_passed_on: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        self._spec = spec
        self._stopping = False
        self._served = served = ReplicaSet(policy=policy)
        self._logs = LogFiles()
        log_path = self._logs.path_of(spec.name)
        self.runner = InstanceRunner(
            spec.name,
            spec.planner(folder),
            aliases=spec.aliases,
            policy=policy,
            bus=bus,
            queue=served.queue,
            work_folder=folder,
            log_path=log_path,
            cwd=spec.cwd,
            prober=spec.prober,
            log_passed_on=log_passed_on,
        )
        served.add(self.runner)
        self.backend = Supervisor((spec.name, *spec.aliases), served, address, spec.facts)
        self.control_target = SingleModelTarget(owner, self.backend, bus, log_path)

    async def run(self) -> None:
        try:
            await self.runner.run()
        finally:
            self._served.pause(STOPPING)
            self._logs.close()

    def ask_stop(self, *, now: bool) -> None:
        self._stopping = True
        self.runner.post(KillRequested() if now else StopRequested())

    def start(self) -> None:
        self.runner.post(StartRequested())

    async def begun(self) -> None:
        await self.runner.reached(State.STARTING)

    async def ready(self) -> tuple[str, ...] | None:
        last = await self.runner.until(self._is_ready_or_over)
        return (self._spec.name,) if last.state is State.READY else None

    def still_ready(self) -> bool:
        return self.runner.instance.state is State.READY

    async def ended(self) -> LlamasupError | None:
        last = await self.runner.until(self._is_over)
        return failure_of(last, self._exit_code_of_child()) if last.state is State.FAILED else None

    def _is_over(self, instance: Instance) -> bool:
        """A stopped instance without a stop request is unloaded: it can be loaded again."""
        return instance.is_settled and (instance.state is State.FAILED or self._stopping)

    def _is_ready_or_over(self, instance: Instance) -> bool:
        return instance.state is State.READY or self._is_over(instance)

    def _exit_code_of_child(self) -> int | None:
        """As in a shell; None if llamasup does not pass it on."""
        exit_ = self.runner.last_exit if self._spec.passes_exit_code else None
        if exit_ is None:
            return None
        return exit_.code if exit_.signal is None else 128 + getattr(signal, exit_.signal, 0)


class Service(ServiceHost):
    """One model. The constructor finds every error that can be found before a process is started.

    Raises ModelMissing, ModelInvalid, RuntimeMissing, DoesNotFit, UsageInvalid, ConfigInvalid or UnsafeBind.
    """

    def __init__(
        self, options: RunOptions | WrapOptions, bus: Bus, environ: Mapping[str, str] | None = None
    ) -> None:
        if isinstance(options, RunOptions):
            check_address(options)
            proxy = proxy_config(options, route_by_model=False)
        sweep_and_check(options)
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
            self._spec = _run_spec(options, launch, proxy)
        else:
            self.launch = options.wrapping
            self._spec = wrap_spec(options)
        if options.ready_file is not None:
            remove_stale(options.ready_file)
        super().__init__(options, bus, listen=self._spec.listen, proxy=self._spec.proxy)
        self.on_log: Callable[[list[bytes]], None] | None = None
        """Gets llama-server's output line by line, in its own thread; must not wait or raise."""
        self._bus = bus
        self._one: HostedModel | None = None

    @property
    def runner(self) -> InstanceRunner | None:
        """The instance, once the service runs."""
        return None if self._one is None else self._one.runner

    @property
    def in_flight(self) -> int:
        return 0 if self._one is None else self._one.runner.in_flight

    @property
    def drain_timeout_s(self) -> float:
        return self.options.drain_timeout_s

    def ask_reload(self) -> None:
        """Drain the requests in flight, then restart the server. Does nothing while stopping."""
        if self._one is not None and not self.stops_asked:
            self._one.runner.post(RestartRequested())

    async def run(self) -> None:
        """Serve until a stop is requested, and clean up.

        Raises PortInUse or PortNotAllowed before a process is started, ServerFailed if llama-server cannot
        be started, GaveUp if it crashed too often.
        """

        def make(folder: Path, address: Address) -> HostedModel:
            policy = self.options.policy
            self._one = HostedModel(
                self._spec, policy, self, self._bus, folder, address, log_passed_on=self.on_log
            )
            return self._one

        await self.host(make)


def _run_spec(options: RunOptions, launch: Launch, proxy: ProxyConfig) -> ServiceSpec:
    tls = load_tls(options)
    return ServiceSpec(
        name=launch.model_id,
        aliases=launch.aliases,
        planner=lambda folder: Planner(launch, folder),
        facts=launch.model,
        listen=lambda: open_listeners(options, tls),
        proxy=proxy,
    )
