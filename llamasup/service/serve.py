"""The service of ``llamasup serve``: the models of a config, served until a stop is requested."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llamasup.core.http.address import Address
from llamasup.core.llama_server.foreign_words import ignored_variables
from llamasup.core.pool.model import policy_for
from llamasup.core.supervision.events import Bus
from llamasup.core.system.process.ready_file import remove_stale
from llamasup.service.config_source import ConfigSource, ServeOptions, serve_options
from llamasup.service.hosting import ServiceHost, sweep_and_check
from llamasup.service.many_models import HostedModels
from llamasup.service.options import check_address, load_tls, ollama_listener, open_listeners, proxy_config

if TYPE_CHECKING:
    from llamasup.core.control.interface import ConfigAccess

__all__ = ["ConfigSource", "ServeOptions", "ServeService", "serve_options"]


_log = logging.getLogger(__name__)


class ServeService(ServiceHost):
    """Many models. The constructor finds every error that can be found before a process is started.

    Raises ConfigInvalid, UnsafeBind, UsageInvalid, RuntimeMissing, and ModelMissing, ModelInvalid or
    DoesNotFit for a model that a program configured.
    """

    def __init__(self, options: ServeOptions, bus: Bus, environ: Mapping[str, str] | None = None) -> None:
        check_address(options)
        proxy = proxy_config(options, route_by_model=True)
        sweep_and_check(options)
        tls = load_tls(options)
        self._source = ConfigSource(options, os.environ if environ is None else environ)
        self._configured = self._source.first()
        self._source.check_all(self._configured)
        if ignored := ignored_variables(self._source.environ):
            _log.warning("%s", ignored)
        if options.ready_file is not None:
            remove_stale(options.ready_file)
        super().__init__(
            options,
            bus,
            listen=lambda: open_listeners(options, tls),
            proxy=proxy,
            environ=environ,
            listen_ollama=ollama_listener(options, tls),
        )
        self.options = options
        self.launch: None = None  # many models have no common launch or runner
        self.runner: None = None
        self.on_log: Callable[[list[bytes]], None] | None = None
        """Gets the output of all llama-servers line by line, in their threads; must not wait or raise."""
        self._bus = bus
        self.hosted_models: HostedModels | None = None
        """Set while the service runs."""

    @property
    def in_flight(self) -> int:
        return 0 if self.hosted_models is None else self.hosted_models.in_flight

    @property
    def drain_timeout_s(self) -> float:
        """The longest of all models."""
        models = () if self.hosted_models is None else self.hosted_models.catalog.managed_models()
        policy = self.options.policy
        times = (policy_for(model.spec, policy).drain_timeout_s for model in models)
        return max(times, default=policy.drain_timeout_s)

    async def run(self) -> None:
        """Serve until a stop is requested, and clean up. Raises PortInUse or PortNotAllowed."""

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
                membership=None if self.options.membership is None else self.options.membership(),
            )
            self._let_edit(self.hosted_models)
            return self.hosted_models

        await self.host(make)

    def _let_edit(self, hosted: HostedModels) -> None:
        """Let the control API change the config, if a file alone makes it."""
        options, target = self.options, hosted.control_target
        if options.config_file is None or options.adjust is None:
            return
        file, adjust = options.config_file, options.adjust

        def make() -> ConfigAccess:
            from llamasup.service.config_editing import ConfigEditor  # here, to keep the start short

            return ConfigEditor(
                file,
                self._source,
                self._source.environ,
                adjust=adjust,
                more_models=options.more_models,
                preview=hosted.preview,
                reload=target.reload,
            )

        target.make_config = make

    def ask_reload(self) -> None:
        """Apply the changes of the config and of the folders (S16)."""
        if self.hosted_models is not None and not self.stops_asked:
            self.hosted_models.ask_reload()
