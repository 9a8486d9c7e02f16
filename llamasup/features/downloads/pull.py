"""Downloads a model: lists the files on the hub, downloads the missing ones and publishes them.

All files of a model are checked and appear together. The first part comes last, since a model is found by it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import unquote, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.gguf.files import read_parts
from llamasup.core.hub.choose import Choice, RepoFile, choose
from llamasup.core.hub.part_file import Origin, PartFile, disk_errors, origin_of_file, write_origin
from llamasup.core.hub.reference import (
    HUB,
    Ref,
    RepoRef,
    UrlRef,
    local_path,
    resolve_url,
    shown_url,
    split_urls,
    tree_url,
)
from llamasup.core.hub.remote_file import RemoteFile, why_not_resumed
from llamasup.core.hub.store import FetchedModel, record_names
from llamasup.core.system.text import printable
from llamasup.errors import DownloadFailed, FolderUnusable, ModelInvalid, UsageInvalid
from llamasup.features.downloads.client import DownloadClient
from llamasup.features.downloads.fetch import (
    DownloadTarget,
    FileDownload,
    ListingChanged,
    ProgressListener,
    check_space,
    inspect_remote,
    is_in_place,
)
from llamasup.features.downloads.hub_responses import next_page, read_page
from llamasup.features.downloads.retries import RetryPolicy
from llamasup.features.downloads.url_policy import UrlPolicy

# A page of 1,000 files has about 300 KB. No repository of a model has a million files.
_MAX_PAGE_BYTES = 8 << 20
_MAX_PAGES = 50


class DownloadOptions(Struct, frozen=True, kw_only=True):
    """The options of a download. ``folder`` is that of all models. ``parallel``: requests at a time. Only the
    endpoint gets the token.
    """

    folder: Path
    endpoint: str = HUB
    token: str | None = None
    private_addresses: bool = False
    allow_http: bool = False
    parallel: int = 4
    retry_policy: RetryPolicy = RetryPolicy()

    def __repr__(self) -> str:
        return f"DownloadOptions({str(self.folder)!r}, {self.endpoint!r})"  # without the token

    @property
    def policy(self) -> UrlPolicy:
        return UrlPolicy(self.endpoint, private=self.private_addresses, http=self.allow_http)


class Choosing(Struct, frozen=True):
    """The files to download. ``name`` is a reference to exactly this choice."""

    name: str
    files: tuple[str, ...]
    size_bytes: int | None
    missing: int
    reason: str
    notes: tuple[str, ...] = ()


class PullListener(ProgressListener, Protocol):
    """``moved`` gets the bytes of all files together."""

    def chosen(self, choosing: Choosing) -> None: ...


async def pull(ref: Ref, options: DownloadOptions, listener: PullListener) -> FetchedModel:
    """Download the model of ``ref`` into the models folder; files that are there are not downloaded again.

    Raises the errors of ``DownloadClient.get`` and ``FileDownload.fetch``, ModelMissing, UsageInvalid if
    several models match, and ModelInvalid for files that no server could load.
    """
    client = DownloadClient(
        ref, options.policy, options.token, parallel=options.parallel, retry_policy=options.retry_policy
    )
    async with client:
        for last in (False, True):
            try:
                return await _Pull(ref, options, listener, client).run()
            except ListingChanged as outdated:
                if last:
                    raise DownloadFailed(
                        f"{ref}: {outdated}.", remedy="Try again later: the repository is being changed."
                    ) from None
                listener.say(f"{ref}: {outdated}; reading the list of files again")
    raise AssertionError


class _Pull:
    """One attempt. Owns the part files until they are published."""

    def __init__(
        self, ref: Ref, options: DownloadOptions, listener: PullListener, client: DownloadClient
    ) -> None:
        self._ref = ref
        self._options = options
        self._listener = listener
        self._client = client
        self._done_before = 0

    async def run(self) -> FetchedModel:
        wanted, projector, choosing = await (
            self._repo_targets(self._ref) if isinstance(self._ref, RepoRef) else self._url_targets(self._ref)
        )
        needed = [target for target in wanted if not await self._is_present(target)]
        self._listener.chosen(replace(choosing, missing=len(needed)))
        here = sum(target.remote.size or 0 for target in wanted if target not in needed)
        self._done_before = here
        self._listener.moved(here)
        if needed:
            missing_bytes = sum(
                (target.remote.size or 0) - _bytes_on_disk(target.target) for target in needed
            )
            folder = self._options.folder
            with disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
            check_space(folder, missing_bytes, choosing.name)
            await self._fetch(needed, wanted, projector)
        parts = tuple(target.target for target in wanted if target is not projector)
        model = FetchedModel(parts[0], parts, projector.target if projector else None)
        await asyncio.to_thread(record_names, self._ref, model, self._options.folder)
        return model

    # --- the targets -------------------------------------------------------------------------------

    async def _repo_targets(
        self, ref: RepoRef
    ) -> tuple[list[DownloadTarget], DownloadTarget | None, Choosing]:
        choice = _pinned(ref, choose(ref, await self._list_files(ref)))
        model_folder = PurePosixPath(choice.parts[0].path).parent
        wanted = [await self._inspected(self._target(ref, file, model_folder)) for file in choice.files]
        choosing = Choosing(
            f"{ref.repo}:{choice.name}",
            tuple(file.path for file in choice.files),
            choice.size_bytes,
            0,
            choice.reason,
            (*choice.notes, *_unchecked(choice)),
        )
        return wanted, wanted[0] if choice.projector else None, choosing

    def _target(self, ref: RepoRef, file: RepoFile, model_folder: PurePosixPath) -> DownloadTarget:
        # The planner finds a projector only in the model's folder.
        path = local_path(ref, str(model_folder / PurePosixPath(file.path).name))
        return DownloadTarget(
            resolve_url(self._options.endpoint, ref, file.path, ref.revision),
            self._options.folder / path,
            RemoteFile(file.size, file.sha256),
        )

    async def _list_files(self, ref: RepoRef) -> list[RepoFile]:
        files: list[RepoFile] = []
        url: str | None = tree_url(self._options.endpoint, ref)
        for _ in range(_MAX_PAGES):
            if url is None:
                break
            page = url
            body, link = await self._client.retry(
                partial(self._client.text, page, max_bytes=_MAX_PAGE_BYTES),
                lambda: 0,
                self._listener.say,
            )
            files += read_page(body)
            url = next_page(link, page)
        return files

    async def _url_targets(self, ref: UrlRef) -> tuple[list[DownloadTarget], DownloadTarget | None, Choosing]:
        urls = split_urls(ref.url)
        if len(urls) > 1 and ref.sha256 is not None:
            raise UsageInvalid(
                f"{ref} is one of {len(urls)} files, so one checksum is not enough.",
                remedy="Remove the checksum from the URL.",
            )
        paths = [unquote(urlsplit(url).path) for url in urls]
        wanted = [
            await self._inspected(
                DownloadTarget(
                    url, self._options.folder / local_path(ref, path), RemoteFile(sha256=ref.sha256)
                )
            )
            for url, path in zip(urls, paths, strict=True)
        ]
        sizes = [target.remote.size for target in wanted]
        size = None if None in sizes else sum(size or 0 for size in sizes)
        notes = () if ref.sha256 else ("without a checksum (add #sha256=… to the URL to check it)",)
        names = tuple(target.target.name for target in wanted)
        return wanted, None, Choosing(str(ref), names, size, 0, "the file asked for", notes)

    async def _inspected(self, wanted: DownloadTarget) -> DownloadTarget:
        """Return ``wanted`` with the size and checksum from the server, if the list has none."""
        if wanted.remote.size is not None and wanted.remote.sha256 is not None:
            return wanted
        remote, _ = await self._client.retry(
            partial(inspect_remote, self._client, wanted), lambda: 0, self._listener.say
        )
        return replace(wanted, remote=remote)

    # --- existing files ----------------------------------------------------------------------------

    async def _is_present(self, wanted: DownloadTarget) -> bool:
        """Whether the file exists with the expected content. An unknown file is hashed once."""
        try:
            size = wanted.target.stat().st_size
        except OSError:
            return False
        if is_in_place(wanted):
            return True
        remote = wanted.remote
        if remote.sha256 is None or remote.size not in (None, size):
            # Without a checksum to compare, download it again.
            origin = origin_of_file(wanted.target)
            is_of_url = origin is not None and origin.url == shown_url(wanted.url)
            etag = origin.etag if origin is not None and is_of_url else None
            here = RemoteFile(None if remote.size is None else size, etag=etag)
            return self._will_replace(wanted, why_not_resumed(here, remote))
        self._listener.say(f"{wanted.target.name} exists; checking it")
        if await asyncio.to_thread(_sha256, wanted.target) != remote.sha256:
            return self._will_replace(wanted, "its checksum differs")
        with disk_errors(wanted.target):
            mtime_ns = wanted.target.stat().st_mtime_ns
            origin = Origin(shown_url(wanted.url), size, mtime_ns, remote.sha256, remote.etag)
            write_origin(wanted.target, origin)
        return True

    def _will_replace(self, wanted: DownloadTarget, why: str) -> bool:
        self._listener.say(f"{wanted.target.name}: {why}; the file will be replaced")
        return False

    def _make_folder(self, target: Path) -> None:
        """Create the folder of ``target``. Raises FolderUnusable if it is outside the models folder (X10)."""
        with disk_errors(target.parent):
            if not target.parent.resolve().is_relative_to(self._options.folder.resolve()):
                raise FolderUnusable(
                    f"{printable(str(target.parent))} is a symbolic link out of the models folder.",
                    remedy="Remove the link.",
                )
            target.parent.mkdir(parents=True, exist_ok=True)

    # --- download ----------------------------------------------------------------------------------

    async def _fetch(
        self,
        needed: Sequence[DownloadTarget],
        wanted: Sequence[DownloadTarget],
        projector: DownloadTarget | None,
    ) -> None:
        fetched: dict[Path, PartFile] = {}
        first = next(target for target in wanted if target is not projector)
        with ExitStack() as held:
            for target in needed:
                self._make_folder(target.target)
                part = await FileDownload(
                    self._client,
                    target,
                    _TotalProgress(self._listener, self._done_before),
                    parallel=self._options.parallel,
                ).fetch()
                self._done_before += target.target.stat().st_size if part is None else part.done_bytes
                if part is not None:
                    held.callback(
                        part.close
                    )  # complete; if not published below, the next run finds it complete
                    if target is projector or target is first:
                        # Check before hours are spent on the other files.
                        await asyncio.to_thread(_check, [part.path], [part])
                    fetched[target.target] = part
            parts = [target.target for target in wanted if target is not projector]
            if len(parts) > 1:
                paths = [fetched[path].path if path in fetched else path for path in parts]
                # An error does not show which part is wrong, so all new ones are deleted.
                await asyncio.to_thread(_check, paths, [fetched[path] for path in parts if path in fetched])
            order = [projector] if projector else []
            order += [target for target in reversed(wanted) if target is not projector]
            for target in order:
                if (ready := fetched.get(target.target)) is not None:
                    ready.publish(shown_url(target.url))


class _TotalProgress:
    """Adds the progress of one file to that of the earlier files."""

    def __init__(self, listener: PullListener, before: int) -> None:
        self._listener = listener
        self._before = before
        self.say: Callable[[str], None] = listener.say

    def moved(self, done_bytes: int) -> None:
        self._listener.moved(self._before + done_bytes)


def _check(paths: Sequence[Path], new: Sequence[PartFile]) -> None:
    """Raises ModelInvalid if no server could load ``paths``, after deleting the ``new`` files."""
    try:
        read_parts(paths)
    except ModelInvalid:
        for part in new:
            part.discard()
        raise


def _bytes_on_disk(target: Path) -> int:
    """The bytes of an earlier run, from the blocks in use, since the file may have holes."""
    try:
        status = target.with_name(f"{target.name}.part").stat()
    except OSError:
        return 0
    return min(getattr(status, "st_blocks", 0) * 512, status.st_size)


def _pinned(ref: RepoRef, choice: Choice) -> Choice:
    """Return ``choice`` with the checksum of ``ref``. Raises ModelInvalid if the hub has another one."""
    if ref.sha256 is None:
        return choice
    if len(choice.parts) > 1:
        raise UsageInvalid(
            f"{ref} is one of {len(choice.parts)} files, so one checksum is not enough.",
            remedy="Remove the checksum from the URL.",
        )
    (part,) = choice.parts
    if part.sha256 not in (None, ref.sha256):
        raise ModelInvalid(
            f"{ref} has the checksum {part.sha256} on the hub, but {ref.sha256} was requested.",
            remedy="Give the URL of the revision with it (…/resolve/COMMIT/…), or correct the checksum.",
        )
    return replace(choice, parts=(replace(part, sha256=ref.sha256),))


def _unchecked(choice: Choice) -> tuple[str, ...]:
    return tuple(
        f"the hub has no checksum for {PurePosixPath(file.path).name}; only its size is checked"
        for file in choice.files
        if file.sha256 is None
    )


def _sha256(path: Path) -> str:
    with disk_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
