"""Downloads models for a service: each model once for all requests, in its own process.

The process (``llamasup pull --json``) keeps TLS, checksums and slow disks away from the event loop of the
service, and frees its memory at the end. It can be killed at any time; the next one continues its download.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from llamasup.core.hub.reference import shown_url
from llamasup.core.hub.remote_file import Listener, Progress
from llamasup.core.hub.store import DownloadSettings, FetchedModel
from llamasup.core.system.event_loops import pipe_reader
from llamasup.core.system.own_command import own_command
from llamasup.core.system.process.spawn import Child, spawn
from llamasup.core.system.text import INVALID_JSON
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

# Two downloads use the network and the disk fully; a third one would slow them down.
_MAX_PARALLEL = 2
# With downloads on demand, clients can name any model.
_MAX_DOWNLOADS = 32
# A set of 999 parts, each with its path.
_MAX_LINE = 1 << 20
# Time to save the download after a SIGTERM; then the process is killed, and seconds of the download are lost.
_TERM_TIMEOUT_S = 10.0

# Not an argument: a URL may contain a signature, and ps shows arguments.
_REF_VARIABLE = "LLAMASUP_REF"

_CLASSES: Mapping[str, type[LlamasupError]] = {
    error.cause: error
    for error in (
        *(AccessDenied, ConfigInvalid, DiskFull, DownloadFailed, DownloadRefused),
        *(FolderUnusable, ModelInvalid, ModelMissing, UsageInvalid),
    )
}


class _Download(Struct):
    task: asyncio.Task[FetchedModel]
    listeners: list[Listener] = field(default_factory=list[Listener])
    waiting: int = 0


class Downloads:
    """Owns the download processes. ``run_folder`` is that of the service. For the event loop's thread."""

    def __init__(
        self, settings: DownloadSettings, run_folder: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self._settings = settings
        self._run_folder = run_folder
        self._environ = os.environ if environ is None else environ
        self._running: dict[str, _Download] = {}
        self._tasks: set[asyncio.Task[FetchedModel]] = set()
        self._free = asyncio.Semaphore(_MAX_PARALLEL)

    async def fetch(self, ref: str, progress: Listener | None = None) -> FetchedModel:
        """Download the model of ``ref``, unless it is in the folder. Concurrent calls share one download.

        When the last caller is cancelled, the download ends and can be continued later. Raises
        DownloadFailed, DownloadRefused, AccessDenied, ModelMissing, ModelInvalid, DiskFull, FolderUnusable,
        ConfigInvalid or UsageInvalid.
        """
        download = self._running.get(ref) or self._start(ref)
        if progress is not None:
            download.listeners.append(progress)
        download.waiting += 1
        try:
            return await asyncio.shield(download.task)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # the download was cancelled, not the caller
                raise Stopping("llamasup is stopping.", remedy="Start it again.") from None
            raise
        finally:
            download.waiting -= 1
            if progress is not None:
                download.listeners.remove(progress)
            if not download.waiting and not download.task.done():
                self._remove(ref, download)
                download.task.cancel()

    async def aclose(self) -> None:
        """End all downloads, and wait for that."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, ref: str) -> _Download:
        if len(self._tasks) >= _MAX_DOWNLOADS:
            raise DownloadFailed(
                f"Too many downloads are waiting ({len(self._tasks)}).", remedy="Try again later."
            )
        listeners: list[Listener] = []
        task = asyncio.get_running_loop().create_task(self._fetch(ref, listeners), name="download")
        download = self._running[ref] = _Download(task, listeners)
        self._tasks.add(task)

        def on_done(ended: asyncio.Task[FetchedModel]) -> None:
            self._tasks.discard(ended)
            self._remove(ref, download)
            if not ended.cancelled():
                ended.exception()  # marks the error as retrieved

        task.add_done_callback(on_done)
        return download

    def _remove(self, ref: str, download: _Download) -> None:
        if self._running.get(ref) is download:
            del self._running[ref]

    async def _fetch(self, ref: str, listeners: list[Listener]) -> FetchedModel:
        found = await asyncio.to_thread(self._settings.find, ref, self._environ)
        if found is not None:
            return found
        command = own_command("llamasup")
        if command is None:
            raise DownloadFailed(
                f"{_shown(ref)} is not downloaded, and this application cannot start a download.",
                remedy=f"Run `llamasup pull` of another installation (--folder {self._settings.folder}).",
            )
        async with self._free:
            env = {**self._environ, _REF_VARIABLE: ref}
            try:
                child = spawn(
                    [*command, *self._arguments()], env=env, cwd=Path("/"), run_folder=self._run_folder
                )
            except OSError as error:
                raise DownloadFailed(
                    f"The download of {_shown(ref)} cannot be started: {error.strerror or error}.",
                    remedy="Free memory or processes on this machine, and try again.",
                ) from error
            try:
                async with contextlib.aclosing(_events(child.output_fd)) as events:
                    return await self._outcome(ref, events, listeners)
            finally:
                await _terminate(child)

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
                f"The download of {_shown(ref)} ended without a result.",
                remedy="Run `llamasup pull` with this model, which shows the error.",
            )
        if isinstance(outcome, LlamasupError):
            raise outcome
        return outcome

    def _arguments(self) -> list[str]:
        settings = self._settings
        return [
            *("pull", "--json"),
            *("--folder", str(settings.folder), "--parallel", str(settings.parallel)),
            *(["--endpoint", settings.endpoint] if settings.endpoint else []),
            *(["--token-file", str(settings.token_file)] if settings.token_file else []),
            *(["--allow-private"] if settings.private_addresses else []),
            *(["--allow-http"] if settings.allow_http else []),
            "-",
        ]


def _shown(ref: str) -> str:
    """Remove the query of a URL, which may contain a signature."""
    return shown_url(ref) if "://" in ref else ref


async def _events(output_fd: int) -> AsyncGenerator[Mapping[str, Any], None]:
    """The JSON events that a child writes, until it ends."""
    async with pipe_reader(output_fd, _MAX_LINE) as reader:
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # the line is too long: skip it
                continue
            if not line:
                return
            with contextlib.suppress(*INVALID_JSON):  # messages for users use the same pipe
                found = msgspec.json.decode(line)
                if isinstance(found, dict) and "event" in found:
                    yield found


async def _terminate(child: Child) -> None:
    """End the child, and wait for that even if cancelled."""
    child.terminate()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TERM_TIMEOUT_S):
                await child.wait()
    finally:
        child.kill_group()
        await asyncio.shield(child.wait())
