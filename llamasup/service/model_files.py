"""Downloads and removes the models of ``serve`` when clients request it (``ModelFiles`` of the control API).

Downloads exactly what a request for the model would download.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from llamasup.core.config.config_keys import Config
from llamasup.core.control.interface import Fetch
from llamasup.core.hub.reference import RepoRef, parse_ref
from llamasup.core.hub.remote_file import Listener
from llamasup.core.hub.store import DownloadSettings, FetchedModel, hub_endpoint
from llamasup.core.llama_server.slots.store import sweep_slots
from llamasup.core.models.file_use import ServedFiles, models_gone_with
from llamasup.core.models.removal import Removal, entries_of, refuse_loaded, remove, to_remove
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.catalog import Catalog
from llamasup.core.pool.model import ManagedModel
from llamasup.core.settings.names import why_not_a_name
from llamasup.core.system.text import printable
from llamasup.errors import (
    Conflict,
    LlamasupError,
    ModelInvalid,
    ModelUnknown,
    NotAllowed,
    UsageInvalid,
)
from llamasup.features import missing_feature

__all__ = ["ModelFiles"]

_log = logging.getLogger(__name__)


class Downloads(Protocol):
    """Owns the downloads of a service."""

    async def fetch(self, ref: str, progress: Listener | None = None) -> FetchedModel:
        """Download the model of ``ref``, unless it is in the folder."""
        ...

    async def aclose(self) -> None:
        """End all downloads, and wait for that."""
        ...


class _Going(Struct, frozen=True):
    """The files that a removal removes. ``models`` are the ids of the models that are gone then."""

    folder: Path
    removals: tuple[Removal, ...]
    models: tuple[str, ...]

    def remove(self) -> Mapping[str, Any]:
        """Returns what ``llamasup rm --json`` shows. Blocks; raises Conflict if a process uses a file."""
        freed = sum(removal.size_bytes for removal in self.removals)
        try:
            for removal in self.removals:
                refuse_loaded(removal)
            for removal in self.removals:
                remove(removal, self.folder)
        except UsageInvalid as error:
            raise Conflict(error.message, remedy=error.remedy) from None
        sweep_slots()
        paths = [str(path) for removal in self.removals for path in (*removal.files, *removal.downloads)]
        return {"removed": paths, "freed_bytes": freed}


def downloads_on_demand(config: Config) -> bool:
    """Whether a request may name a model that only the hub has."""
    downloads = config.features.get("downloads")
    return downloads is not None and downloads.on_demand


class ModelFiles:
    """``config`` returns the current one. Only the owner of the lock ``changes`` changes the config or the
    list of models. ``refresh`` reads the folders again, and calls its argument right before it applies them.
    """

    def __init__(
        self,
        catalog: Catalog,
        downloads: Downloads | None,
        settings: DownloadSettings,
        environ: Mapping[str, str],
        config: Callable[[], Config],
        changes: asyncio.Lock,
        refresh: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._catalog = catalog
        self._downloads = downloads
        self._settings = settings
        self._environ = environ
        self._config = config
        self._changes = changes
        self._refresh = refresh

    def pull(self, name: str) -> Fetch:
        if self._downloads is None:
            raise missing_feature("downloads")
        managed = self._catalog.find(name)
        if managed is None:
            spec = self._catalog.can_create(name)
            if spec is None:
                raise self._why_unknown(name)
            return partial(self._fetch, spec.id, spec.source)
        spec = managed.spec
        if spec.problem:
            raise ModelInvalid(spec.public_problem(spec.problem), remedy=spec.redacted(spec.remedy))
        return partial(self._fetch, name, spec.source if spec.is_remote else None)

    async def _fetch(self, name: str, source: str | None, listener: Listener) -> None:
        if source is None or self._downloads is None:  # its file is here
            return
        try:
            await self._downloads.fetch(source, listener)
        except LlamasupError as error:
            _log.warning("The download of %s failed: %s", printable(name), error.message)
            raise
        if self._catalog.find(name, create=True) is None:
            raise Conflict(
                f"{printable(name)} is downloaded, but not listed: too many other models that requests named "
                "are in use.",
                remedy="Try again later.",
            )

    def _why_unknown(self, name: str) -> LlamasupError:
        """Why no request for this name would download it."""
        shown = printable(name[:200])
        self._catalog.refuse_ambiguous(name)
        try:
            is_repository = isinstance(parse_ref(name), RepoRef) and not why_not_a_name(name)
        except UsageInvalid:
            is_repository = False
        if is_repository and not downloads_on_demand(self._config()):
            return NotAllowed(
                f"Only the models that the config names may be downloaded, and {shown!r} is not one of them.",
                remedy="Add it to the models of the config (repo), or set downloads.on_demand to true.",
            )
        return ModelUnknown(
            f"{shown!r} is neither a model of this llamasup nor a repository of the hub.",
            remedy="Write hf.co/ORG/REPO or hf.co/ORG/REPO:QUANT: llamasup does not know the short names "
            "of Ollama's library.",
        )

    async def remove(self, managed: ManagedModel) -> Mapping[str, Any]:
        """Requests for the model are refused from the last check until its files are gone, so none loads it
        meanwhile. The lock keeps the config and the list of models as they were checked.
        """
        catalog = self._catalog
        async with self._changes:
            if managed.removed:
                raise ModelUnknown(f"The model {managed.spec.id!r} was removed just now.")
            with catalog.removal():
                served = {other.spec.id: other.found for other in catalog.managed_models()}
                going = await asyncio.to_thread(self._plan, managed.spec, self._config(), served.values())
                for id_ in going.models:
                    await self._unload(id_)
                self._refuse_used(going.models)
                serve = catalog.withdraw(going.models)
                is_gone = False
                try:
                    removed = await asyncio.to_thread(going.remove)
                    is_gone = True
                finally:
                    await self._refresh(lambda: serve(is_gone))
        return removed

    async def _unload(self, id_: str) -> None:
        # Two models on demand with one file become one after their sizing.
        managed = self._catalog.pool.managed_models.get(id_)
        if managed is not None and not managed.is_used():
            await self._catalog.pool.unload(managed)

    def _refuse_used(self, ids: Iterable[str]) -> None:
        for managed in map(self._catalog.pool.managed_models.get, ids):
            if managed is not None and (managed.is_used() or managed.holds_memory):
                raise Conflict(
                    f"Requests use the model {managed.spec.id!r}.",
                    remedy="Try again when they have finished.",
                )

    def _plan(self, spec: ModelSpec, config: Config, served: Iterable[ModelSpec]) -> _Going:
        """Blocks. Raises Conflict if a file of the model must stay."""
        name, folder = spec.source, self._settings.folder
        model = self._settings.find(name, self._environ) if spec.is_remote else None
        if model is not None:
            name = str(model.path)
        if model is not None or not spec.is_remote:
            own = frozenset(entries_of(name)[:1])
            models_gone_with(spec, own, config.rules, config.default_options, (), entries_of)
            folder = self._folder_of(Path(name))
        removals = to_remove([name], folder, hub_endpoint(self._environ, self._settings.endpoint))
        entries = frozenset[str]().union(*(removal.entries for removal in removals))
        files = map(self._files_of, served)
        gone = models_gone_with(spec, entries, config.rules, config.default_options, files, entries_of)
        return _Going(folder, removals, gone)

    def _files_of(self, spec: ModelSpec) -> ServedFiles:
        """Blocks."""
        found: FetchedModel | None = None
        if spec.is_remote:
            with contextlib.suppress(UsageInvalid):  # two files match its name, so it is loaded from neither
                found = self._settings.find(spec.source, self._environ)
        if found is None:
            return ServedFiles(spec)
        projector = () if found.mmproj is None else (str(found.mmproj),)
        return ServedFiles(spec, (*map(str, found.parts), *projector))

    def _folder_of(self, path: Path) -> Path:
        """The models folder with this file."""
        folders = (self._settings.folder, *self._config().models_dir, *self._settings.others)
        for folder in folders:
            if path.parent.resolve().is_relative_to(folder.resolve()):
                return folder
        raise Conflict(
            f"{printable(str(path))} is in no models folder (models_dir, downloads.folder).",
            remedy="Remove it by hand.",
        )
