"""The service of ``llamasup run`` and ``wrap``: one model, served until a stop is requested."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import field

from llamasup.core.http.address import Address
from llamasup.core.llama_server.foreign_words import ignored_variables
from llamasup.core.planning.facts import Launch, prepare
from llamasup.core.planning.planner import Planner
from llamasup.core.pool.estimate import Starter
from llamasup.core.proxy.settings import ProxyConfig
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.events import Bus
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Policy
from llamasup.core.system.process.ready_file import remove_stale
from llamasup.features.wrap.planner import Wrapping
from llamasup.service.hosting import ServiceHost, sweep_and_check
from llamasup.service.only_model import HostedModel
from llamasup.service.options import (
    ListenOptions,
    ServiceSpec,
    WrapOptions,
    check_address,
    load_tls,
    ollama_listener,
    open_listeners,
    proxy_config,
    wrap_spec,
)

__all__ = ["RunOptions", "Service", "WrapOptions"]

_log = logging.getLogger(__name__)

_NOWHERE = Path("/nonexistent")


class RunOptions(ListenOptions, frozen=True):
    """The options of ``llamasup run``."""

    model: str
    settings: Settings = field(default_factory=Settings)
    runtime: str | None = None

    @property
    def policy(self) -> Policy:
        return self.shared_policy()


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
            if ignored := ignored_variables(launch.environ, launch.runtime.capabilities):
                _log.warning("%s", ignored)
            self._spec = _run_spec(options, launch, proxy)
        else:
            self.launch = options.wrapping
            self._spec = wrap_spec(options)
        if options.ready_file is not None:
            remove_stale(options.ready_file)
        super().__init__(
            options,
            bus,
            listen=self._spec.listen,
            proxy=self._spec.proxy,
            environ=environ,
            listen_ollama=self._spec.listen_ollama,
        )
        self.on_log: Callable[[list[bytes]], None] | None = None
        """Gets llama-server's output line by line, in its own thread; must not wait or raise."""
        self._bus = bus
        self._hosted: HostedModel | None = None

    @property
    def runner(self) -> InstanceRunner | None:
        """The instance, once the service has begun to start it."""
        return None if self._hosted is None else self._hosted.runner

    @property
    def in_flight(self) -> int:
        return 0 if self.runner is None else self.runner.in_flight

    @property
    def drain_timeout_s(self) -> float:
        return self.options.drain_timeout_s

    def ask_reload(self) -> None:
        """Drain the requests in flight, then restart the server. Does nothing while stopping."""
        if self._hosted is not None and not self.stops_asked:
            self._hosted.ask_reload()

    async def run(self) -> None:
        """Serve until a stop is requested, and clean up.

        Raises PortInUse or PortNotAllowed before a process is started, ServerFailed if llama-server cannot
        be started, GaveUp if it crashed too often.
        """

        def make(folder: Path, address: Address) -> HostedModel:
            policy = self.options.policy
            self._hosted = HostedModel(
                self._spec, policy, self, self._bus, folder, address, log_passed_on=self.on_log
            )
            return self._hosted

        await self.host(make)


def _run_spec(options: RunOptions, launch: Launch, proxy: ProxyConfig) -> ServiceSpec:
    tls = load_tls(options)
    return ServiceSpec(
        name=launch.model_id,
        aliases=launch.aliases,
        launch=launch,
        starter=Starter(lambda name, number, folder, prefix, share: Planner(launch, folder)),
        listen=lambda: open_listeners(options, tls),
        proxy=proxy,
        listen_ollama=ollama_listener(options, tls),
    )
