"""Downloads for a service: one for all who ask for the same model, each in a process of its own.

TLS, checksums and a disk that makes its writers wait take no time of the event loop that serves, and none of
its memory afterwards. The process is ``llamasup pull --json``; killed at any moment, by us or with us, it
leaves what the next one goes on with.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from llamasup.downloads.hub_settings import hub_endpoint
from llamasup.downloads.reference import parse_ref, shown_url
from llamasup.downloads.store import FetchedModel, downloaded
from llamasup.errors import (
    AccessDenied,
    ConfigInvalid,
    DiskFull,
    DownloadFailed,
    DownloadRefused,
    FolderUnusable,
    LlamasupError,
    ModelInvalid,
    ModelMissing,
    Stopping,
    UsageInvalid,
)
from llamasup.system.process.platform import python_executable
from llamasup.system.process.spawn import Child, spawn
from llamasup.system.text import INVALID_JSON

__all__ = ["DownloadSettings", "Downloads", "Progress"]

# Each takes what the line and the disk give: a third one makes the first two late.
_AT_ONCE = 2
# Clients may name what they like where downloads on demand are allowed.
_MAX_ASKED = 32
# A set of 999 parts, each with its path.
_MAX_LINE = 1 << 20
# After a SIGTERM what has come is put on the disk; then it is killed, and seconds of the download are lost.
_END_S = 10.0

# Not as an argument: a URL may hold a signature, and ps shows arguments.
_REF_VARIABLE = "LLAMASUP_REF"

_CLASSES: Mapping[str, type[LlamasupError]] = {
    each.cause: each
    for each in (
        *(AccessDenied, ConfigInvalid, DiskFull, DownloadFailed, DownloadRefused),
        *(FolderUnusable, ModelInvalid, ModelMissing, UsageInvalid),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSettings:
    """``folder``: of the models, absolute; in ``others`` is looked as well, and nothing is put there.
    ``endpoint`` and ``token_file``: None as the environment says.
    """

    folder: Path
    others: tuple[Path, ...] = ()
    endpoint: str | None = None
    token_file: Path | None = None
    private_addresses: bool = False
    allow_http: bool = False
    parallel: int = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """Of all files of a model together; ``total_bytes`` None: not known."""

    done_bytes: int
    total_bytes: int | None
    bytes_per_s: int


Listener = Callable[[Progress], None]


@dataclass(slots=True)
class _Download:
    task: asyncio.Task[FetchedModel]
    listeners: list[Listener] = field(default_factory=list[Listener])
    waiting: int = 0


class Downloads:
    """Owns its processes. ``run_folder`` is that of the service; for the event loop's thread."""

    def __init__(
        self, settings: DownloadSettings, run_folder: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self._settings = settings
        self._run_folder = run_folder
        self._environ = os.environ if environ is None else environ
        self._running: dict[str, _Download] = {}
        self._tasks: set[asyncio.Task[FetchedModel]] = set()
        self._free = asyncio.Semaphore(_AT_ONCE)

    async def fetch(self, ref: str, progress: Listener | None = None) -> FetchedModel:
        """Have the model here that ``ref`` names. All who ask for one share one download.

        What is in the folder already is used as it is, without asking anybody.
        May be cancelled; with the last who waits for it the download ends, and what has come is kept. Raises
        DownloadFailed, DownloadRefused, AccessDenied, ModelMissing, ModelInvalid, DiskFull, FolderUnusable,
        ConfigInvalid or UsageInvalid.
        """
        download = self._running.get(ref) or self._begin(ref)
        if progress is not None:
            download.listeners.append(progress)
        download.waiting += 1
        try:
            return await asyncio.shield(download.task)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # it was not who waits that was cancelled
                raise Stopping("llamasup is stopping.", remedy="Start it again.") from None
            raise
        finally:
            download.waiting -= 1
            if progress is not None:
                download.listeners.remove(progress)
            if not download.waiting and not download.task.done():
                self._forget(ref, download)
                download.task.cancel()

    async def aclose(self) -> None:
        """End all of them, and wait for their ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, ref: str) -> _Download:
        if len(self._tasks) >= _MAX_ASKED:
            raise DownloadFailed(
                f"{len(self._tasks)} downloads are waiting already.", remedy="Try again later."
            )
        listeners: list[Listener] = []
        task = asyncio.get_running_loop().create_task(self._fetch(ref, listeners), name="download")
        download = self._running[ref] = _Download(task, listeners)
        self._tasks.add(task)

        def over(ended: asyncio.Task[FetchedModel]) -> None:
            self._tasks.discard(ended)
            self._forget(ref, download)
            if not ended.cancelled():
                ended.exception()  # those who waited have it; when none do, nobody wants it

        task.add_done_callback(over)
        return download

    def _forget(self, ref: str, download: _Download) -> None:
        if self._running.get(ref) is download:
            del self._running[ref]

    async def _fetch(self, ref: str, listeners: list[Listener]) -> FetchedModel:
        found = await asyncio.to_thread(self._here, ref)
        if found is not None:
            return found
        python = python_executable()
        if python is None:
            raise DownloadFailed(
                f"{_shown(ref)} is not here, and this application has no Python to download it with.",
                remedy=f"Get it with llamasup pull, from elsewhere, into {self._settings.folder}.",
            )
        async with self._free:
            env = {**self._environ, _REF_VARIABLE: ref}
            try:
                child = spawn(self._command(python), env=env, cwd=Path("/"), run_folder=self._run_folder)
            except OSError as error:
                raise DownloadFailed(
                    f"The download of {_shown(ref)} cannot be started: {error.strerror or error}.",
                    remedy="What the machine is short of has to be given back first.",
                ) from error
            try:
                async with contextlib.aclosing(_events(child.output_fd)) as events:
                    return await self._outcome(ref, events, listeners)
            finally:
                await _ended(child)

    def _here(self, ref: str) -> FetchedModel | None:
        parsed = parse_ref(ref, hub_endpoint(self._environ, self._settings.endpoint))
        if parsed is None:
            return None
        folders = (self._settings.folder, *self._settings.others)
        return next(filter(None, (downloaded(parsed, folder) for folder in folders)), None)

    async def _outcome(
        self, ref: str, events: AsyncIterator[Mapping[str, Any]], listeners: list[Listener]
    ) -> FetchedModel:
        outcome: FetchedModel | LlamasupError | None = None
        async for event in events:
            match event["event"]:
                case "progress":
                    seen = Progress(event["done_bytes"], event["total_bytes"], event["bytes_per_s"])
                    for listener in list(listeners):
                        listener(seen)
                case "done":
                    mmproj = event["mmproj"]
                    outcome = FetchedModel(
                        Path(event["path"]),
                        tuple(map(Path, event["parts"])),
                        Path(mmproj) if mmproj else None,
                    )
                case "error":
                    outcome = _CLASSES.get(event["cause"], DownloadFailed)(
                        event["message"], remedy=event["remedy"], details=tuple(event["details"])
                    )
                case _:
                    pass
        if outcome is None:
            outcome = DownloadFailed(
                f"The download of {_shown(ref)} ended without a word.",
                remedy="Try it by hand: llamasup pull says more.",
            )
        if isinstance(outcome, LlamasupError):
            raise outcome
        return outcome

    def _command(self, python: str) -> list[str]:
        said = self._settings
        return [
            *(python, "-P", "-m", "llamasup", "pull", "--json"),
            *("--folder", str(said.folder), "--parallel", str(said.parallel)),
            *(["--endpoint", said.endpoint] if said.endpoint else []),
            *(["--token-file", str(said.token_file)] if said.token_file else []),
            *(["--allow-private"] if said.private_addresses else []),
            *(["--allow-http"] if said.allow_http else []),
            "-",
        ]


def _shown(ref: str) -> str:
    """A URL's query may hold a signature."""
    return shown_url(ref) if "://" in ref else ref


async def _events(output_fd: int) -> AsyncGenerator[Mapping[str, Any], None]:
    """The objects among what a child writes, until it ends."""
    reader = asyncio.StreamReader(limit=_MAX_LINE)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output_fd, "rb", buffering=0)
    )
    try:
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # longer than what is taken: nothing of it is kept
                continue
            if not line:
                return
            with contextlib.suppress(*INVALID_JSON):  # its messages for users arrive on the same pipe
                found = msgspec.json.decode(line)
                if isinstance(found, dict) and "event" in found:
                    yield found
    finally:
        transport.close()


async def _ended(child: Child) -> None:
    """Until the child has ended, whoever is impatient."""
    child.terminate()
    waiting = asyncio.get_running_loop().create_task(_wait(child))
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            child.kill_group()
            await asyncio.wait({waiting})
            raise


async def _wait(child: Child) -> None:
    try:
        async with asyncio.timeout(_END_S):
            await child.wait()
    except TimeoutError:
        child.kill_group()
        await child.wait()
