"""``llamasup serve``: a config in, a service of many models that runs until it is told to stop."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamasup.downloads.manager import DownloadSettings
from llamasup.errors import ConfigInvalid
from llamasup.http.address import Address
from llamasup.llama_server.device_memory import devices_now
from llamasup.llama_server.inspect import find_runtime
from llamasup.models.search import Search
from llamasup.models.spec import ModelSpec
from llamasup.planning.memory.shares import budget_of
from llamasup.pool.model import policy_for
from llamasup.pool.options import PoolOptions
from llamasup.pool.policy import ResidencyPolicy
from llamasup.service.hosting import ServiceHost, prepare_place
from llamasup.service.library import read_library
from llamasup.service.many_models import Configured, HostedModels
from llamasup.service.model_check import WrongModel, refusal, wrong_flags, wrong_models
from llamasup.service.options import EntranceOptions, front_of, proxy_of, refuse_bad_address, tls_of
from llamasup.supervision.events import Bus
from llamasup.supervision.failure import lacks_memory
from llamasup.supervision.states import Policy
from llamasup.system.hardware.probe import hardware
from llamasup.system.process.ready_file import clear_place
from llamasup.system.storage.folders import models_folder

if TYPE_CHECKING:
    from llamasup.config import Config

__all__ = ["ServeOptions", "ServeService", "serve_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(EntranceOptions):
    """``config`` gives the config as it is now, each time that it is asked; it raises ConfigInvalid. It is in
    ``config_file``, if that is to be watched.

    What else stands here is said once, at the start: addresses and keys are not changed by a reload.
    """

    config: Callable[[], Config]
    config_file: Path | None = None
    said: Config | None = None
    """By the config when these options were made of it, if they were: a pipe can be read only once."""
    runtime: str | None = None
    fail_on_preload_error: bool = False
    """What is to be preloaded has to be there: else it ends with the reason."""

    @property
    def policy(self) -> Policy:
        return self.shared_policy()


def serve_options(config: Callable[[], Config], **given: Any) -> ServeOptions:
    """What the config says of addresses, keys and connections; what is ``given`` beside it counts more.

    Raises ConfigInvalid.
    """
    said = config()
    http = said.http
    runtime = given.pop("runtime", None) or said.runtime
    options: dict[str, Any] = {
        "host": ",".join(said.hosts),
        "port": said.port,
        "api_key_file": said.auth.api_key_file,
        "api_key_file_of": "" if "api_key_file" in given else "auth.api_key_file",
        "insecure_no_auth": said.auth.insecure_no_auth,
        "hosts": http.allow_hosts,
        "origins": http.allow_origins,
        "remote_media": tuple(filter(None, http.remote_media)),
        "tls_cert": http.tls_cert,
        "tls_key": http.tls_key,
        "stream_keepalive": http.stream_keepalive,
        "request_timeout_s": http.request_timeout_s,
        "access_log": http.access_log,
        "slow_request_s": http.slow_request_s,
    }
    return ServeOptions(config=config, said=said, runtime=runtime, **{**options, **given})


class ConfigSource:
    """Reads the config again, and looks into the folders. ``runtime`` stays as it was found at the start."""

    def __init__(self, options: ServeOptions, environ: Mapping[str, str]) -> None:
        """Raises RuntimeMissing."""
        self._options = options
        self._environ = environ
        self._runtime = find_runtime(options.runtime, environ)
        # What is free is so before anything of ours is loaded.
        self._machine = hardware()
        self._devices = devices_now(self._runtime, environ)

    def first(self) -> Configured:
        """As it is at the start. Raises ConfigInvalid."""
        return self._configured(self._options.said or self._options.config())

    def read(self, before: Search | None = None) -> Configured:
        """As ``Source``."""
        self._refuse_pipe()
        return self._configured(self._options.config(), before)

    def _configured(self, config: Config, before: Search | None = None) -> Configured:
        downloads = config.downloads
        folder = downloads.folder or next(iter(config.models_dir), None) or models_folder()
        return Configured(
            config,
            read_library(config, before),
            self._pool_options_of(config),
            DownloadSettings(
                folder=folder,
                others=(models_folder(),),  # what llamasup pull has brought
                endpoint=downloads.endpoint,
                token_file=downloads.token_file,
                private_addresses=downloads.private_addresses,
                allow_http=downloads.private_addresses,
                parallel=downloads.parallel,
            ),
        )

    def _refuse_pipe(self) -> None:
        """Nobody may write into it again, and whoever waits for that cannot be stopped."""
        file = self._options.config_file
        try:
            mode = 0 if file is None else file.stat().st_mode
        except OSError:
            return  # whoever opens it says why it cannot be
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode):
            raise ConfigInvalid(
                f"The config {str(file)!r} cannot be read again: it is no file, and was read at the start.",
                remedy="Serve with --config FILE, if the config is to be changed meanwhile.",
            )

    def stamp(self) -> object:
        """Of the config's file; None where there is none."""
        if self._options.config_file is None:
            return None
        try:
            status = self._options.config_file.stat()
        except OSError:
            return 0
        return status.st_ino, status.st_size, status.st_mtime_ns

    def check_all(self, configured: Configured) -> None:
        """What the config names has to be there, and to fit: better said now than to the first who asks.

        Raises ConfigInvalid with all that is not; of what a program names beside the config ModelMissing,
        ModelInvalid or DoesNotFit.
        """
        if (refused := refusal(self.wrong(configured))) is not None:
            raise refused

    def wrong(self, configured: Configured) -> Iterator[WrongModel]:
        """Of what the config names."""
        specs = configured.library.registry.specs.values()
        return self._with_flags(configured, wrong_models(configured.config, specs, configured.options))

    def _with_flags(self, configured: Configured, wrong: Iterable[WrongModel]) -> Iterator[WrongModel]:
        """Also yield flags that no start accepts, of models that were not tried."""
        tried = set()
        for each in wrong:
            tried.add(each.place[:2])
            yield each
        file = "" if self._options.config_file is None else str(self._options.config_file)
        for each in wrong_flags(configured.config, self._runtime.capabilities, file=file):
            if each.place[:2] not in tried:
                yield each

    def check(
        self, configured: Configured, before: Mapping[str, ModelSpec], *, less_memory: bool = False
    ) -> None:
        """As ``Source``."""
        found = configured.library.registry.specs.values()
        new = [each for each in found if _said_of(before.get(each.id)) != _said_of(each)]
        crowd = frozenset(group for each in new if each.stay.pin for group in each.stay.groups)
        new += [each for each in found if each.stay.pin and each.stay.groups & crowd and each not in new]
        wrong = list(wrong_models(configured.config, new, configured.options))
        if less_memory:
            others = [each for each in found if each not in new]
            tried = wrong_models(configured.config, others, configured.options)
            wrong += [each for each in tried if lacks_memory(each.error)]
        refused = refusal(self._with_flags(configured, wrong))
        if isinstance(refused, ConfigInvalid):
            refused.exit_code = ConfigInvalid.exit_code  # what is not taken over is the config
            raise refused
        if refused is not None:
            raise ConfigInvalid(
                f"{refused.message.rstrip('.')}. The config is not taken.",
                remedy=refused.remedy,
                details=refused.details,
            ) from refused

    def _pool_options_of(self, config: Config) -> PoolOptions:
        memory = config.memory
        budget = budget_of(
            self._machine,
            self._devices,
            ram=None if memory.ram is None else memory.ram.of,
            vram=None if memory.vram is None else memory.vram.of,
        )
        return PoolOptions(
            budget=budget,
            policy=replace(self._options.policy, slots_disk_bytes=config.slots.disk.of(1 << 62)),
            residency=ResidencyPolicy(time_slice_s=config.swap_after_s, max_loaded=config.max_loaded),
            runtime=str(self._runtime.path) if self._runtime.kind == "binary" else self._runtime.kind,
            environ=self._environ,
        )


def _said_of(spec: ModelSpec | None) -> object:
    """What the config says of it; its files may change meanwhile."""
    if spec is None:
        return None
    pinned_in = spec.stay.groups if spec.stay.pin else None
    return spec.source, spec.settings, spec.options, spec.replicas, pinned_in


class ServeService(ServiceHost):
    """Many models, served. Preparing it finds every mistake that can be found before anything is started.

    Raises ConfigInvalid, UnsafeBind, UsageInvalid, RuntimeMissing, and ModelMissing, ModelInvalid or
    DoesNotFit for a model that a program names.
    """

    def __init__(self, options: ServeOptions, bus: Bus, environ: Mapping[str, str] | None = None) -> None:
        refuse_bad_address(options)
        proxy = proxy_of(options, route_by_model=True)
        prepare_place(options)
        tls = tls_of(options)
        self._source = ConfigSource(options, os.environ if environ is None else environ)
        self._configured = self._source.first()
        self._source.check_all(self._configured)
        if options.ready_file is not None:
            clear_place(options.ready_file)
        super().__init__(options, bus, listen=lambda: front_of(options, tls), proxy=proxy)
        self.options = options
        self.launch: None = None  # there is none that would stand for all
        self.runner: None = None
        self.on_log: Callable[[list[bytes]], None] | None = None
        """Gets the output of all llama-servers line by line, in threads of their own; must not wait."""
        self._bus = bus
        self.hosted_models: HostedModels | None = None
        """Once it runs."""

    @property
    def in_flight(self) -> int:
        return 0 if self.hosted_models is None else self.hosted_models.in_flight

    @property
    def drain_timeout_s(self) -> float:
        """The longest that one of the models has."""
        models = () if self.hosted_models is None else self.hosted_models.backend.managed_models()
        policy = self.options.policy
        times = (policy_for(each.spec, policy).drain_timeout_s for each in models)
        return max(times, default=policy.drain_timeout_s)

    async def run(self) -> None:
        """Serve until asked to stop, and leave nothing behind. Raises PortInUse or PortNotAllowed."""

        def make(folder: Path, address: Address) -> HostedModels:
            self.hosted_models = HostedModels(
                self._configured,
                self._source,
                self,
                self._bus,
                folder,
                address,
                fail_on_preload_error=self.options.fail_on_preload_error,
                log_passed_on=self.on_log,
            )
            return self.hosted_models

        await self.host(make)

    def ask_reload(self) -> None:
        """Take over what has changed in the config and in the folders (S16)."""
        if self.hosted_models is not None and not self.stops_asked:
            self.hosted_models.ask_reload()
