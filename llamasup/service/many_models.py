"""Many models behind one address: what ``serve`` serves, and how it follows its config and its folders."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from llamasup.config import Config
from llamasup.control.many_models import ManyModels
from llamasup.control.one_model import ServiceOwner
from llamasup.downloads.manager import Downloads, DownloadSettings, Listener
from llamasup.downloads.reference import RepoRef, parse_ref
from llamasup.errors import LlamasupError
from llamasup.http.address import Address
from llamasup.models.diff import Changes
from llamasup.models.registry import Registry, build
from llamasup.models.rules import ModelRule, Problem
from llamasup.models.search import Search
from llamasup.models.spec import ModelSpec
from llamasup.models.watch import ModelWatch
from llamasup.pool.catalog.catalog import Catalog
from llamasup.pool.model import ManagedModel
from llamasup.pool.options import PoolOptions
from llamasup.pool.pool import Pool
from llamasup.pool.processes import Runners
from llamasup.pool.rollout import roll_out
from llamasup.service.library import ModelInventory, SearchPaths, library_of, read_library, shelves_of
from llamasup.supervision.events import Bus, ConfigRejected, ModelsChanged, ModelUnloading, PublishedEvent
from llamasup.supervision.runner import InstanceRunner
from llamasup.system.process.log_tail import LogFiles

__all__ = ["Configured", "HostedModels", "Source"]

_log = logging.getLogger(__name__)

# Read once, when it starts: addresses are taken and connections set up by then.
_AT_THE_START = ("listen", "runtime", "auth", "http")
_FROM_NOW_ON = (
    *("models_dir", "caches", "memory", "max_loaded", "default_model", "swap_after_s", "slots", "watch"),
)
_LOOK_S = 1.0  # at the config, where it is watched; a stat


@dataclass(frozen=True, slots=True)
class Configured:
    """A config, and what follows from it on this machine, as it is now."""

    config: Config
    library: ModelInventory
    options: PoolOptions
    downloads: DownloadSettings


class Source(Protocol):
    def read(self, before: Search | None = None) -> Configured:
        """The config and the folders as they are now; of a folder that is not there what it had ``before``.
        Blocks; raises ConfigInvalid.
        """
        ...

    def check(
        self, configured: Configured, before: Mapping[str, ModelSpec], *, less_memory: bool = False
    ) -> None:
        """Blocks; raises ConfigInvalid for a model that the config names otherwise than ``before``, and that
        is not there, is broken or can never fit. ``less_memory``: or that fits no more.
        """
        ...

    def stamp(self) -> object:
        """Of the config's file: another one once it was changed. None: there is no file to be watched."""
        ...


class HostedModels:
    """A ``Hosted``. ``insists``: it ends with the reason if something cannot be preloaded. ``log_passed_on``
    gets the output of all llama-servers, in threads of their own.
    """

    def __init__(
        self,
        configured: Configured,
        source: Source,
        owner: ServiceOwner,
        bus: Bus,
        folder: Path,
        address: Address,
        *,
        fail_on_preload_error: bool = False,
        log_passed_on: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        self._configured = configured
        self._search = configured.library.search  # what lies in the folders, as far as it was taken over
        self._started_with = configured.config
        self._insists = fail_on_preload_error
        self._error: LlamasupError | None = None
        self._source = source
        self._stamp = source.stamp()
        self._bus = bus
        self._started_downloads = configured.downloads
        self._downloads = Downloads(configured.downloads, folder, configured.options.environ)
        self._logs = LogFiles()
        runners = Runners(bus, folder, log_path=self._logs.path_of, log_passed_on=log_passed_on)
        self._pool = Pool(configured.options, runners, bus, self._fetch)
        self.backend = Catalog(configured.library.registry, self._pool, self._invite)
        self.controlled = ManyModels(owner, self.backend, address, self._logs.path_of, self.reload)
        self._changing = asyncio.Lock()
        self._taken_over = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._watch_wanted = asyncio.Event()
        self._problems: frozenset[Problem] = frozenset()
        self._notes: frozenset[str] = frozenset()
        self._follow_config()
        self._tell_problems(configured.library)

    @property
    def registry(self) -> Registry:
        return self.backend.registry

    @property
    def in_flight(self) -> int:
        return sum(each.served.in_flight for each in self.backend.managed_models())

    @property
    def budget(self) -> Mapping[str, int]:
        """Bytes by place, for all models together."""
        return self._pool.options.budget

    def runners_of(self, model: str) -> Sequence[InstanceRunner]:
        """Its processes; none of a model that was never wanted, or is none."""
        managed = self._pool.managed_models.get(model)
        return () if managed is None else tuple(managed.runners)

    # --- Hosted -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._pool.run(), name="pool")
                tasks.create_task(self._watch_folders(), name="folders")
                tasks.create_task(self._watch_config(), name="config")
        finally:
            self._logs.close()
            await self._downloads.aclose()

    def start(self) -> None:
        """Nothing: what is preloaded waits until requests may come."""

    async def begun(self) -> None:
        await self._pool.running.wait()

    async def ready(self) -> tuple[str, ...] | None:
        left: dict[str, None] = {}

        def hear(notice: PublishedEvent) -> None:
            if isinstance(notice, ModelUnloading) and notice.for_model:
                left[notice.model] = None

        self._bus.listen(hear)
        try:
            failed = await self.backend.preload()
        finally:
            self._bus.unsubscribe(hear)
        self._tell_crowded_out(left, failed)
        for error in failed.values():
            if self._insists:
                self._error = self._error or error
                self.ask_stop(now=False)
        return None if self._pool.stopping else tuple(self.registry.specs)

    def still_ready(self) -> bool:
        return True

    async def ended(self) -> LlamasupError | None:
        await self._stop_asked.wait()
        await self._pool.ended()
        return self._error

    def ask_stop(self, *, now: bool) -> None:
        self._pool.ask_stop(now=now)
        self._stop_asked.set()

    # --- changes ----------------------------------------------------------------------------------------

    async def reload(self) -> Changes:
        """Take over what has changed in the config and in the folders. Raises ConfigInvalid; then all is as
        it was (S16).
        """
        async with self._changing:
            stamp = await asyncio.to_thread(self._source.stamp)
            try:
                configured = await asyncio.to_thread(self._read)
                if configured.library.settles_in_s:  # somebody has just written, and is perhaps not done
                    await asyncio.sleep(configured.library.settles_in_s)
                    configured = await asyncio.to_thread(self._read)
            except LlamasupError as error:
                self._stamp = stamp
                self._bus.publish(ConfigRejected(error))
                raise
            self._stamp = stamp
            before, self._configured = self._configured, configured
            self._pool.apply_options(configured.options)
            self._follow_config()
            self._taken_over.set()
            settings = _differ(_FROM_NOW_ON, configured.config, before.config)
            changes = self._apply(configured.library, settings, self._waits_for_a_start(configured))
        if changes.next_start:
            _log.warning(
                "%s: changed in the config, and as it was until the next start.\n  → Start llamasup anew.",
                ", ".join(changes.next_start),
            )
        if not changes:
            self._bus.publish(ModelsChanged(changes, tuple(self.registry.specs)))
        return changes

    def _read(self) -> Configured:
        """What a start would refuse is refused here, too."""
        configured = self._source.read(self._search)
        less_memory = any(
            size_bytes < self.budget.get(place, 0) for place, size_bytes in configured.options.budget.items()
        )
        self._source.check(configured, self.registry.specs, less_memory=less_memory)
        return configured

    def _waits_for_a_start(self, configured: Configured) -> tuple[str, ...]:
        keys = _differ(_AT_THE_START, configured.config, self._started_with)
        return keys if configured.downloads == self._started_downloads else (*keys, "downloads")

    async def check(self, config: Config, model: str) -> None:
        """Whether this model could be loaded if this were the config, with all memory for it. Raises why not;
        nothing is changed.
        """
        library = await asyncio.to_thread(read_library, config)
        registry = library.registry
        await self._pool.size(self.backend.known(model), registry.specs[registry.names[model]])

    async def settled(self, model: str) -> None:
        """Wait until it serves as is said of it now, if it served before. Raises why it does not."""
        managed = self.backend.known(model)
        if managed.is_outdated and not managed.rolling_out:
            roll_out(self._pool, managed, managed.spec)  # an earlier try came to nothing
        if managed.rollout is None or managed.rollout.done():
            return
        error = await asyncio.shield(managed.rollout)
        if error is not None:
            raise error

    def ask_reload(self) -> None:
        """``reload`` of which nobody waits for the end: the bus tells it."""
        if self._tasks is not None and not self._pool.stopping:
            self._tasks.create_task(self._reload_quietly(), name="reload")

    async def _reload_quietly(self) -> None:
        try:
            await self.reload()
        except LlamasupError:
            pass  # the bus tells it
        except Exception:  # what nobody thought of takes no model: all is as it was
            _log.exception("the config and the folders cannot be read again; what was read before counts")

    def _apply(
        self, library: ModelInventory, settings: tuple[str, ...] = (), next_start: tuple[str, ...] = ()
    ) -> Changes:
        before = self.registry.specs
        changes = replace(self.backend.apply(library.registry), settings=settings, next_start=next_start)
        self._search = library.search
        self._tell_problems(library)
        if changes:
            self._bus.publish(ModelsChanged(changes, tuple(library.registry.specs)))
            self._preload_new(changes, before)
        return changes

    def _preload_new(self, changes: Changes, before: Mapping[str, ModelSpec]) -> None:
        """What is to be there from now on: that was not said before, or it has another file or settings, with
        which it may be possible by now. What was unloaded by hand stays so, unless this is said only now.
        """
        olds = {new: old for old, new in changes.renamed}
        for id_ in (*changes.added, *changes.changed, *changes.retouched):
            managed = self.backend.known(id_)
            if not managed.spec.stay.preload or managed.holds_memory or self._tasks is None:
                continue
            known = before.get(olds.get(id_, id_))
            is_new = known is None or not known.stay.preload
            if is_new or (id_ in changes.changed and not managed.unloaded):
                self._tasks.create_task(self._load_quietly(managed), name=f"{id_}/preload")

    async def _load_quietly(self, managed: ManagedModel) -> None:
        with contextlib.suppress(LlamasupError):  # the bus tells it
            await self._pool.load(managed)

    def _follow_config(self) -> None:
        if self._configured.config.watch:
            self._watch_wanted.set()
        else:
            self._watch_wanted.clear()

    async def _watch_folders(self) -> None:
        """A model comes, changes or goes. After a reload it begins anew: with the folders that the config
        names now, and with what was taken over as known, however new it is.
        """
        while True:
            self._taken_over.clear()
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(self._follow(shelves_of(self._configured.config)), name="watch")
                await self._taken_over.wait()
                following.cancel()

    async def _follow(self, shelves: SearchPaths) -> None:
        if not (shelves.folders or shelves.paths):
            return
        first = self._configured.library.search
        async with ModelWatch(shelves.folders, shelves.paths, first) as watch:
            async for search in watch.changes():
                async with self._changing:
                    if self._taken_over.is_set():
                        return
                    try:
                        library = await asyncio.to_thread(library_of, self._configured.config, search)
                    except LlamasupError as error:
                        self._bus.publish(ConfigRejected(error))
                    else:
                        self._apply(library)

    async def _watch_config(self) -> None:
        while True:
            await self._watch_wanted.wait()
            await asyncio.sleep(_LOOK_S)
            stamp = await asyncio.to_thread(self._source.stamp)
            if stamp == self._stamp or not self._configured.config.watch:
                continue
            await asyncio.sleep(_LOOK_S)
            if stamp == await asyncio.to_thread(self._source.stamp):  # nobody is still writing it
                await self._reload_quietly()

    # --- models that are somewhere else -----------------------------------------------------------------

    async def _fetch(self, reference: str, listener: Listener) -> Path:
        return (await self._downloads.fetch(reference, listener)).path

    def _invite(self, name: str) -> ModelSpec | None:
        """A model that a client names and nobody has said anything of, where the config allows that."""
        config = self._configured.config
        if not config.downloads.on_demand:
            return None
        try:
            if not isinstance(parse_ref(name), RepoRef):
                return None
            patterns = [rule for rule in config.rules if rule.is_pattern]
            invited = build([ModelRule(name, source=name), *patterns], defaults=config.default_options)
        except LlamasupError:
            return None
        return invited.specs[name]

    def _tell_crowded_out(self, left: Iterable[str], failed: Container[str]) -> None:
        """Of those to be preloaded and those that have ``left`` for another since, which are both."""
        managed_models = self.backend.managed_models()
        absent = {each.spec.id for each in managed_models if each.spec.stay.preload and not each.holds_memory}
        gone = [id_ for id_ in left if id_ in absent and id_ not in failed]
        if gone and not self._pool.stopping:
            _log.warning(
                "What is to be preloaded does not fit in memory together: %s had to go again.\n"
                "  → Preload fewer, or smaller ones (ctx_size, parallel); llamasup ps says what each takes.",
                ", ".join(gone),
            )

    def _tell_problems(self, library: ModelInventory) -> None:
        """Each once, as long as it lasts."""
        for problem in library.registry.problems:
            if problem not in self._problems:
                _log.warning("%s", "\n  → ".join(filter(None, (problem.message, problem.remedy))))
        self._problems = frozenset(library.registry.problems)
        for note in library.notes:
            if note not in self._notes:
                _log.warning("%s", note)
        self._notes = frozenset(library.notes)


def _differ(keys: Iterable[str], now: Config, then: Config) -> tuple[str, ...]:
    """Those of the config's keys of which something else is said."""
    return tuple(key.removesuffix("_s") for key in keys if getattr(now, key) != getattr(then, key))
