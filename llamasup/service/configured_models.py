"""The models of ``serve``, which follow the config and the folders."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from msgspec.structs import replace

from llamasup.core.config.config_keys import Config
from llamasup.core.config.inventory import (
    ModelInventory,
    SearchPaths,
    build_inventory,
    read_inventory,
    search_paths,
)
from llamasup.core.control.interface import ConfigAccess, ExplainedModels, ServiceOwner, Upgrades
from llamasup.core.control.pool_target import ConfiguredTarget
from llamasup.core.http.address import Address
from llamasup.core.hub.reference import RepoRef, parse_ref
from llamasup.core.hub.remote_file import Listener
from llamasup.core.models.registry import build
from llamasup.core.models.rules import ModelRule, Problem
from llamasup.core.models.spec import Changes, ModelSpec
from llamasup.core.models.watch import ModelWatch
from llamasup.core.pool.catalog.catalog import Catalog
from llamasup.core.pool.model import ManagedModel
from llamasup.core.proxy.backend import Backend
from llamasup.core.supervision.events import (
    Bus,
    ConfigRejected,
    ModelsChanged,
    ModelUnloading,
    PublishedEvent,
)
from llamasup.errors import LlamasupError
from llamasup.features import attached, only_attached
from llamasup.features.peers.nodes import Membership
from llamasup.service.config_source import ConfigSource, Configured
from llamasup.service.model_files import Downloads, ModelFiles, downloads_on_demand
from llamasup.service.models import HostedModels, LogListener

if TYPE_CHECKING:
    from llamasup.features.peers.peers import Peers
    from llamasup.features.peers.static import StaticMembership

_log = logging.getLogger(__name__)

# A reload does not apply these: listeners and connections exist by then.
_KEYS_READ_AT_START = ("listen", "runtime", "auth", "http", "ollama", "usage", "batches", "fleet")
_KEYS_READ_AT_RELOAD = (
    *("models_dir", "caches", "memory", "max_loaded", "default_model", "swap_after_s", "slots", "watch"),
    "virtual_models",
)
_CONFIG_POLL_S = 1.0  # of a watched config; a stat


class CatalogFront(Backend, ExplainedModels, Protocol):
    """Names in front of the names of another backend, which lead to its models."""

    def apply(self, config: Config) -> None:
        """Use this config from now on: it was read again."""
        ...


class ConfiguredModels(HostedModels):
    """The models of ``source``, which are loaded by requests and commands."""

    def __init__(
        self,
        configured: Configured,
        source: ConfigSource,
        owner: ServiceOwner,
        bus: Bus,
        folder: Path,
        address: Address,
        on_log: LogListener | None = None,
    ) -> None:
        make_downloads = only_attached("downloads")
        self._downloads: Downloads | None = None
        if make_downloads is not None:
            self._downloads = make_downloads(configured.downloads, folder, configured.options.environ)
        fetch = None if self._downloads is None else partial(_fetch, self._downloads)
        super().__init__(configured.options, bus, folder, on_log, fetch=fetch)
        self._configured = configured
        self._search = configured.inventory.search  # the last one that was applied
        self._started_with = configured.config
        self._started_downloads = configured.downloads
        self._error: LlamasupError | None = None
        self._source = source
        self._stamp = source.stamp()
        self.backend = self.catalog = Catalog(configured.inventory.registry, self._pool, self._on_demand_spec)
        self._reload_lock = asyncio.Lock()
        files = ModelFiles(
            self.catalog,
            self._downloads,
            configured.downloads,
            configured.options.environ,
            lambda: self._configured.config,
            self._reload_lock,
            self._refresh_folders,
        )
        self.control_target: ConfiguredTarget = ConfiguredTarget(
            owner, self.catalog, address, self._logs.path_of, self.reload, files
        )
        self.control_target.make_upgrades = self._make_upgrades
        if source.options.config_file is not None and source.options.adjust is not None:
            self.control_target.make_config = self._make_config
        self._configured_peers: StaticMembership | None = None
        self.peers = self._with_peers(source.options.membership)
        self._fronts: list[CatalogFront] = []
        for make in attached("catalog"):
            front: CatalogFront = make(self.backend, configured.config)
            self._fronts.append(front)
            self.backend = self.control_target.catalog = front
        self._applied = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._watch_wanted = asyncio.Event()
        self._problems: frozenset[Problem] = frozenset()
        self._notes: frozenset[str] = frozenset()
        self._follow_config()
        self._log_problems(configured.inventory)

    def _with_peers(self, make: Callable[[], Membership] | None) -> Peers | None:
        """None without other nodes: then nothing of them is imported, or on the path of a request."""
        if make is None and not self._configured.peers:
            return None
        from llamasup.features.peers.nodes_backend import NodesBackend
        from llamasup.features.peers.peers import Peers
        from llamasup.features.peers.static import StaticMembership

        membership: Membership
        if make is not None:
            membership = make()
        else:
            membership = self._configured_peers = StaticMembership(self._configured.peers)
        policy, own = self._configured.options.policy, self._configured.config.defaults
        peers = Peers(
            membership,
            self.catalog,
            timeout_s=policy.wait_timeout_s if own.wait_timeout_s is None else own.wait_timeout_s,
            max_waiting=policy.max_queued if own.max_queued is None else own.max_queued,
            continues_streams=policy.continue_streams
            if own.continue_streams is None
            else own.continue_streams,
        )
        self.backend = self.control_target.catalog = NodesBackend(self.catalog, peers)
        self.control_target.nodes = peers
        self._bus.listen(self._follow_models)
        return peers

    def _make_upgrades(self) -> Upgrades | None:
        def models() -> Iterable[ManagedModel]:
            return (managed for managed in self.catalog.managed_models() if managed.spec.engine is None)

        use_runtime = self._source.use_runtime
        make = only_attached("upgrades")
        return None if make is None else cast(Upgrades, make(self._pool, models, self._running, use_runtime))

    def _make_config(self) -> ConfigAccess:
        """Let the control API change the config, if a file alone makes it."""
        from llamasup.service.config_editing import ConfigEditor  # here, to keep the start short

        return ConfigEditor(self._source, preview=self.preview, reload=self.control_target.reload)

    def _running(self) -> asyncio.TaskGroup:
        assert self._tasks is not None  # the control API serves only while this runs
        return self._tasks

    def _follow_models(self, event: PublishedEvent) -> None:
        if isinstance(event, ModelsChanged) and self.peers is not None:
            self.peers.refresh()

    @property
    def has_other_nodes(self) -> bool:
        return self.peers is not None

    @property
    def in_flight(self) -> int:
        """The requests that the llama-servers of this node, or other nodes, work on."""
        return super().in_flight + (0 if self.peers is None else self.peers.in_flight)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(super().run(), name="pool")
                if self.peers is not None:
                    tasks.create_task(self.peers.run(), name="peers")
                tasks.create_task(self._watch_folders(), name="folders")
                tasks.create_task(self._watch_config(), name="config")
                if (path := self._source.watched_runtime) is not None:
                    tasks.create_task(self._follow_runtime(path), name="runtime")
        finally:
            if self._downloads is not None:
                await self._downloads.aclose()

    async def begun(self) -> None:
        await self._pool.running.wait()
        if self.peers is not None:
            await self.peers.begun()

    async def ready(self) -> tuple[str, ...] | None:
        evicted: dict[str, None] = {}

        def on_event(event: PublishedEvent) -> None:
            if isinstance(event, ModelUnloading) and event.for_model:
                evicted[event.model] = None

        self._bus.listen(on_event)
        try:
            failed = await self.catalog.preload()
        finally:
            self._bus.unsubscribe(on_event)
        self._warn_preload_evicted(evicted, failed)
        for error in failed.values():
            if self._source.options.fail_on_preload_error:
                self._error = self._error or error
                self.ask_stop(now=False)
        return None if self._pool.stopping else tuple(self.registry.specs)

    async def ended(self) -> LlamasupError | None:
        await self._stop_asked.wait()
        await self._pool.ended()
        if self.peers is not None:
            await self.peers.drained(self._configured.options.policy.drain_timeout_s)
        return self._error

    def ask_stop(self, *, now: bool) -> None:
        super().ask_stop(now=now)
        if self.peers is not None:
            self.peers.ask_stop(now=now)
        self._stop_asked.set()

    # --- changes ----------------------------------------------------------------------------------------

    async def reload(self) -> Changes:
        """Apply the changes of the config and of the folders. Raises ConfigInvalid, and then changes nothing
        (S16).
        """
        async with self._reload_lock:
            stamp = await asyncio.to_thread(self._source.stamp)
            try:
                configured = await asyncio.to_thread(self._read)
                if configured.inventory.settles_in_s:  # a file was just written, and may be incomplete
                    await asyncio.sleep(configured.inventory.settles_in_s)
                    configured = await asyncio.to_thread(self._read)
            except LlamasupError as error:
                self._stamp = stamp
                self._bus.publish(ConfigRejected(error))
                raise
            self._stamp = stamp
            before, self._configured = self._configured, configured
            self._pool.apply_options(configured.options)
            self._follow_config()
            self._applied.set()
            if self._configured_peers is not None:
                self._configured_peers.replace(configured.peers)
            settings = self._settings_changed(configured, before)
            for front in self._fronts:
                front.apply(configured.config)
            changes = self._apply(configured.inventory, settings, self._pending_restart(configured))
        if changes.next_start:
            _log.warning(
                "The config has changed. Restart llamasup to apply: %s", ", ".join(changes.next_start)
            )
        if not changes:
            self._bus.publish(ModelsChanged(changes, tuple(self.registry.specs)))
        return changes

    def _read(self) -> Configured:
        """Read and check like a start."""
        configured = self._source.read(self._search)
        less_memory = any(
            size_bytes < self.budget.get(device, 0)
            for device, size_bytes in configured.options.budget.items()
        )
        self._source.check(configured, self.registry.specs, less_memory=less_memory)
        return configured

    def preview(self, configured: Configured) -> Changes:
        """Return what a reload with this config would change."""
        settings = self._settings_changed(configured, self._configured)
        return replace(
            self.catalog.changes_to(configured.inventory.registry),
            settings=settings,
            next_start=self._pending_restart(configured),
        )

    def _settings_changed(self, now: Configured, before: Configured) -> tuple[str, ...]:
        """The keys that a reload applies. The first node needs a restart."""
        at_reload = (*_KEYS_READ_AT_RELOAD, *(() if self._configured_peers is None else ("peers",)))
        return _changed_keys(at_reload, now.config, before.config)

    def _pending_restart(self, configured: Configured) -> tuple[str, ...]:
        at_start = (
            _KEYS_READ_AT_START if self._configured_peers is not None else (*_KEYS_READ_AT_START, "peers")
        )
        keys = _changed_keys(at_start, configured.config, self._started_with)
        return keys if configured.downloads == self._started_downloads else (*keys, "downloads")

    async def check(self, config: Config, model: str) -> None:
        """Raises if this model would not load with this config and free memory. Changes nothing."""
        inventory = await asyncio.to_thread(read_inventory, config)
        registry = inventory.registry
        await self._pool.size(self.catalog.known(model), registry.specs[registry.names[model]])

    async def settled(self, model: str) -> None:
        """Wait until a rollout of the model ends. Raises its error."""
        managed = self.catalog.known(model)
        if managed.is_outdated and not managed.rolling_out:
            self._pool.roll_out(managed, managed.spec)  # an earlier rollout failed
        if managed.rollout is None or managed.rollout.done():
            return
        error = await asyncio.shield(managed.rollout)
        if error is not None:
            raise error

    def ask_reload(self) -> None:
        """Start a ``reload`` in the background; the bus publishes its result."""
        if self._tasks is not None and not self._pool.stopping:
            self._tasks.create_task(self._reload_in_background(), name="reload")

    async def _reload_in_background(self) -> None:
        try:
            await self.reload()
        except LlamasupError:
            pass  # published on the bus
        except Exception:  # a bug must not end the models
            _log.exception("reload failed; keeping the previous configuration")

    async def _refresh_folders(self, before: Callable[[], None]) -> None:
        """Apply the changes of the folders at once, without waiting for the watch. ``before`` runs right
        before that, and if the folders cannot be read. The caller has the lock.
        """
        inventory: ModelInventory | None = None
        try:
            inventory = await asyncio.to_thread(read_inventory, self._configured.config, self._search)
        except LlamasupError as error:
            self._bus.publish(ConfigRejected(error))
        finally:
            before()
        if inventory is not None:
            self._apply(inventory)

    def _apply(
        self, inventory: ModelInventory, settings: tuple[str, ...] = (), next_start: tuple[str, ...] = ()
    ) -> Changes:
        before = self.registry.specs
        changes = replace(self.catalog.apply(inventory.registry), settings=settings, next_start=next_start)
        self._search = inventory.search
        self._log_problems(inventory)
        if changes:
            self._bus.publish(ModelsChanged(changes, tuple(inventory.registry.specs)))
            self._preload_new(changes, before)
        return changes

    def _preload_new(self, changes: Changes, before: Mapping[str, ModelSpec]) -> None:
        """Load the models that are to be preloaded and were not before, or whose file or settings changed. A
        model that was unloaded by hand stays unloaded, unless its ``preload`` is new.
        """
        old_ids = {new: old for old, new in changes.renamed}
        for id_ in (*changes.added, *changes.changed, *changes.retouched):
            managed = self.catalog.known(id_)
            if not managed.spec.stay.preload or managed.holds_memory or self._tasks is None:
                continue
            known = before.get(old_ids.get(id_, id_))
            is_new = known is None or not known.stay.preload
            if is_new or (id_ in changes.changed and not managed.unloaded):
                self._tasks.create_task(self._preload(managed), name=f"{id_}/preload")

    async def _preload(self, managed: ManagedModel) -> None:
        with contextlib.suppress(LlamasupError):  # published on the bus
            await self._pool.load(managed, "preload")

    def _follow_config(self) -> None:
        if self._configured.config.watch:
            self._watch_wanted.set()
        else:
            self._watch_wanted.clear()

    async def _follow_runtime(self, path: str) -> None:
        for follow in attached("follow_runtime"):
            await follow(path, lambda: self._pool.options.runtime or "", self.control_target.follow_runtime)

    async def _watch_folders(self) -> None:
        """Apply changes of model files. A reload restarts the watch with the new folders, and with the files
        that the reload has applied.
        """
        while True:
            self._applied.clear()
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(
                    self._follow(search_paths(self._configured.config)), name="watch"
                )
                await self._applied.wait()
                following.cancel()

    async def _follow(self, paths: SearchPaths) -> None:
        if not (paths.folders or paths.paths):
            return
        first = self._configured.inventory.search
        async with ModelWatch(paths.folders, paths.paths, first, follow_links=paths.follow_links) as watch:
            async for search in watch.changes():
                async with self._reload_lock:
                    if self._applied.is_set():
                        return
                    try:
                        inventory = await asyncio.to_thread(build_inventory, self._configured.config, search)
                    except LlamasupError as error:
                        self._bus.publish(ConfigRejected(error))
                    else:
                        self._apply(inventory)

    async def _watch_config(self) -> None:
        while True:
            await self._watch_wanted.wait()
            await asyncio.sleep(_CONFIG_POLL_S)
            stamp = await asyncio.to_thread(self._source.stamp)
            if stamp == self._stamp or not self._configured.config.watch:
                continue
            await asyncio.sleep(_CONFIG_POLL_S)
            if stamp == await asyncio.to_thread(self._source.stamp):  # it is no longer being written
                await self._reload_in_background()

    # --- downloads --------------------------------------------------------------------------------------

    def _on_demand_spec(self, name: str) -> ModelSpec | None:
        """The spec of a model that only a request names, if the config allows downloads on demand."""
        config = self._configured.config
        if not downloads_on_demand(config):
            return None
        try:
            if not isinstance(parse_ref(name), RepoRef):
                return None
            patterns = [rule for rule in config.rules if rule.is_pattern]
            on_demand = build([ModelRule(name, source=name), *patterns], defaults=config.default_options)
        except LlamasupError:
            return None
        return on_demand.specs[name]

    def _warn_preload_evicted(self, evicted: Iterable[str], failed: Container[str]) -> None:
        managed_models = self.catalog.managed_models()
        absent = {
            model.spec.id for model in managed_models if model.spec.stay.preload and not model.holds_memory
        }
        ids = [id_ for id_ in evicted if id_ in absent and id_ not in failed]
        if ids and not self._pool.stopping:
            _log.warning(
                "The models to preload do not fit into memory together; unloaded again: %s\n"
                "  → Preload fewer or smaller ones (ctx_size, parallel); llamasup ps shows their memory.",
                ", ".join(ids),
            )

    def _log_problems(self, inventory: ModelInventory) -> None:
        """Log each problem once while it lasts."""
        for problem in inventory.registry.problems:
            if problem not in self._problems and not problem.quiet:
                _log.warning("%s", "\n  → ".join(filter(None, (problem.message, problem.remedy))))
        self._problems = frozenset(inventory.registry.problems)
        for note in inventory.notes:
            if note not in self._notes:
                _log.warning("%s", note)
        self._notes = frozenset(inventory.notes)


async def _fetch(downloads: Downloads, reference: str, listener: Listener) -> Path:
    return (await downloads.fetch(reference, listener)).path


def _changed_keys(keys: Iterable[str], now: Config, then: Config) -> tuple[str, ...]:
    """The keys whose values differ."""
    return tuple(key.removesuffix("_s") for key in keys if now.value(key) != then.value(key))
