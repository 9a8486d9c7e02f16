"""Downloads a model: asks the hub what there is, fetches the files that are missing, and puts them in place.

All of a model's files appear together, checked: the projector first, and last the first part, by which a
model is known.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import unquote, urlsplit

from llamasup.downloads.choose import Choice, RepoFile, choose
from llamasup.downloads.client import DownloadClient, RetryPolicy
from llamasup.downloads.fetch import (
    DownloadTarget,
    FileDownload,
    ListingChanged,
    check_space,
    is_in_place,
    look,
)
from llamasup.downloads.hub_api import next_page, read_page
from llamasup.downloads.part_file import Origin, PartFile, disk_errors, origin_of_file, remember_origin
from llamasup.downloads.reference import (
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
from llamasup.downloads.remote_file import RemoteFile, why_not_resumed
from llamasup.downloads.store import FetchedModel, know_as
from llamasup.downloads.url_policy import UrlPolicy
from llamasup.errors import DownloadFailed, FolderUnusable, ModelInvalid, UsageInvalid
from llamasup.gguf.files import read_parts
from llamasup.system.text import printable

__all__ = ["Choosing", "DownloadOptions", "PullListener", "pull"]

# A page of 1,000 files is some 300 KB. A repository of a million files is none of a model.
_MAX_PAGE_BYTES = 8 << 20
_MAX_PAGES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadOptions:
    """``folder``: of all models. ``parallel``: requests at a time. The token goes to the endpoint alone."""

    folder: Path
    endpoint: str = HUB
    token: str | None = field(default=None, repr=False)
    private_addresses: bool = False
    allow_http: bool = False
    parallel: int = 4
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)

    @property
    def reach(self) -> UrlPolicy:
        return UrlPolicy(self.endpoint, private=self.private_addresses, http=self.allow_http)


@dataclass(frozen=True, slots=True)
class Choosing:
    """What is going to be downloaded. ``name`` is how it is asked for again, exactly."""

    name: str
    files: tuple[str, ...]
    size_bytes: int | None
    missing: int
    reason: str
    notes: tuple[str, ...] = ()


class PullListener(Protocol):
    """Whoever follows the download of a model."""

    def chosen(self, choosing: Choosing) -> None: ...

    def moved(self, done_bytes: int) -> None:
        """Of all of the model's files together."""
        ...

    def say(self, text: str) -> None: ...


async def pull(ref: Ref, options: DownloadOptions, follower: PullListener) -> FetchedModel:
    """Have the model that ``ref`` names in the models folder; what is there already is not fetched again.

    Raises what ``DownloadClient.ask`` and ``FileDownload.fetch`` raise, ModelMissing, UsageInvalid where
    several models are meant, and ModelInvalid for what no server could load.
    """
    client = DownloadClient(
        ref, options.reach, options.token, parallel=options.parallel, retry_policy=options.retry_policy
    )
    async with client:
        for last in (False, True):
            try:
                return await _Pull(ref, options, follower, client).run()
            except ListingChanged as outdated:
                if last:
                    raise DownloadFailed(
                        f"{ref}: {outdated}.", remedy="Try again later: it is just being changed on the hub."
                    ) from None
                follower.say(f"{ref}: {outdated}, so the list of files is read again")
    raise AssertionError


class _Pull:
    """One try. Owns the part files until they are published."""

    def __init__(
        self, ref: Ref, options: DownloadOptions, follower: PullListener, client: DownloadClient
    ) -> None:
        self._ref = ref
        self._options = options
        self._follower = follower
        self._client = client
        self._done_before = 0

    async def run(self) -> FetchedModel:
        wanted, projector, choosing = await (
            self._of_repo(self._ref) if isinstance(self._ref, RepoRef) else self._of_url(self._ref)
        )
        needed = [each for each in wanted if not await self._is_here(each)]
        self._follower.chosen(replace(choosing, missing=len(needed)))
        here = sum(each.remote.size or 0 for each in wanted if each not in needed)
        self._done_before = here
        self._follower.moved(here)
        if needed:
            missing_bytes = sum((each.remote.size or 0) - _kept_bytes(each.target) for each in needed)
            check_space(self._existing_folder(), missing_bytes, choosing.name)
            await self._fetch(needed, wanted, projector)
        parts = tuple(each.target for each in wanted if each is not projector)
        model = FetchedModel(parts[0], parts, projector.target if projector else None)
        await asyncio.to_thread(know_as, self._ref, model, self._options.folder)
        return model

    # --- what there is -----------------------------------------------------------------------------

    async def _of_repo(self, ref: RepoRef) -> tuple[list[DownloadTarget], DownloadTarget | None, Choosing]:
        choice = _pinned(ref, choose(ref, await self._listed(ref)))
        model_folder = PurePosixPath(choice.parts[0].path).parent
        wanted = [await self._looked_at(self._wanted(ref, each, model_folder)) for each in choice.files]
        choosing = Choosing(
            f"{ref.repo}:{choice.name}",
            tuple(each.path for each in choice.files),
            choice.size_bytes,
            0,
            choice.reason,
            (*choice.notes, *_unchecked(choice)),
        )
        return wanted, wanted[0] if choice.projector else None, choosing

    def _wanted(self, ref: RepoRef, file: RepoFile, model_folder: PurePosixPath) -> DownloadTarget:
        # A projector is looked for beside the model, and nowhere else.
        place = local_path(ref, str(model_folder / PurePosixPath(file.path).name))
        return DownloadTarget(
            resolve_url(self._options.endpoint, ref, file.path, ref.revision),
            self._options.folder / place,
            RemoteFile(file.size, file.sha256),
        )

    async def _listed(self, ref: RepoRef) -> list[RepoFile]:
        files: list[RepoFile] = []
        url: str | None = tree_url(self._options.endpoint, ref)
        for _ in range(_MAX_PAGES):
            if url is None:
                break
            page = url
            body, link = await self._client.retry(
                partial(self._client.text, page, most_bytes=_MAX_PAGE_BYTES),
                lambda: 0,
                self._follower.say,
            )
            files += read_page(body)
            url = next_page(link, page)
        return files

    async def _of_url(self, ref: UrlRef) -> tuple[list[DownloadTarget], DownloadTarget | None, Choosing]:
        urls = split_urls(ref.url)
        if len(urls) > 1 and ref.sha256 is not None:
            raise UsageInvalid(
                f"{ref} is one of {len(urls)} files, and one checksum is given.",
                remedy="Leave the checksum out.",
            )
        paths = [unquote(urlsplit(url).path) for url in urls]
        wanted = [
            await self._looked_at(
                DownloadTarget(
                    url, self._options.folder / local_path(ref, path), RemoteFile(sha256=ref.sha256)
                )
            )
            for url, path in zip(urls, paths, strict=True)
        ]
        sizes = [each.remote.size for each in wanted]
        size = None if None in sizes else sum(each or 0 for each in sizes)
        notes = (
            () if ref.sha256 else ("nobody says which checksum it has to have (#sha256=… in the URL would)",)
        )
        names = tuple(each.target.name for each in wanted)
        return wanted, None, Choosing(str(ref), names, size, 0, "the file asked for", notes)

    async def _looked_at(self, wanted: DownloadTarget) -> DownloadTarget:
        """With what the server says itself of a file whose size and checksum nobody has announced."""
        if wanted.remote.size is not None and wanted.remote.sha256 is not None:
            return wanted
        remote, _ = await self._client.retry(
            partial(look, self._client, wanted), lambda: 0, self._follower.say
        )
        return replace(wanted, remote=remote)

    # --- what is here ------------------------------------------------------------------------------

    async def _is_here(self, wanted: DownloadTarget) -> bool:
        """Whether the file is in place, and the very one. One that is not known is read through once."""
        try:
            size = wanted.target.stat().st_size
        except OSError:
            return False
        if is_in_place(wanted):
            return True
        remote = wanted.remote
        if remote.sha256 is None or remote.size not in (None, size):
            # With nothing to compare it with: better have it once more.
            origin = origin_of_file(wanted.target)
            is_of_url = origin is not None and origin.url == shown_url(wanted.url)
            etag = origin.etag if origin is not None and is_of_url else None
            here = RemoteFile(None if remote.size is None else size, etag=etag)
            return self._is_other(wanted, why_not_resumed(here, remote))
        self._follower.say(f"{wanted.target.name} is there: checking it")
        if await asyncio.to_thread(_sha256, wanted.target) != remote.sha256:
            return self._is_other(wanted, "it has another checksum")
        with disk_errors(wanted.target):
            mtime_ns = wanted.target.stat().st_mtime_ns
            origin = Origin(shown_url(wanted.url), size, mtime_ns, remote.sha256, remote.etag)
            remember_origin(wanted.target, origin)
        return True

    def _is_other(self, wanted: DownloadTarget, why: str) -> bool:
        self._follower.say(f"{wanted.target.name}: {why}, so what comes replaces it")
        return False

    def _existing_folder(self) -> Path:
        """Where room is needed: the models folder, made if it is not there."""
        folder = self._options.folder
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _make_folder(self, target: Path) -> None:
        """For ``target``. Raises FolderUnusable where it would lie outside the models folder (X10)."""
        with disk_errors(target.parent):
            if not target.parent.resolve().is_relative_to(self._options.folder.resolve()):
                raise FolderUnusable(
                    f"{printable(str(target.parent))} leads out of the models folder.",
                    remedy="Remove the symbolic link that is in its place.",
                )
            target.parent.mkdir(parents=True, exist_ok=True)

    # --- fetching ----------------------------------------------------------------------------------

    async def _fetch(
        self,
        needed: Sequence[DownloadTarget],
        wanted: Sequence[DownloadTarget],
        projector: DownloadTarget | None,
    ) -> None:
        fetched: dict[Path, PartFile] = {}
        first = next(each for each in wanted if each is not projector)
        with ExitStack() as held:
            for each in needed:
                self._make_folder(each.target)
                part = await FileDownload(
                    self._client,
                    each,
                    _Sum(self._follower, self._done_before),
                    parallel=self._options.parallel,
                ).fetch()
                self._done_before += each.target.stat().st_size if part is None else part.done_bytes
                if part is not None:
                    held.callback(part.close)  # complete: published below, or found so by the next run
                    if each is projector or each is first:
                        # Before hours are spent on what belongs to it.
                        await asyncio.to_thread(_check, [part.path], [part])
                    fetched[each.target] = part
            parts = [each.target for each in wanted if each is not projector]
            if len(parts) > 1:
                now = [fetched[each].path if each in fetched else each for each in parts]
                # Which of them is the wrong one cannot be told.
                await asyncio.to_thread(_check, now, [fetched[each] for each in parts if each in fetched])
            order = ([projector] if projector else []) + [
                each for each in reversed(wanted) if each is not projector
            ]
            for each in order:
                if (ready := fetched.get(each.target)) is not None:
                    ready.publish(shown_url(each.url))


class _Sum:
    """What is heard of one file, as a part of all."""

    def __init__(self, follower: PullListener, before: int) -> None:
        self._follower = follower
        self._before = before
        self.say: Callable[[str], None] = follower.say

    def moved(self, done_bytes: int) -> None:
        self._follower.moved(self._before + done_bytes)


def _check(paths: Sequence[Path], come: Sequence[PartFile]) -> None:
    """Raises ModelInvalid where no server could load what is at ``paths``; what has ``come`` goes then."""
    try:
        read_parts(paths)
    except ModelInvalid:
        for part in come:
            part.discard()
        raise


def _kept_bytes(target: Path) -> int:
    """What an earlier run has left of it, in blocks: the size of a file with holes says nothing."""
    try:
        status = target.with_name(f"{target.name}.part").stat()
    except OSError:
        return 0
    return min(getattr(status, "st_blocks", 0) * 512, status.st_size)


def _pinned(ref: RepoRef, choice: Choice) -> Choice:
    """With the checksum that was asked for. Raises ModelInvalid where the hub says it has another one."""
    if ref.sha256 is None:
        return choice
    if len(choice.parts) > 1:
        raise UsageInvalid(
            f"{ref} is one of {len(choice.parts)} files, and one checksum is given.",
            remedy="Leave the checksum out.",
        )
    (part,) = choice.parts
    if part.sha256 not in (None, ref.sha256):
        raise ModelInvalid(
            f"{ref} has the checksum {part.sha256} on the hub, and {ref.sha256} was asked for.",
            remedy="Ask for the revision that has it (…/resolve/COMMIT/…), or for the checksum of this one.",
        )
    return replace(choice, parts=(replace(part, sha256=ref.sha256),))


def _unchecked(choice: Choice) -> tuple[str, ...]:
    return tuple(
        f"the hub says no checksum of {PurePosixPath(each.path).name}: only its size is checked"
        for each in choice.files
        if each.sha256 is None
    )


def _sha256(path: Path) -> str:
    with disk_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
