"""``llamasup run`` and ``wrap``: options in, a service of one model that runs until it is told to stop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llamasup.http.address import Address, is_loopback
from llamasup.llama_server.settings import Settings
from llamasup.planning.facts import Launch, prepare
from llamasup.planning.planner import Planner
from llamasup.proxy.settings import ProxyConfig
from llamasup.service.hosting import ServiceHost, prepare_place
from llamasup.service.one_model import HostedModel
from llamasup.service.options import (
    EntranceOptions,
    ServiceSpec,
    WrapOptions,
    front_of,
    proxy_of,
    refuse_bad_address,
    tls_of,
    wrap_job,
)
from llamasup.supervision.events import Bus
from llamasup.supervision.runner import InstanceRunner
from llamasup.supervision.states import Policy, RestartRequested
from llamasup.supervision.wrap.planner import Wrapping
from llamasup.system.process.ready_file import clear_place

__all__ = ["RunOptions", "Service", "WrapOptions", "is_loopback"]

_NOWHERE = Path("/nonexistent")


@dataclass(frozen=True, slots=True)
class RunOptions(EntranceOptions):
    """What ``llamasup run`` can be told."""

    model: str
    settings: Settings = field(default_factory=Settings)
    runtime: str | None = None

    @property
    def policy(self) -> Policy:
        return self.shared_policy()


class Service(ServiceHost):
    """One model, served. Preparing it finds every mistake that can be found before anything is started.

    Raises ModelMissing, ModelInvalid, RuntimeMissing, DoesNotFit, UsageInvalid, ConfigInvalid or UnsafeBind.
    """

    def __init__(
        self, options: RunOptions | WrapOptions, bus: Bus, environ: Mapping[str, str] | None = None
    ) -> None:
        if isinstance(options, RunOptions):
            refuse_bad_address(options)
            proxy = proxy_of(options, route_by_model=False)
        prepare_place(options)
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
            self._job = _run_job(options, launch, proxy)
        else:
            self.launch = options.wrapping
            self._job = wrap_job(options)
        if options.ready_file is not None:
            clear_place(options.ready_file)
        super().__init__(options, bus, listen=self._job.listen, proxy=self._job.proxy)
        self.on_log: Callable[[list[bytes]], None] | None = None
        """Gets llama-server's output line by line, in a thread of its own; must neither wait nor raise."""
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
        """Let the requests in flight finish, then start the server anew. Nothing while stopping."""
        if self._one is not None and not self.stops_asked:
            self._one.runner.post(RestartRequested())

    async def run(self) -> None:
        """Serve until asked to stop, and leave nothing behind.

        Raises PortInUse or PortNotAllowed before anything is started, ServerFailed when llama-server
        cannot be started, GaveUp when it crashed too often.
        """

        def make(folder: Path, address: Address) -> HostedModel:
            policy = self.options.policy
            self._one = HostedModel(
                self._job, policy, self, self._bus, folder, address, log_passed_on=self.on_log
            )
            return self._one

        await self.host(make)


def _run_job(options: RunOptions, launch: Launch, proxy: ProxyConfig) -> ServiceSpec:
    tls = tls_of(options)
    return ServiceSpec(
        name=launch.model_id,
        aliases=launch.aliases,
        planner=lambda folder: Planner(launch, folder),
        facts=launch.model,
        listen=lambda: front_of(options, tls),
        proxy=proxy,
    )
