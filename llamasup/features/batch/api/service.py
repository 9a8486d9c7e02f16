"""Answers clients of the API: takes files and new batches, shows and cancels them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from msgspec.structs import replace

from llamasup.core.auth.keys import Keys
from llamasup.core.http.address import Address
from llamasup.errors import Conflict, LlamasupError, Stopping
from llamasup.features.batch.api.objects import (
    ENDED,
    BatchUnknown,
    FileUnknown,
    NewBatch,
    StorageLimit,
    StoredBatch,
    StoredFile,
    ended,
    new_batch,
)
from llamasup.features.batch.api.runner import BatchRunner, epoch_s
from llamasup.features.batch.api.store import Store, new_batch_id, receive_file
from llamasup.features.batch.index import in_thread
from llamasup.features.batch.settings import Batches

_log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")


class BatchService:
    """The batches of all clients. ``run`` must be running before anything else works."""

    def __init__(self, settings: Batches, folder: Path, keys: Keys) -> None:
        self._settings = settings
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._opening: asyncio.Task[Store] | None = None
        self._runner = BatchRunner(settings, keys, self._thread)

    async def run(self, address: Address) -> None:
        """Run batches until cancelled, over this address of the proxy."""
        loop = asyncio.get_running_loop()
        self._opening = loop.create_task(self._call(lambda: Store(self._folder)), name="batches/open")
        try:
            try:
                store = await asyncio.shield(self._opening)
            except LlamasupError as error:
                _log.error("No batches: %s %s", error.message, error.remedy)
                return
            await self._runner.run(store, address)
        finally:
            with suppress(LlamasupError):
                store = await self._opening
                await self._call(store.close)
            self._thread.shutdown(wait=False)

    def stop(self) -> None:
        """Stop the run at once, because llamasup stops. It continues at the next start."""
        self._runner.stop()

    # --- files

    async def upload(self, owner: str, content_type: str, body: AsyncIterator[bytes]) -> StoredFile:
        """Store the file of the form while it arrives."""
        store = await self._opened()
        return await receive_file(store, self._thread, self._settings, owner, content_type, body, epoch_s())

    async def file(self, owner: str, file_id: str) -> StoredFile:
        found = await self._stored(Store.file, owner, file_id)
        if found is None:
            raise FileUnknown(
                f"There is no file {file_id[:100]!r}.", remedy="GET /v1/files lists your files."
            )
        return found

    async def content_path(self, owner: str, file_id: str) -> Path:
        file = await self.file(owner, file_id)
        return (await self._opened()).path_of(file.id)

    async def files(self, owner: str, **page: Any) -> Sequence[StoredFile]:
        """Return a page of the client's files, as ``Store.files`` does."""
        return await self._stored(Store.files, owner, **page)

    async def delete(self, owner: str, file_id: str) -> None:
        file = await self.file(owner, file_id)
        if await self._stored(Store.is_in_use, file.id):
            raise Conflict(
                f"A batch reads the file {file_id!r}.",
                remedy="Cancel the batch, or wait until it has finished.",
            )
        await self._stored(Store.remove_file, file.id)

    # --- batches

    async def create(self, owner: str, asked: NewBatch) -> StoredBatch:
        most = self._settings.max_batches
        file = await self.file(owner, asked.input_file_id)
        if await self._stored(Store.count_unfinished, owner) >= most:
            raise StorageLimit(
                f"You have {most} unfinished batches, which is the maximum.",
                remedy="Wait until one has finished, or cancel one.",
            )
        batch = new_batch(asked, new_batch_id(), file, epoch_s())
        await self._stored(Store.save_batch, batch)
        self._runner.wake()
        return batch

    async def batch(self, owner: str | None, batch_id: str) -> StoredBatch:
        """Return a batch. With ``owner`` None, it may be that of any client."""
        found = await self._stored(Store.batch, owner, batch_id)
        if found is None:
            raise BatchUnknown(
                f"There is no batch {batch_id[:100]!r}.", remedy="GET /v1/batches lists your batches."
            )
        return self._runner.live(found)

    async def batches(self, owner: str, *, after: str | None, limit: int) -> Sequence[StoredBatch]:
        found = await self._stored(Store.batches, owner, after=after, limit=limit)
        return [self._runner.live(batch) for batch in found]

    async def batches_of_all(self, limit: int) -> Sequence[StoredBatch]:
        return [self._runner.live(batch) for batch in await self._stored(Store.batches_of_all, limit)]

    async def cancel(self, owner: str | None, batch_id: str) -> StoredBatch:
        """Cancel a batch. With ``owner`` None, an operator cancels that of any client."""
        store = await self._opened()
        while True:
            batch = await self.batch(owner, batch_id)
            if batch.status in ENDED or batch.status in ("cancelling", "finalizing"):
                return batch
            now_s = epoch_s()
            if (cancelling := self._runner.cancel(batch.id, now_s)) is not None:
                await self._call(store.save_batch, cancelling)
                return self._runner.live(cancelling)
            if batch.in_progress_at is None:
                changed = ended(batch, "cancelled", now_s, cancelling_at=now_s)
            else:  # it waits for its next turn, and ends then with its answers so far
                changed = replace(batch, status="cancelling", cancelling_at=now_s)
            if await self._call(store.replace_batch, batch, changed):
                self._runner.wake()
                return changed

    # --- private

    async def _opened(self) -> Store:
        """Raises what the opening raised."""
        if self._opening is None or self._runner.is_stopping:
            raise Stopping("The batches are not available now.", remedy="Try again shortly.")
        return await asyncio.shield(self._opening)

    async def _stored(
        self, method: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of the store, once it is open."""
        return await self._call(partial(method, await self._opened(), *args, **kwargs))

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function in the thread of the store."""
        return await in_thread(partial(function, *arguments), self._thread)
