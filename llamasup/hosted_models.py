"""Many models behind one address: what ``serve`` serves, and how it follows its config and its folders."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from llamasup.control.many_models import ManyModels
from llamasup.control.one_model import Owner
from llamasup.core.address import Address
from llamasup.core.errors import LlamasupError
from llamasup.core.registry import Registry
from llamasup.core.registry_changes import Changes
from llamasup.effects.log_files import log_path_of
from llamasup.runtime.catalog import Catalog
from llamasup.runtime.events import Bus, ConfigRefused, ModelsChanged
from llamasup.runtime.library import Library
from llamasup.runtime.pool import Pool, PoolOptions
from llamasup.runtime.runners import Runners

__all__ = ["HostedModels"]

_log = logging.getLogger(__name__)


class HostedModels:
    """A ``Hosted``. ``read_again`` reads the config and looks into the folders, in a thread; it raises
    ConfigInvalid. ``log_passed_on`` gets the output of all llama-servers, in threads of their own.
    """

    def __init__(
        self,
        library: Library,
        options: PoolOptions,
        owner: Owner,
        bus: Bus,
        folder: Path,
        address: Address,
        *,
        read_again: Callable[[], tuple[Library, PoolOptions]],
        log_passed_on: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        self._bus = bus
        runners = Runners(bus, folder, log_path=log_path_of, log_passed_on=log_passed_on)
        self._pool = Pool(options, runners, bus)
        self.backend = Catalog(library.registry, self._pool)
        self.controlled = ManyModels(owner, self.backend, address, log_path_of, self.reload)
        self._read_again = read_again
        self._reloading = asyncio.Lock()
        self._preloaded: asyncio.Task[None] | None = None
        self._stop_asked = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        _tell_problems(library)

    @property
    def registry(self) -> Registry:
        return self.backend.registry

    @property
    def in_flight(self) -> int:
        return sum(each.served.in_flight for each in self.backend.tenancies())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._pool.run(), name="pool")

    def start(self) -> None:
        """Nothing: what is preloaded waits until requests may come."""

    async def begun(self) -> None:
        await self._pool.running.wait()

    async def ready(self) -> tuple[str, ...] | None:
        for model, error in (await self.backend.preload()).items():
            if not self._pool.stopping:
                _log.warning("%s is not preloaded: %s %s", model, error.message, error.remedy)
        return None if self._pool.stopping else tuple(self.backend.registry.specs)

    def still_ready(self) -> bool:
        return True

    async def ended(self) -> LlamasupError | None:
        await self._stop_asked.wait()
        await self._pool.ended()
        return None

    def ask_stop(self, *, now: bool) -> None:
        self._pool.ask_stop(now=now)
        self._stop_asked.set()

    async def reload(self) -> Changes:
        """Take over what has changed in the config and in the folders. Raises ConfigInvalid; then all is as
        it was (S16).
        """
        async with self._reloading:
            try:
                library, options = await asyncio.to_thread(self._read_again)
            except LlamasupError as error:
                self._bus.publish(ConfigRefused(error))
                raise
            self._pool.options = options
            changes = self.backend.apply(library.registry)
        _tell_problems(library)
        self._bus.publish(ModelsChanged(changes, tuple(library.registry.specs)))
        return changes

    def ask_reload(self) -> None:
        """``reload`` of which nobody waits for the end: the bus tells it."""
        if self._tasks is not None and not self._pool.stopping:
            self._tasks.create_task(self._reload_quietly(), name="reload")

    async def _reload_quietly(self) -> None:
        with contextlib.suppress(LlamasupError):
            await self.reload()


def _tell_problems(library: Library) -> None:
    for problem in library.registry.problems:
        _log.warning("%s", " ".join(filter(None, (problem.message, problem.remedy))))
    for note in library.notes:
        _log.warning("%s", note)
