"""Downloads one file, in parallel pieces if the server supports ranges, with a checksum while bytes arrive.

The result is complete and checked, but still a part file: all files of a model get their names together.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections import deque
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from llamasup.core.hub.part_file import Busy, PartFile, disk_errors, origin_of_file
from llamasup.core.hub.reference import shown_url
from llamasup.core.hub.remote_file import (
    RemoteFile,
    content_range,
    linked_sha256,
    missing,
    piece_bytes,
    pieces,
    strong_etag,
    why_not_resumed,
)
from llamasup.core.system.text import memory_text
from llamasup.errors import DiskFull, DownloadFailed, LlamasupError, ModelInvalid
from llamasup.features.downloads.client import Answer, DownloadClient
from llamasup.features.downloads.retries import TransientError

# One write of this size to the disk cache takes about 0.2 ms.
_WRITE_BYTES = 1 << 20
_HASH_STEP = 64 << 20  # hashed in one call in a thread, about 0.1 s
_SAVE_INTERVAL_S = 2.0
_LOCK_POLL_INTERVAL_S = 0.25  # polls the lock of another process


class ProgressListener(Protocol):
    def moved(self, done_bytes: int) -> None:
        """Note progress: the bytes of this file on the disk."""
        ...

    def say(self, text: str) -> None:
        """Show a message to the user."""
        ...


class DownloadTarget(Struct, frozen=True):
    """A file to download from ``url`` to ``target``. ``remote`` is what the file list announced."""

    url: str
    target: Path
    remote: RemoteFile = field(default_factory=RemoteFile)


class ListingChanged(Exception):
    """The file differs from the file list, so the list must be read again."""


class _FileChanged(Exception):
    """The file changed during its download."""


class FileDownload:
    """The download of one file, with ``parallel`` requests at a time. Call ``fetch`` once."""

    def __init__(
        self, client: DownloadClient, target: DownloadTarget, listener: ProgressListener, *, parallel: int
    ) -> None:
        self._client = client
        self._target = target
        self._listener = listener
        self._parallel = parallel
        self._bytes_added = asyncio.Event()

    async def fetch(self) -> PartFile | None:
        """Return the whole file, locked and checked; None if another process downloaded it meanwhile.

        Raises the errors of ``DownloadClient.get``, ModelInvalid for a wrong checksum, DiskFull and
        FolderUnusable. Valid bytes are kept for the next run.
        """
        part = await self._open_part()
        if part is None:
            return None
        try:
            await self._download(part)
        except BaseException:
            part.keep()
            raise
        return part

    async def _download(self, part: PartFile) -> None:
        for is_second in (False, True):
            try:
                await self._attempt(part)
            except _FileChanged as why:
                part.start_over()
                if is_second:
                    raise DownloadFailed(
                        f"{shown_url(self._target.url)} changed during two downloads in a row: {why}.",
                        remedy="Try again later.",
                    ) from None
                self._listener.say(f"{self._target.target.name}: {why}; the download starts over")
            else:
                return

    async def _open_part(self) -> PartFile | None:
        """The part file, once no other process has it."""
        waits = False
        while True:
            try:
                part = PartFile(self._target.target)
            except Busy as busy:
                if not waits:
                    owner = f"process {busy.pid}" if busy.pid else "another process"
                    self._listener.say(
                        f"{owner} already downloads {self._target.target.name}; waiting for it"
                    )
                waits = True
                await asyncio.sleep(_LOCK_POLL_INTERVAL_S)
                continue
            # The other process publishes all files of a model before it releases the first lock.
            if is_in_place(self._target):
                part.discard()
                return None
            return part

    # --- one attempt -----------------------------------------------------------------------------------

    async def _attempt(self, part: PartFile) -> None:
        remote, has_ranges = await self._client.retry(
            partial(inspect_remote, self._client, self._target), lambda: 0, self._listener.say
        )
        why = part.resume_as(remote)
        if why:
            self._listener.say(f"{self._target.target.name}: {why}; the download starts over")
        check_space(part.target.parent, (remote.size or 0) - part.done_bytes, part.target.name)
        self._listener.moved(part.done_bytes)
        try:
            async with asyncio.TaskGroup() as tasks:
                hashing = tasks.create_task(self._hash(part))
                saving = tasks.create_task(self._save(part))
                # Without a checksum or ETag, pieces of two versions could be mixed.
                is_known = remote.sha256 is not None or remote.etag is not None
                if has_ranges and is_known and remote.size is not None:
                    await self._download_in_pieces(part, remote.size)
                else:
                    await self._client.retry(partial(self._fetch_stream, part), lambda: 0, self._listener.say)
                self._bytes_added.set()
                digest = await hashing
                saving.cancel()
        except BaseExceptionGroup as errors:
            raise _most_telling(errors) from None
        self._check_digest(part, digest)
        await asyncio.to_thread(part.save)

    async def _download_in_pieces(self, part: PartFile, size: int) -> None:
        most = piece_bytes(size, self._parallel)
        todo = deque(pieces(missing(part.done, size), most))
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(self._parallel, len(todo))):
                workers.create_task(self._fetch_pieces(part, todo, size))

    async def _fetch_pieces(self, part: PartFile, todo: deque[tuple[int, int]], size: int) -> None:
        while todo:
            start, end = todo.popleft()
            piece = _Piece(start, end)
            await self._client.retry(
                partial(self._fetch_piece, part, piece, end, size),
                lambda piece=piece: piece.at,  # type: ignore[misc]
                self._listener.say,
            )

    async def _fetch_piece(self, part: PartFile, piece: _Piece, end: int, size: int) -> None:
        async with self._client.get(self._target.url, byte_range=(piece.at, end)) as answer:
            self._check_piece(answer, part, piece, size)
            await self._read(answer, part, piece)
        if piece.at < end:
            raise TransientError(f"{shown_url(self._target.url)} was cut off at {piece.at} bytes")

    def _check_piece(self, answer: Answer, part: PartFile, piece: _Piece, size: int) -> None:
        found = content_range(answer.headers.get("content-range"))
        if answer.response.status_code != 206 or found is None:
            raise TransientError(f"{shown_url(answer.url)} no longer supports ranges")
        if found.size not in (None, size):
            raise _FileChanged(f"the size changed from {size} to {found.size} bytes")
        if found.start != piece.at:
            raise TransientError(f"{shown_url(answer.url)} sent another range than requested")
        # With a checksum the ETag is ignored: the hosts of a CDN may have different ones.
        etag = strong_etag(answer.headers.get("etag"))
        if part.remote.sha256 is None and etag != part.remote.etag:
            raise _FileChanged("the file has changed on the server")

    async def _fetch_stream(self, part: PartFile) -> None:
        """Download the whole file in one request; the server supports no ranges."""
        if part.done:
            part.start_over()
        size = part.remote.size
        async with self._client.get(self._target.url) as answer:
            expected = _length(answer)
            if size is not None and expected is not None and expected != size:
                raise _FileChanged(f"the size changed from {size} to {expected} bytes")
            piece = _Piece(0, size)
            await self._read(answer, part, piece)
        if size is None:
            part.remote = replace(part.remote, size=piece.at)
        elif piece.at < size:
            raise TransientError(f"{shown_url(self._target.url)} was cut off at {piece.at} of {size} bytes")

    async def _read(self, answer: Answer, part: PartFile, piece: _Piece) -> None:
        """Write the body, up to the end of the piece."""
        buffer = bytearray()
        try:
            async for chunk in self._client.chunks(answer):
                buffer += chunk
                if piece.end is not None and piece.at + len(buffer) > piece.end:
                    raise DownloadFailed(f"{shown_url(answer.url)} sent more bytes than requested.")
                if len(buffer) >= _WRITE_BYTES:
                    self._flush(part, piece, buffer)
        finally:
            if piece.end is None or piece.at + len(buffer) <= piece.end:
                self._flush(part, piece, buffer)

    def _flush(self, part: PartFile, piece: _Piece, buffer: bytearray) -> None:
        if buffer:
            part.write(piece.at, buffer)
            piece.at += len(buffer)
            buffer.clear()
            self._bytes_added.set()
            self._listener.moved(part.done_bytes)

    # --- checksum, and the record of progress ------------------------------------------------------

    async def _hash(self, part: PartFile) -> str | None:
        """The checksum of the whole file, if the expected one is known."""
        if part.remote.sha256 is None:
            return None
        digest, at, epoch = hashlib.sha256(), 0, part.epoch
        while part.remote.size is None or at < part.remote.size or epoch != part.epoch:
            here = part.prefix_bytes
            if epoch != part.epoch:
                digest, at, epoch = hashlib.sha256(), 0, part.epoch
            elif here == at:
                self._bytes_added.clear()
                await self._bytes_added.wait()
            else:
                upto = min(here, at + _HASH_STEP)
                await asyncio.to_thread(part.hash_into, digest, at, upto)
                at = upto
        return digest.hexdigest()

    async def _save(self, part: PartFile) -> None:
        saved = part.done_bytes
        while True:
            await asyncio.sleep(_SAVE_INTERVAL_S)
            if part.done_bytes != saved:
                saved = part.done_bytes
                await asyncio.to_thread(part.save)

    def _check_digest(self, part: PartFile, digest: str | None) -> None:
        if digest == part.remote.sha256:
            return
        if part.resumed:
            raise _FileChanged("the bytes of an earlier download are damaged")
        part.start_over()
        raise ModelInvalid(
            f"{part.target.name} has the checksum {digest}, but {part.remote.sha256} was expected; it "
            "was deleted.",
            remedy="Try again; if the error remains, a proxy may change the file: try another network.",
        )


class _Piece(Struct):
    """The bytes from ``at``, which increases, to before ``end``; None: to the end of the file."""

    at: int
    end: int | None


def _length(answer: Answer) -> int | None:
    text = answer.headers.get("content-length", "")
    return int(text) if text.isdecimal() and len(text) < 19 else None


async def inspect_remote(client: DownloadClient, target: DownloadTarget) -> tuple[RemoteFile, bool]:
    """Return the size, checksum and ETag from the server, and whether it supports ranges.

    Raises the errors of ``DownloadClient.get``, and ListingChanged.
    """
    async with client.get(target.url, byte_range=(0, 1)) as answer:
        found = content_range(answer.headers.get("content-range"))
        size = found.size if found is not None else _length(answer)
        known = target.remote
        linked = linked_sha256(answer.hub)
        remote = RemoteFile(
            size=known.size if size is None else size,
            sha256=known.sha256 or linked,
            etag=strong_etag(answer.headers.get("etag")),
        )
    if known.size is not None and remote.size != known.size:
        raise ListingChanged(f"the file has {remote.size} bytes, but {known.size} were announced")
    if linked is not None and known.sha256 is not None and linked != known.sha256:
        raise ListingChanged("the file has another checksum than announced")
    return remote, found is not None


def is_in_place(target: DownloadTarget) -> bool:
    """Whether the file exists and was downloaded as exactly this one."""
    origin = origin_of_file(target.target)
    if origin is None or (target.remote.sha256 is not None and origin.sha256 is None):
        return False  # never compared with this checksum, whatever its ETag
    # An ETag is valid for its own URL only (RFC 9110, 8.8.3).
    etag = origin.etag if origin.url == shown_url(target.url) else None
    return not why_not_resumed(RemoteFile(origin.size, origin.sha256, etag), target.remote)


def check_space(folder: Path, needed_bytes: int, name: str) -> None:
    """Raises DiskFull if ``folder`` has less free space."""
    with disk_errors(folder):
        free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise DiskFull(
            f"{name} needs {memory_text(needed_bytes)} more, but {folder} has {memory_text(free)} free.",
            remedy="Free disk space, or choose another folder with --folder.",
        )


def _most_telling(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The most useful error of several tasks: a changed file explains the errors of the others."""
    error: BaseException = group.subgroup(_FileChanged) or group.subgroup(LlamasupError) or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
