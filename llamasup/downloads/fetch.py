"""Downloads one file: in parallel parts where the server can, its checksum following the bytes as they come.

What is returned is complete and checked, and not yet under its name: a model of several files appears whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from llamasup.downloads.client import Answer, DownloadClient, TransientError
from llamasup.downloads.part_file import Busy, PartFile, disk_errors, origin_of_file
from llamasup.downloads.reference import shown_url
from llamasup.downloads.remote_file import (
    RemoteFile,
    content_range,
    linked_sha256,
    missing,
    piece_bytes,
    pieces,
    strong_etag,
    why_not_resumed,
)
from llamasup.errors import DiskFull, DownloadFailed, LlamasupError, ModelInvalid
from llamasup.system.text import memory_text

__all__ = [
    "DownloadTarget",
    "FileDownload",
    "ListingChanged",
    "ProgressListener",
    "check_space",
    "is_in_place",
    "look",
]

# One write of this size takes the disk cache about 0.2 ms: less of them would be all calls, more would wait.
_WRITE_BYTES = 1 << 20
_HASH_STEP = 64 << 20  # hashed in one go, in a thread: some 0.1 s
_SAVE_EVERY_S = 2.0
_LOOK_AGAIN_S = 0.25  # whether another process has finished


class ProgressListener(Protocol):
    """Whoever follows a download."""

    def moved(self, done_bytes: int) -> None:
        """How much of this file is here."""
        ...

    def say(self, text: str) -> None:
        """Something a person would want to know."""
        ...


@dataclass(frozen=True, slots=True)
class DownloadTarget:
    """A file to be had: from ``url`` to ``target``. What is known of it beforehand is in ``remote``."""

    url: str
    target: Path
    remote: RemoteFile = field(default_factory=RemoteFile)


class ListingChanged(Exception):
    """The file is no longer the one that was announced: what was announced has to be read again."""


class _Changed(Exception):
    """What comes is not what came before."""


class FileDownload:
    """Of one file; ``parallel`` requests at a time. ``fetch`` is called once."""

    def __init__(
        self, client: DownloadClient, target: DownloadTarget, listener: ProgressListener, *, parallel: int
    ) -> None:
        self._client = client
        self._target = target
        self._listener = listener
        self._parallel = parallel
        self._grown = asyncio.Event()

    async def fetch(self) -> PartFile | None:
        """The whole file, locked and checked; None where another process has put it in its place meanwhile.

        Raises what ``DownloadClient.ask`` raises, ModelInvalid for a wrong checksum, DiskFull and
        FolderUnusable. What has come is kept for the next time, unless it is wrong.
        """
        part = await self._opened()
        if part is None:
            return None
        try:
            await self._whole(part)
        except BaseException:
            part.keep()
            raise
        return part

    async def _whole(self, part: PartFile) -> None:
        try:
            await self._once(part)
        except _Changed as why:
            part.start_over()
            self._listener.say(f"{self._target.target.name}: {why}, so the download starts over")
        else:
            return
        try:
            await self._once(part)
        except _Changed as why:
            part.start_over()
            raise DownloadFailed(
                f"{shown_url(self._target.url)}: {why}, and again while it was downloaded anew.",
                remedy="Try again later: the file is being changed on the server.",
            ) from None

    async def _opened(self) -> PartFile | None:
        """The part file once nobody else has it."""
        told = False
        while True:
            try:
                part = PartFile(self._target.target)
            except Busy as busy:
                if not told:
                    who = f"process {busy.pid}" if busy.pid else "another process"
                    self._listener.say(f"{who} downloads {self._target.target.name} already: waiting for it")
                told = True
                await asyncio.sleep(_LOOK_AGAIN_S)
                continue
            # Of a model of several files whoever was first has published all when the first is let go of.
            if is_in_place(self._target):
                part.discard()
                return None
            return part

    # --- one try -----------------------------------------------------------------------------------

    async def _once(self, part: PartFile) -> None:
        remote, has_ranges = await self._client.retry(
            partial(look, self._client, self._target), lambda: 0, self._listener.say
        )
        why = part.become(remote)
        if why:
            self._listener.say(f"{self._target.target.name}: {why}, so the download starts over")
        check_space(part.target.parent, (remote.size or 0) - part.done_bytes, part.target.name)
        self._listener.moved(part.done_bytes)
        try:
            async with asyncio.TaskGroup() as tasks:
                hashing = tasks.create_task(self._hash(part))
                saving = tasks.create_task(self._save(part))
                # Of a server that says neither, parts of two versions could be put together.
                is_known = remote.sha256 is not None or remote.etag is not None
                if has_ranges and is_known and remote.size is not None:
                    await self._in_parts(part, remote.size)
                else:
                    await self._client.retry(partial(self._stream, part), lambda: 0, self._listener.say)
                self._grown.set()
                digest = await hashing
                saving.cancel()
        except BaseExceptionGroup as errors:
            raise _telling(errors) from None
        self._check_digest(part, digest)
        await asyncio.to_thread(part.save)

    async def _in_parts(self, part: PartFile, size: int) -> None:
        most = piece_bytes(size, self._parallel)
        todo = deque(pieces(missing(part.done, size), most))
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(self._parallel, len(todo))):
                workers.create_task(self._work(part, todo, size))

    async def _work(self, part: PartFile, todo: deque[tuple[int, int]], size: int) -> None:
        while todo:
            start, end = todo.popleft()
            piece = _Piece(start, end)
            await self._client.retry(
                partial(self._piece, part, piece, end, size),
                lambda piece=piece: piece.at,  # type: ignore[misc]
                self._listener.say,
            )

    async def _piece(self, part: PartFile, piece: _Piece, end: int, size: int) -> None:
        async with self._client.ask(self._target.url, bytes_from=(piece.at, end)) as answer:
            self._check_piece(answer, part, piece, size)
            await self._read(answer, part, piece)
        if piece.at < end:
            raise TransientError(f"{shown_url(self._target.url)} was cut off at {piece.at} bytes")

    def _check_piece(self, answer: Answer, part: PartFile, piece: _Piece, size: int) -> None:
        found = content_range(answer.headers.get("content-range"))
        if answer.response.status_code != 206 or found is None:
            raise TransientError(f"{shown_url(answer.url)} sends no part of the file any more")
        if found.size not in (None, size):
            raise _Changed(f"the file has {found.size} bytes now, and had {size}")
        if found.start != piece.at:
            raise TransientError(f"{shown_url(answer.url)} sends other bytes than those asked for")
        # With a checksum it is that which decides: the hosts of a CDN need not agree on their tags.
        etag = strong_etag(answer.headers.get("etag"))
        if part.remote.sha256 is None and etag != part.remote.etag:
            raise _Changed("the file has changed on the server")

    async def _stream(self, part: PartFile) -> None:
        """The whole file in one go: nothing of it can be had a second time."""
        if part.done:
            part.start_over()
        size = part.remote.size
        async with self._client.ask(self._target.url) as answer:
            expected = _length(answer)
            if size is not None and expected is not None and expected != size:
                raise _Changed(f"the file has {expected} bytes now, and had {size}")
            piece = _Piece(0, size)
            await self._read(answer, part, piece)
        if size is None:
            part.remote = replace(part.remote, size=piece.at)
        elif piece.at < size:
            raise TransientError(f"{shown_url(self._target.url)} was cut off at {piece.at} of {size} bytes")

    async def _read(self, answer: Answer, part: PartFile, piece: _Piece) -> None:
        """Write what comes, up to the piece's end."""
        buffer = bytearray()
        try:
            async for chunk in self._client.chunks(answer):
                buffer += chunk
                if piece.end is not None and piece.at + len(buffer) > piece.end:
                    raise DownloadFailed(f"{shown_url(answer.url)} sends more than was asked for.")
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
            self._grown.set()
            self._listener.moved(part.done_bytes)

    # --- beside it ---------------------------------------------------------------------------------

    async def _hash(self, part: PartFile) -> str | None:
        """The checksum of the whole file, if there is one to compare it with."""
        if part.remote.sha256 is None:
            return None
        digest, at, epoch = hashlib.sha256(), 0, part.epoch
        while part.remote.size is None or at < part.remote.size or epoch != part.epoch:
            here = part.from_start
            if epoch != part.epoch:
                digest, at, epoch = hashlib.sha256(), 0, part.epoch
            elif here == at:
                self._grown.clear()
                await self._grown.wait()
            else:
                upto = min(here, at + _HASH_STEP)
                await asyncio.to_thread(part.hash_into, digest, at, upto)
                at = upto
        return digest.hexdigest()

    async def _save(self, part: PartFile) -> None:
        saved = part.done_bytes
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            if part.done_bytes != saved:
                saved = part.done_bytes
                await asyncio.to_thread(part.save)

    def _check_digest(self, part: PartFile, digest: str | None) -> None:
        if digest == part.remote.sha256:
            return
        if part.resumed:
            raise _Changed("what was kept of an earlier download is damaged")
        part.start_over()
        raise ModelInvalid(
            f"{part.target.name}: what was sent has the checksum {digest}, and {part.remote.sha256} was "
            "announced; nothing of it is kept.",
            remedy="Try again; if it stays so, something on the way changes the file: try another network.",
        )


@dataclass(slots=True)
class _Piece:
    """Bytes from ``at``, which moves, to before ``end``; None: to wherever the file ends."""

    at: int
    end: int | None


def _length(answer: Answer) -> int | None:
    text = answer.headers.get("content-length", "")
    return int(text) if text.isdecimal() and len(text) < 19 else None


async def look(client: DownloadClient, target: DownloadTarget) -> tuple[RemoteFile, bool]:
    """What the server says of a file, and whether it can send a part of it.

    Raises what ``DownloadClient.ask`` raises, and ListingChanged.
    """
    async with client.ask(target.url, bytes_from=(0, 1)) as answer:
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
        raise ListingChanged(f"has {remote.size} bytes, and {known.size} were announced")
    if linked is not None and known.sha256 is not None and linked != known.sha256:
        raise ListingChanged("has another checksum than was announced")
    return remote, found is not None


def is_in_place(target: DownloadTarget) -> bool:
    """Whether the file is there, and was downloaded as the very one that is wanted."""
    origin = origin_of_file(target.target)
    if origin is None or (target.remote.sha256 is not None and origin.sha256 is None):
        return False  # the second: never compared with it, whatever a tag says
    # A tag is one of its URL alone (RFC 9110, 8.8.3).
    etag = origin.etag if origin.url == shown_url(target.url) else None
    return not why_not_resumed(RemoteFile(origin.size, origin.sha256, etag), target.remote)


def check_space(folder: Path, needed_bytes: int, name: str) -> None:
    """Raises DiskFull where ``folder`` has no room for as much."""
    with disk_errors(folder):
        free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise DiskFull(
            f"{name} needs {memory_text(needed_bytes)} more, and {folder} has {memory_text(free)} free.",
            remedy="Make room there, or choose another folder with --folder.",
        )


def _telling(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of several tasks that failed together, the error that says most: a change explains what others see."""
    leaves = list(_leaves(group))
    for kind in (_Changed, LlamasupError):
        for error in leaves:
            if isinstance(error, kind):
                return error
    return leaves[0]


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
