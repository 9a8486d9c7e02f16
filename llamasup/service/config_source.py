"""Reads the config of ``serve`` and the folders, and checks the models."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.config.config_keys import RuntimeChoice
from llamasup.core.config.inventory import ModelInventory, read_inventory
from llamasup.core.http.address import listen_text
from llamasup.core.hub.store import DownloadSettings
from llamasup.core.llama_server.inspect import Runtime, devices_now, find_runtime
from llamasup.core.models.search import Search
from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.memory.shares import budget_of
from llamasup.core.pool.eviction_policy import ResidencyPolicy
from llamasup.core.pool.options import PoolOptions
from llamasup.core.supervision.not_serving import lacks_memory
from llamasup.core.system.hardware.probe import hardware
from llamasup.core.system.storage.folders import models_folder
from llamasup.errors import ConfigInvalid, RuntimeMissing
from llamasup.features import config_key, config_keys
from llamasup.features.peers.nodes import Membership, Peer
from llamasup.service.model_check import RejectedModel, rejected_flags, rejected_models, rejection
from llamasup.service.options import ListenOptions

if TYPE_CHECKING:
    from llamasup.core.config.config_keys import Config

# The options that are keys of the section ``http``.
_OF_HTTP: Final = (
    *("trusted_proxies", "max_body", "tls_cert", "tls_key", "stream_keepalive", "request_timeout_s"),
    *("access_log", "slow_request_s"),
)


class ConfigOptions(ListenOptions, frozen=True, kw_only=True):
    """``config`` reads the config and raises ConfigInvalid. ``config_file`` is its file, if it has one.

    The other options are fixed at the start: a reload does not change addresses and keys.
    """

    config: Callable[[], Config]
    config_file: Path | None = None
    initial_config: Config | None = None
    """The config from which these options were made, if any: a pipe can be read only once."""
    adjust: Callable[[Config], Config] | None = None
    """Adds the values of the command line to a config that was read from ``config_file``. None: the file
    alone does not make the config, so the control API does not change it.
    """
    more_models: bool = False
    """Models besides those of the file are served."""
    runtime: str | None = None
    configured_runtime: RuntimeChoice = RuntimeChoice()
    """The runtime of the config; ``runtime`` and $LLAMASUP_RUNTIME come first."""
    fail_on_preload_error: bool = False
    """End with the error if a model cannot be preloaded."""
    membership: Callable[[], Membership] | None = None
    """Makes the source of the other nodes, in place of ``peers`` of the config; called in the event loop."""

    @classmethod
    def of(cls, config: Callable[[], Config], **given: Any) -> Self:
        """The config's settings for addresses, keys and connections, overridden by ``given``.

        Raises ConfigInvalid.
        """
        initial = config()
        http, ollama, batches = initial.http, initial.features.get("ollama"), initial.features.get("batches")
        options: dict[str, Any] = {
            "host": ",".join(initial.hosts),
            "port": initial.port,
            "api_key_file": initial.auth.api_key_file,
            "api_key_file_of": "" if "api_key_file" in given else "auth.api_key_file",
            "insecure_no_auth": initial.auth.insecure_no_auth,
            "hosts": http.allow_hosts,
            "origins": http.allow_origins,
            "remote_media": tuple(filter(None, http.remote_media)),
            "features": initial.features,
            "no_ui": not http.ui,
            "ollama": None if ollama is None or ollama.listen is None else listen_text(ollama.listen),
            "batches": batches if batches is not None and batches.enabled else None,
            **{name: getattr(http, name) for name in _OF_HTTP},
        }
        options |= given
        return cls(config=config, initial_config=initial, configured_runtime=initial.runtime, **options)


class Configured(Struct, frozen=True):
    """A config, and the inventory and options that result from it on this machine."""

    config: Config
    inventory: ModelInventory
    options: PoolOptions
    downloads: DownloadSettings
    peers: tuple[Peer, ...] = ()


class ConfigSource:
    """Reads the config and the folders. The runtime is the one found at the start; a config that names only
    other nodes needs none.
    """

    def __init__(self, options: ConfigOptions, environ: Mapping[str, str]) -> None:
        """Raises RuntimeMissing."""
        self.options = options
        self.environ = environ
        configured = options.configured_runtime
        is_first = not (options.runtime or environ.get("LLAMASUP_RUNTIME"))
        self.watched_runtime = configured.path if configured.watch and is_first else None
        path = configured.path
        if self.watched_runtime is not None and os.path.exists(self.watched_runtime):  # noqa: PTH110 - one stat
            path = os.path.realpath(self.watched_runtime)  # it serves while the link changes
        self._find_runtime = partial(find_runtime, options.runtime, environ, path)
        self._runtime: Runtime | None = None
        try:
            self._runtime = self._find_runtime()
        except RuntimeMissing:
            initial = options.initial_config
            if initial is None or initial.needs_runtime:
                raise
            # A front needs none, although $LLAMASUP_RUNTIME may name that of its nodes.
            is_named = options.runtime or path or environ.get("LLAMASUP_RUNTIME")
            if is_named and options.membership is None:
                raise
        # Measured before llamasup loads a model.
        self._machine = hardware()
        self._devices = () if self._runtime is None else devices_now(self._runtime, environ)

    def first(self) -> Configured:
        """The config of the start. Raises ConfigInvalid."""
        return self.configured(self.options.initial_config or self.options.config())

    def read(self, before: Search | None = None) -> Configured:
        """Read the config and the folders; for a missing folder use the search ``before``. Blocks; raises
        ConfigInvalid.
        """
        self._refuse_pipe()
        return self.configured(self.options.config(), before)

    def configured(self, config: Config, before: Search | None = None) -> Configured:
        """Return what is served with this config. Blocks; raises ConfigInvalid for invalid names, and
        RuntimeMissing if it has the first models of this machine.
        """
        for key in config_keys():
            if key.check is not None:
                key.check(config.of(key))
        if self._runtime is None and config.needs_runtime:
            self._runtime = self._find_runtime()
            self._devices = devices_now(self._runtime, self.environ)
        return Configured(
            config,
            read_inventory(config, before),
            self._pool_options_of(config),
            _downloads_of(config),
            _peers_of(config),
        )

    def _refuse_pipe(self) -> None:
        """Reading a pipe again could wait for ever."""
        file = self.options.config_file
        try:
            mode = 0 if file is None else file.stat().st_mode
        except OSError:
            return  # opening it will give the reason
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode):
            raise ConfigInvalid(
                f"The config {str(file)!r} cannot be read again: it is not a regular file.",
                remedy="To change the config while llamasup runs, use a regular file with --config FILE.",
            )

    def use_runtime(self, runtime: Runtime) -> None:
        """Check configs with this build from now on."""
        self._runtime = runtime

    def stamp(self) -> object:
        """Return a value that changes with the config's file. None if there is no file to watch."""
        if self.options.config_file is None:
            return None
        try:
            status = self.options.config_file.stat()
        except OSError:
            return 0
        return status.st_ino, status.st_size, status.st_mtime_ns

    def check_all(self, configured: Configured) -> None:
        """Check that all models of the config exist and fit, instead of failing at the first request.

        Raises ConfigInvalid with all rejected models; for models of a program ModelMissing, ModelInvalid or
        DoesNotFit.
        """
        if (error := rejection(self.rejected(configured))) is not None:
            raise error

    def rejected(self, configured: Configured) -> Iterator[RejectedModel]:
        specs = configured.inventory.registry.specs.values()
        return self._with_flags(configured, rejected_models(configured.config, specs, configured.options))

    def _with_flags(
        self, configured: Configured, rejected: Iterable[RejectedModel]
    ) -> Iterator[RejectedModel]:
        """Yield ``rejected``, and the other models that have unknown flags."""
        seen = set()
        for model in rejected:
            seen.add(model.place[:2])
            yield model
        file = "" if self.options.config_file is None else str(self.options.config_file)
        if self._runtime is None:
            return
        for model in rejected_flags(configured.config, self._runtime.capabilities, file=file):
            if model.place[:2] not in seen:
                yield model

    def check(
        self, configured: Configured, before: Mapping[str, ModelSpec], *, less_memory: bool = False
    ) -> None:
        """Blocks; raises ConfigInvalid for a model whose config differs from ``before`` and that is missing,
        broken or too large. ``less_memory``: also for a model that no longer fits.
        """
        specs = configured.inventory.registry.specs.values()
        new = [spec for spec in specs if _config_of(before.get(spec.id)) != _config_of(spec)]
        pinned_in = frozenset(group for spec in new if spec.stay.pin for group in spec.stay.groups)
        new += [spec for spec in specs if spec.stay.pin and spec.stay.groups & pinned_in and spec not in new]
        rejected = list(rejected_models(configured.config, new, configured.options))
        if less_memory:
            others = [spec for spec in specs if spec not in new]
            too_large = rejected_models(configured.config, others, configured.options)
            rejected += [model for model in too_large if lacks_memory(model.error)]
        error = rejection(self._with_flags(configured, rejected))
        if isinstance(error, ConfigInvalid):
            error.exit_code = ConfigInvalid.exit_code  # the config is rejected, not a model
            raise error
        if error is not None:
            raise ConfigInvalid(
                f"{error.message.rstrip('.')}. The config is rejected.",
                remedy=error.remedy,
                details=error.details,
            ) from error

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
            policy=replace(self.options.policy, slots_disk_bytes=config.slots.disk.of(1 << 62)),
            residency=ResidencyPolicy(time_slice_s=config.swap_after_s, max_loaded=config.max_loaded),
            runtime=None if self._runtime is None else self._runtime.choice,
            environ=self.environ,
        )


def _downloads_of(config: Config) -> DownloadSettings:
    of_pull = models_folder()
    folder = next(iter(config.models_dir), None) or of_pull
    if (key := config_key("downloads")) is None:
        return DownloadSettings(folder=folder, others=(of_pull,))
    downloads = config.of(key)
    return DownloadSettings(
        folder=downloads.folder or folder,
        others=(of_pull,),
        endpoint=downloads.endpoint,
        token_file=downloads.token_file,
        private_addresses=downloads.private_addresses,
        allow_http=downloads.private_addresses,
        parallel=downloads.parallel,
    )


def _peers_of(config: Config) -> tuple[Peer, ...]:
    if not config.features.get("peers"):
        return ()
    from llamasup.features.peers.settings import PEERS  # here, to keep the start short
    from llamasup.features.peers.static import peers_of

    return peers_of(config.of(PEERS))


def _config_of(spec: ModelSpec | None) -> object:
    """The configured part of a spec, without the state of its files."""
    if spec is None:
        return None
    pinned_in = spec.stay.groups if spec.stay.pin else None
    return spec.source, spec.settings, spec.options, spec.replicas, pinned_in
