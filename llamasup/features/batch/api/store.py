"""The files and batches on the disk: a SQLite file, a folder with the contents, and one for running batches.

The methods of ``Store`` block. One thread at a time may call them, and one llamasup uses the folder.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from llamasup.core.system.native import native
from llamasup.core.system.storage.database import (
    Database,
    is_full,
    open_database,
    require_private,
    version_of,
)
from llamasup.core.system.storage.folders import Claimed, claim_file, given_folder, private_folder
from llamasup.errors import Conflict, DiskFull, FolderUnusable, LlamasupError
from llamasup.features.batch.api.form import UploadForm
from llamasup.features.batch.api.objects import (
    ENDED,
    StorageLimit,
    StoredBatch,
    StoredFile,
    check_room,
    uploaded_file,
)
from llamasup.features.batch.index import in_thread
from llamasup.features.batch.settings import Batches

VERSION: Final = 1
_CREATE: Final = """
CREATE TABLE files (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, expires_at INTEGER NOT NULL, value BLOB NOT NULL);
CREATE TABLE batches (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    input TEXT NOT NULL, is_over INTEGER NOT NULL, ended_at INTEGER NOT NULL, value BLOB NOT NULL);
CREATE INDEX files_of ON files (owner, seq);
CREATE INDEX batches_of ON batches (owner, seq);
CREATE INDEX unfinished ON batches (is_over, seq);
"""
DATABASE: Final = "batches.sqlite"
_BLOCK_BYTES: Final = 1 << 20  # read and written together: four of OpenAI's client's pieces
# The names that llamasup gives to files and batches. Others may be of the user, and stay.
_IS_CONTENT: Final = re.compile(r"file-[0-9a-f]{24}|\.file-[0-9a-f]{24}\.part").fullmatch
_IS_RUN: Final = re.compile(r"batch_[0-9a-f]{24}").fullmatch
_file = msgspec.json.Decoder(StoredFile).decode
_batch = msgspec.json.Decoder(StoredBatch).decode


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


class Store(Database):
    """Opens or creates the folder. Raises Conflict if another llamasup uses it, and FolderUnusable."""

    def __init__(self, folder: Path) -> None:
        self.folder = given_folder(folder, DATABASE)
        self._contents = folder / "files"
        self._runs = folder / "running"
        self._arriving: dict[str, tuple[str, int]] = {}  # by id: the owner, and the bytes so far
        path = folder / DATABASE
        with self._mapped_errors():
            # Before all else: a folder that has it belongs to llamasup.
            require_private(path)
            try:
                self._lock = claim_file(folder / "lock")
            except Claimed:
                raise Conflict(
                    f"Another llamasup serves the batches in {str(folder)!r}.",
                    remedy="End the other llamasup, or serve with a config that has another batches.folder.",
                ) from None
            self._db = open_database(path)
            newer = partial(FolderUnusable, remedy="Upgrade llamasup, or set another batches.folder.")
            version = version_of(self._db, VERSION, repr(str(path)), newer)
            tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master")}
            if not {"files", "batches"} <= tables if version else tables:
                raise self._unusable(f"its {DATABASE} belongs to another program")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")  # a client that has got an id finds it again
            if version == 0:
                self._db.executescript(f"BEGIN; {_CREATE} PRAGMA user_version = {VERSION}; COMMIT;")
        private_folder(self._contents)
        private_folder(self._runs)
        self._reconcile()

    def close(self) -> None:
        self._db.close()
        if self._lock is not None:
            os.close(self._lock)

    # --- files

    def path_of(self, file_id: str) -> Path:
        """Return where the content of a file is. Only for ids of ``StoredFile``."""
        return self._contents / file_id

    def part_path_of(self, file_id: str) -> Path:
        """Return where the content is while it is being written."""
        return self._contents / f".{file_id}.part"

    def reserve(self, file_id: str, owner: str, size: int, settings: Batches) -> None:
        """Count a file that arrives, with its size so far, until ``add_file`` or ``release``.

        Raises FileLimit and StorageLimit.
        """
        others = [arrives for id_, arrives in tuple(self._arriving.items()) if id_ != file_id]
        files = 1 + self.count_files(owner) + sum(one == owner for one, _ in others)
        check_room(settings, size, files, size + self.held_bytes() + sum(held for _, held in others))
        self._arriving[file_id] = owner, size

    def release(self, file_id: str) -> None:
        """Count a file that arrived no longer. Any thread may call this: it is one step of a dict."""
        self._arriving.pop(file_id, None)

    def add_file(self, file: StoredFile) -> None:
        """Add a file whose content is complete in ``part_path_of``."""
        with self._adding([file]):
            pass
        self.release(file.id)

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        rows = self._rows("SELECT value FROM files WHERE owner = ? AND id = ?", owner, file_id)
        return _file(rows[0][0]) if rows else None

    def files(
        self,
        owner: str,
        *,
        after: str | None,
        limit: int,
        purpose: str | None = None,
        oldest_first: bool = False,
    ) -> Sequence[StoredFile]:
        """Return a page of files. ``after`` is the id of the last file of the page before."""
        sign, order = (">", "ASC") if oldest_first else ("<", "DESC")
        query = (
            "SELECT value FROM files WHERE owner = ?1 AND (?2 IS NULL OR purpose = ?2)"  # noqa: S608 - fixed
            f" AND (?3 IS NULL OR seq {sign} (SELECT seq FROM files WHERE owner = ?1 AND id = ?3))"
            f" ORDER BY seq {order} LIMIT ?4"
        )
        rows = self._rows(query, owner, purpose, after, limit)
        return [_file(value) for (value,) in rows]

    def count_files(self, owner: str) -> int:
        return int(self._rows("SELECT count(*) FROM files WHERE owner = ?", owner)[0][0])

    def held_bytes(self) -> int:
        """Return the bytes of the files of all clients."""
        return int(self._rows("SELECT coalesce(sum(bytes), 0) FROM files")[0][0])

    def is_in_use(self, file_id: str) -> bool:
        """Whether an unfinished batch reads the file."""
        return bool(self._rows("SELECT 1 FROM batches WHERE is_over = 0 AND input = ? LIMIT 1", file_id))

    def remove_file(self, file_id: str) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        with suppress(FileNotFoundError):
            # On Windows, it stays until the next start while a client downloads it.
            native.remove(self.path_of(file_id), waits=False)

    # --- batches

    def save_batch(self, batch: StoredBatch, new_files: Sequence[StoredFile] = ()) -> None:
        """Add or replace it, together with files whose contents are complete in ``part_path_of``."""
        with self._adding(new_files):
            self._db.execute(
                "INSERT INTO batches (id, owner, input, is_over, ended_at, value) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET is_over = excluded.is_over,"
                " ended_at = excluded.ended_at, value = excluded.value",
                (
                    *(batch.id, batch.owner, batch.input_file_id, batch.status in ENDED, batch.ended_at or 0),
                    msgspec.json.encode(batch),
                ),
            )

    def replace_batch(self, known: StoredBatch, new: StoredBatch) -> bool:
        """Replace it if it is still as known. Returns whether it was."""
        with self._transaction():
            changed = self._db.execute(
                "UPDATE batches SET is_over = ?, ended_at = ?, value = ? WHERE id = ? AND value = ?",
                (
                    *(new.status in ENDED, new.ended_at or 0, msgspec.json.encode(new)),
                    *(new.id, msgspec.json.encode(known)),
                ),
            )
        return changed.rowcount == 1

    def batch(self, owner: str | None, batch_id: str) -> StoredBatch | None:
        """Return a batch. With ``owner`` None, it may be that of any client."""
        rows = self._rows(
            "SELECT value FROM batches WHERE (?1 IS NULL OR owner = ?1) AND id = ?2", owner, batch_id
        )
        return _batch(rows[0][0]) if rows else None

    def batches(self, owner: str, *, after: str | None, limit: int) -> Sequence[StoredBatch]:
        """Return a page of batches, the newest first. ``after`` is the id of the last batch of the page
        before.
        """
        rows = self._rows(
            "SELECT value FROM batches WHERE owner = ?1 AND (?2 IS NULL OR"
            " seq < (SELECT seq FROM batches WHERE owner = ?1 AND id = ?2)) ORDER BY seq DESC LIMIT ?3",
            *(owner, after, limit),
        )
        return [_batch(value) for (value,) in rows]

    def batches_of_all(self, limit: int) -> Sequence[StoredBatch]:
        """Return the newest batches of all clients, the newest first."""
        rows = self._rows("SELECT value FROM batches ORDER BY seq DESC LIMIT ?", limit)
        return [_batch(value) for (value,) in rows]

    def unfinished(self) -> Sequence[StoredBatch]:
        """Return the unfinished batches of all clients, the oldest first."""
        rows = self._rows("SELECT value FROM batches WHERE is_over = 0 ORDER BY seq")
        return [_batch(value) for (value,) in rows]

    def count_unfinished(self, owner: str) -> int:
        rows = self._rows("SELECT count(*) FROM batches WHERE is_over = 0 AND owner = ?", owner)
        return int(rows[0][0])

    def run_folder(self, batch_id: str) -> Path:
        """Return the folder for the index and the output of a running batch."""
        return private_folder(self._runs / batch_id)

    def remove_run(self, batch_id: str) -> None:
        shutil.rmtree(self._runs / batch_id, ignore_errors=True)

    # --- removing

    def remove_expired(self, now_s: int, batches_before_s: int) -> int:
        """Remove expired files, unless a batch reads them, and batches that ended before
        ``batches_before_s``, and contents that belong to none. Returns the number of files that expired.
        """
        rows = self._rows(
            "SELECT id FROM files WHERE expires_at <= ? AND NOT EXISTS"
            " (SELECT 1 FROM batches WHERE is_over = 0 AND input = files.id)",
            now_s,
        )
        for (file_id,) in rows:
            self.remove_file(file_id)
        with self._transaction():
            self._db.execute("DELETE FROM batches WHERE is_over = 1 AND ended_at <= ?", (batches_before_s,))
        self._reconcile()
        return len(rows)

    # --- private

    @contextmanager
    def _adding(self, files: Sequence[StoredFile]) -> Iterator[None]:
        """Add files, contents and rows, together with the changes of the block: all of them, or nothing."""
        published: list[Path] = []
        try:
            with self._transaction():
                for file in files:
                    self._db.execute(
                        "INSERT INTO files (id, owner, purpose, bytes, expires_at, value)"
                        " VALUES (?, ?, ?, ?, ?, ?)",
                        (
                            *(file.id, file.owner, file.purpose, file.bytes, file.expires_at),
                            msgspec.json.encode(file),
                        ),
                    )
                yield
                for file in files:
                    native.replace(self.part_path_of(file.id), self.path_of(file.id))
                    published.append(self.path_of(file.id))
                native.sync_folder(self._contents)
        except BaseException:
            for path in published:
                path.unlink(missing_ok=True)
            raise

    def _reconcile(self) -> None:
        """Remove contents that have no row, and folders of finished batches.

        They are left behind by a kill, or by a disk that was full. Files of others stay.
        """
        known = {id_ for (id_,) in self._rows("SELECT id FROM files")}
        known |= {self.part_path_of(file_id).name for file_id in tuple(self._arriving)}
        unfinished = {id_ for (id_,) in self._rows("SELECT id FROM batches WHERE is_over = 0")}
        with self._mapped_errors():
            for path in self._contents.iterdir():
                if _IS_CONTENT(path.name) and path.name not in known:
                    with suppress(OSError):  # the next look removes it
                        native.remove(path, waits=False)
            for path in self._runs.iterdir():
                if _IS_RUN(path.name) and path.name not in unfinished:
                    self.remove_run(path.name)

    def _failed(self, error: sqlite3.Error | OSError) -> LlamasupError:
        if is_full(error):
            text = f"No space is left in {str(self.folder)!r}."
            return DiskFull(text, remedy="Free some space, and try again.")
        return self._unusable(getattr(error, "strerror", None) or str(error))

    def _unusable(self, reason: str) -> FolderUnusable:
        return FolderUnusable(
            f"The folder of the batches {str(self.folder)!r} cannot be used: {reason}.",
            remedy="Make it writable, or set another batches.folder.",
        )


async def receive_file(
    store: Store,
    store_thread: Executor,
    settings: Batches,
    owner: str,
    content_type: str,
    body: AsyncIterator[bytes],
    now_s: int,
) -> StoredFile:
    """Store the file of the form. Raises UsageInvalid, FileLimit and StorageLimit."""
    form = UploadForm(content_type)
    id_ = new_file_id()
    part = store.part_path_of(id_)
    size, fd = 0, -1

    async def take(block: bytes) -> None:
        nonlocal size
        content = await in_thread(partial(form.feed, block))
        size += len(content)
        await in_thread(partial(store.reserve, id_, owner, size, settings), store_thread)
        await in_thread(partial(_write_all, fd, content))

    try:
        await in_thread(partial(store.reserve, id_, owner, 0, settings), store_thread)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        waiting = bytearray()
        async for piece in body:
            waiting += piece
            if len(waiting) >= _BLOCK_BYTES:
                await take(bytes(waiting))
                waiting.clear()
        await take(bytes(waiting))
        file = uploaded_file(form, id_, owner, size, now_s, settings.keep_days)
        await in_thread(partial(os.fsync, fd))
        complete, fd = fd, -1
        os.close(complete)  # Windows renames no file that is open
        await in_thread(partial(store.add_file, file), store_thread)
    except OSError as error:
        raise StorageLimit(
            f"The file cannot be written: {error.strerror}.", remedy="Free some space on the server."
        ) from None
    finally:
        if fd >= 0:
            os.close(fd)
        part.unlink(missing_ok=True)
        store.release(id_)
    return file


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
