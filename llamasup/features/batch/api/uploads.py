"""Takes an uploaded file: reads its form, and writes the content to the disk while it arrives.

Threads read and write, so no form holds the event loop. The store counts the file from its first byte on.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from functools import partial
from typing import Final

from llamasup.core.settings.sections import Batches
from llamasup.features.batch.api.form import UploadForm
from llamasup.features.batch.api.objects import StorageLimit, StoredFile, uploaded_file
from llamasup.features.batch.api.store import Store, new_file_id
from llamasup.features.batch.threads import in_thread

_BLOCK_BYTES: Final = 1 << 20  # read and written together: four of OpenAI's client's pieces


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
