"""Runs the batches of the API, one at a time.

A batch runs with the rights and the limits of the key that has created it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from llamasup.core.auth.api_key import ApiKey, digest_of
from llamasup.core.auth.key_source import PROCESS_SALT
from llamasup.core.auth.keys import Keys
from llamasup.core.http.address import Address, UnixAddress
from llamasup.errors import LlamasupError, NotAllowed, UsageInvalid
from llamasup.features.batch.api.objects import (
    DAY_S,
    ENDED,
    TURN_S,
    LineMistake,
    StoredBatch,
    StoredFile,
    ended,
    next_batch,
)
from llamasup.features.batch.api.store import Store, new_file_id
from llamasup.features.batch.client import BatchClient
from llamasup.features.batch.engine import BatchRun, EngineOptions, Progress
from llamasup.features.batch.index import BatchInvalid, Counts, Index, in_thread
from llamasup.features.batch.job import Job, Prepared, prepare
from llamasup.features.batch.output import divide
from llamasup.features.batch.schedule import Window, read_window
from llamasup.features.batch.settings import Batches

_log = logging.getLogger(__name__)

RETRY_S: Final = 30.0
"""After trouble that is not the batch's: a full disk, or a server that does not come back."""
CHECK_S: Final = 1.0
"""How often the key and the end of the completion window of the running batch are checked."""
CLEAN_UP_S: Final = 600.0
_BUG: Final = LineMistake("internal_error", "this batch has met a bug of llamasup; its log has the details")
_KEY_GONE: Final = LineMistake("key_removed", "the API key of this batch has been removed")

T = TypeVar("T")


def epoch_s() -> int:
    return int(datetime.now(UTC).timestamp())


class BatchRunner:
    """Owns the turns of the clients, and the batch that runs. ``thread`` is that of the store."""

    def __init__(self, settings: Batches, keys: Keys, thread: Executor) -> None:
        self._settings = settings
        self._keys = keys
        self._thread = thread
        self._address: Address = UnixAddress("")
        self._window: Window | None = (
            None if settings.only_between is None else read_window(settings.only_between)
        )
        self._wake = asyncio.Event()
        self._current: StoredBatch | None = None
        self._engine: BatchRun | None = None
        self._turns: dict[str, int] = {}  # of each client with batches: the number of its last turn
        self._turn = count(1)
        self._counts: dict[str, Counts] = {}  # of batches that have to wait: a full disk may not take them
        self.is_stopping = False

    def stop(self) -> None:
        """Stop the run at once, because llamasup stops. It continues at the next start."""
        self.is_stopping = True
        if self._engine is not None:
            self._engine.stop()
        self._wake.set()

    def wake(self) -> None:
        """Look at the stored batches again: they have changed."""
        self._wake.set()

    def cancel(self, batch_id: str, now_s: int) -> StoredBatch | None:
        """Cancel the batch if it is the one that runs, and return it changed; the caller saves it."""
        if self._current is None or self._current.id != batch_id:
            return None
        if self._engine is not None:
            self._engine.stop()
        return self._change(status="cancelling", cancelling_at=now_s)

    def live(self, batch: StoredBatch) -> StoredBatch:
        """Return the batch with its current counts."""
        current = self._current
        if current is None or current.id != batch.id:
            counts = None if batch.status in ENDED else self._counts.get(batch.id)
            return batch if counts is None else _counted(batch, counts)
        return current if self._engine is None else _counted(current, self._engine.progress)

    async def run(self, store: Store, address: Address) -> None:
        """Run batches until cancelled, over this address of the proxy."""
        self._address = address
        while not self.is_stopping:
            self._wake.clear()
            try:
                now_s = epoch_s()
                await self._call(store.remove_expired, now_s, now_s - self._settings.keep_days * DAY_S)
                unfinished = await self._call(store.unfinished)
                batch = next_batch(unfinished, self._turns, now_s)
                if batch is not None:
                    owners = {one.owner for one in unfinished}
                    self._turns = {owner: turn for owner, turn in self._turns.items() if owner in owners}
                    waiting = {one.id for one in unfinished}
                    self._counts = {id_: counts for id_, counts in self._counts.items() if id_ in waiting}
                    self._turns[batch.owner] = next(self._turn)
                    self._current = batch
                    # A client may have cancelled it since; from now on ``cancel`` changes ``_current``.
                    stored = await self._call(store.batch, batch.owner, batch.id)
                    if stored is not None and stored.status not in ENDED:
                        if self._current is batch:
                            self._current = stored
                        await self._run_batch(store)
                    continue
                wait_s = CLEAN_UP_S
            except LlamasupError as error:
                _log.warning("A batch has to wait: %s %s", error.message, error.remedy)
                wait_s = RETRY_S
            except Exception:  # a bug must not end llamasup, nor repeat at each start
                _log.exception("A batch has failed: %s", self._current)
                wait_s = RETRY_S
                if self._current is not None:
                    with suppress(LlamasupError):
                        await self._fail(store, (_BUG,))
                        wait_s = 0.0
            finally:
                if (ran := self._current) is not None:
                    self._counts[ran.id] = Counts(ran.total, ran.completed, ran.failed)
                self._current = None
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    async def _run_batch(self, store: Store) -> None:
        """Run ``_current`` to its end. Raises LlamasupError if it has to wait."""
        current = self._current
        assert current is not None
        batch, folder = current, await self._call(store.run_folder, current.id)
        job = Job(batch.id, str(store.path_of(batch.input_file_id)), str(folder / "out.jsonl"))
        with suppress(LlamasupError):  # its first run has no index
            kept = await in_thread(partial(_kept_counts, job.index_path))
            self._current = _counted(self._change(), kept)
        with ExitStack() as stack:
            most_lines = self._settings.max_lines
            open_files = partial(
                prepare, job, self._check_reading, most_lines=most_lines, only_url=batch.endpoint
            )
            try:
                # In the stack at once: this task may have been cancelled in the meantime.
                prepared = await in_thread(lambda: stack.enter_context(open_files()))
            except _ReadingStopped:
                if self._is_cancelled:
                    await self._call(store.save_batch, ended(self._change(), "cancelled", epoch_s()))
                    await self._call(store.remove_run, batch.id)
                return
            except (BatchInvalid, UsageInvalid) as error:  # a mistake, or the file is gone
                await self._fail(store, _mistakes_of(error))
                return
            await self._run_prepared(store, prepared)

    def _check_reading(self, _read: int, _size: int) -> None:
        """Called in the thread that reads the input, now and then."""
        has_begun = self._current is not None and self._current.in_progress_at is not None
        if self.is_stopping or (self._is_cancelled and not has_begun):
            raise _ReadingStopped

    async def _run_prepared(self, store: Store, prepared: Prepared) -> None:
        counts = await in_thread(prepared.index.counts)
        batch = self._current = _counted(self._change(), counts)
        if batch.status == "validating":  # and no client has cancelled it
            batch = self._change(status="in_progress", in_progress_at=epoch_s())
            await self._call(store.save_batch, batch)
        errors: tuple[LineMistake, ...] = ()
        try:
            reason = await self._run_lines(store, prepared)
            if reason == "failed":
                errors = (_KEY_GONE,)
        except (BatchInvalid, NotAllowed) as error:
            reason, errors = "failed", _mistakes_of(error)
            if not (await in_thread(prepared.index.counts)).finished:
                await self._fail(store, errors)
                return
        except LlamasupError:
            raise
        except Exception:
            _log.exception("The batch %s has failed", batch.id)
            reason, errors = "failed", (_BUG,)
        if reason:
            await self._finish(store, prepared, reason, errors)
        else:
            await self._call(store.save_batch, self._change())  # with its counts

    async def _run_lines(self, store: Store, prepared: Prepared) -> str:
        """Run the lines. Returns how the batch ends (a value of ``ENDED``), or nothing if it continues."""
        batch = self._current
        assert batch is not None
        if not (await in_thread(prepared.index.counts)).left:
            return "completed"
        borrowed = _BorrowedKey(self._keys, batch.owner)
        if reason := self._end_of(borrowed):
            return reason
        socket = self._address.path if isinstance(self._address, UnixAddress) else None
        client = BatchClient(self._address.url, socket=socket, api_key=borrowed.secret)
        try:
            await prepared.check_models(client)
            engine = self._engine = prepared.run(client, EngineOptions(only_between=self._window))
            if self.is_stopping or self._is_cancelled:
                engine.stop()
            watch = self._watch(store, engine, borrowed)
            watching = asyncio.get_running_loop().create_task(watch, name="batches/end")
            try:
                counts = await engine.run()
            finally:
                self._current = _counted(self._current or batch, engine.progress)
                self._engine = None
                watching.cancel()
            return "completed" if not counts.left else self._end_of(borrowed)
        finally:
            borrowed.release()
            await client.aclose()

    async def _watch(self, store: Store, engine: BatchRun, borrowed: _BorrowedKey) -> None:
        """The clock and the file of keys change without an event."""
        turn_ends_s = monotonic() + TURN_S
        while True:
            if self._end_of(borrowed):
                break
            if monotonic() >= turn_ends_s:
                unfinished: Sequence[StoredBatch] = ()
                with suppress(LlamasupError):  # another look follows
                    unfinished = await self._call(store.unfinished)
                batch, current = next_batch(unfinished, self._turns, epoch_s()), self._current
                if batch is not None and current is not None and batch.id != current.id:
                    break
                turn_ends_s = monotonic() + TURN_S
            await asyncio.sleep(CHECK_S)
        engine.stop()

    def _end_of(self, borrowed: _BorrowedKey) -> str:
        """Return why the batch must end before all lines are finished, or an empty text."""
        batch = self._current
        if self._is_cancelled:
            return "cancelled"
        if batch is not None and epoch_s() >= batch.expires_at:
            return "expired"
        return "" if borrowed.refresh() else "failed"

    @property
    def _is_cancelled(self) -> bool:
        return self._current is not None and self._current.status == "cancelling"

    def _change(self, **changes: Any) -> StoredBatch:
        """The running batch, changed."""
        assert self._current is not None
        self._current = replace(self._current, **changes)
        return self._current

    async def _fail(self, store: Store, errors: tuple[LineMistake, ...]) -> None:
        """End the batch as failed, without an answer for any line."""
        batch = self._change(errors=errors)
        await self._call(store.save_batch, ended(batch, "failed", epoch_s()))
        await self._call(store.remove_run, batch.id)

    async def _finish(
        self, store: Store, prepared: Prepared, reason: str, errors: tuple[LineMistake, ...]
    ) -> None:
        """Divide the output into the file of answers and the file of errors."""
        now_s = epoch_s()
        batch = self._change(finalizing_at=now_s)
        if not self._is_cancelled:
            batch = self._change(status="finalizing")
        results = {
            kind: StoredFile(
                *(new_file_id(), batch.owner, "batch_output", f"{batch.id}_{kind}.jsonl", 0),
                *(now_s, now_s + self._settings.keep_days * DAY_S),
            )
            for kind in ("output", "error")
        }
        paths = [store.part_path_of(results[kind].id) for kind in ("output", "error")]
        sizes = await in_thread(partial(divide, prepared.output, prepared.index, paths, f"batch_{reason}"))
        files = {
            kind: replace(file, bytes=size)
            for (kind, file), size in zip(results.items(), sizes, strict=True)
            if size
        }
        totals = await in_thread(prepared.index.counts)
        batch = ended(
            batch,
            reason,
            epoch_s(),
            total=totals.total,
            completed=totals.done,
            failed=totals.total - totals.done,
            errors=errors,
            output_file_id=files["output"].id if "output" in files else None,
            error_file_id=files["error"].id if "error" in files else None,
        )
        await self._call(lambda: store.save_batch(batch, tuple(files.values())))
        await self._call(store.remove_run, batch.id)

    # --- private

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function in the thread of the store."""
        return await in_thread(partial(function, *arguments), self._thread)


class _ReadingStopped(Exception):
    """The reading of an input has ended early: llamasup stops, or a client has cancelled the batch."""


class _BorrowedKey:
    """A key of this process with the rights and limits of a client's key, while that exists."""

    def __init__(self, keys: Keys, owner: str) -> None:
        self._keys = keys
        self._owner = owner
        self.secret = secrets.token_urlsafe(32) if owner else None
        self._of: ApiKey | None = None
        self._minted: ApiKey | None = None

    def refresh(self) -> bool:
        """Follow the client's key. Returns whether the requests of the batch have access."""
        if self.secret is None:
            return not self._keys.needed
        key = self._keys.of_client(self._owner)
        if key is not None and key is not self._of:
            self.release()
            digest = digest_of(PROCESS_SALT, self.secret.encode())
            self._of = key
            self._minted = ApiKey(
                key.name, PROCESS_SALT, digest, limits=key.limits, priority=key.priority, models=key.models
            )
            self._keys.mint(self._minted)
        return key is not None and key.infers

    def release(self) -> None:
        if self._minted is not None:
            self._keys.revoke(self._minted)
            self._minted = self._of = None


def _kept_counts(index: Path) -> Counts:
    """Count the lines in the output that a run left. Blocks. Raises OutputFailed."""
    with Index(index, readonly=True) as kept:
        return kept.counts()


def _counted(batch: StoredBatch, counts: Progress | Counts) -> StoredBatch:
    if not counts.total:  # the run has not begun
        return batch
    return replace(batch, total=counts.total, completed=counts.done, failed=counts.failed)


def _mistakes_of(error: LlamasupError) -> tuple[LineMistake, ...]:
    """Return the mistakes for the field ``errors`` of a batch."""
    mistakes = error.mistakes if isinstance(error, BatchInvalid) else ()
    if not mistakes:
        return tuple(LineMistake(error.cause, text) for text in (error.message, *error.details))
    return tuple(LineMistake("invalid_line", text, line) for line, text in mistakes)
