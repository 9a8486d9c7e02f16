"""Sizes a model: downloads it if it is missing, and estimates its memory with a plan for it alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from llamasup.downloads.manager import Listener, Progress
from llamasup.errors import LlamasupError, ModelInvalid
from llamasup.models.spec import ModelSpec
from llamasup.planning.facts import read_given
from llamasup.pool.model import ManagedModel, SizedModel, estimate_model
from llamasup.supervision.events import Bus, Downloading

if TYPE_CHECKING:
    from llamasup.pool.options import PoolOptions

__all__ = ["Fetch", "ModelSizer"]

Fetch = Callable[[str, Listener], Awaitable[Path]]
"""(reference, progress listener) → the file. Raises a LlamasupError if the download fails."""

_log = logging.getLogger(__name__)


class ModelSizer:
    """``fetch``: None if downloads are off. ``options`` returns the current options of the pool."""

    def __init__(self, fetch: Fetch | None, bus: Bus, options: Callable[[], PoolOptions]) -> None:
        self._fetch = fetch
        self._bus = bus
        self._options = options

    async def size(self, managed: ManagedModel, spec: ModelSpec) -> SizedModel:
        """Raises the errors of ``fetch`` and ``estimate_model``."""
        try:
            return await self._size(managed, spec)
        except (LlamasupError, asyncio.CancelledError):
            raise
        except Exception as error:
            # Any file of a folder is read here: an unexpected error must not end the other models.
            _log.exception("model %r cannot be read", spec.id)
            raise LlamasupError(
                f"Model {spec.id!r} cannot be read because of a bug in llamasup ({type(error).__name__}).",
                remedy="Report it with the traceback from llamasup's log.",
            ) from error

    async def _size(self, managed: ManagedModel, spec: ModelSpec) -> SizedModel:
        if spec.problem:
            if spec.source and not spec.is_remote:
                await asyncio.to_thread(read_given, spec.source)  # raises a more precise error
            raise ModelInvalid(spec.problem)
        local = spec
        if spec.is_remote and self._fetch is not None:
            local = replace(spec, source=str(await self._fetched(managed, spec, self._fetch)))
        return replace(await self._planned(local), spec=spec)

    async def _planned(self, spec: ModelSpec) -> SizedModel:
        """Planned again if a reload changes the budget meanwhile."""
        while True:
            options = self._options()
            try:
                sized = await asyncio.to_thread(
                    estimate_model, spec, options.budget, options.runtime, options.environ
                )
            except LlamasupError:
                if options.budget == self._options().budget:
                    raise
            else:
                if options.budget == self._options().budget:
                    return sized

    async def _fetched(self, managed: ManagedModel, spec: ModelSpec, fetch: Fetch) -> Path:
        def downloading(progress: Progress) -> None:
            managed.downloading(progress)
            done, total, speed = progress.done_bytes, progress.total_bytes, progress.bytes_per_s
            self._bus.publish(Downloading(managed.spec.id, done, total, speed))

        try:
            return await fetch(spec.source, downloading)
        finally:
            managed.downloading(None)
