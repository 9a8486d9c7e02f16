"""Watches the models folders and reports complete models that were added, changed or removed.

After an event of the operating system everything is searched again, which is cheap for unchanged files, and
``debounce`` holds back unfinished ones. It also polls, for network folders and systems without events.

The search runs in its own thread: a slow folder or a dead network share must not block the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from llamasup.core.models.debounce import USUAL, DebouncePolicy, below, debounce, initial_state
from llamasup.core.models.found import FoundModel
from llamasup.core.models.search import Search, search_models
from llamasup.core.system.storage.folders import device_and_inode
from llamasup.errors import LlamasupError

if TYPE_CHECKING:
    from watchfiles._rust_notify import RustNotify

_log = logging.getLogger(__name__)

_TICK_S = 1.0  # between two reads of events, at some 0.1 ms of CPU
_POLL_INTERVAL_S = 60.0  # network folders report no changes by other machines
_POLL_INTERVAL_WITHOUT_EVENTS_S = 10.0
_JOIN_S = 1.0  # a daemon thread: a search of slow folders is not awaited
# Names of unfinished files: their changes are ignored.
_UNFINISHED = (
    *(".part", ".part.json", ".incomplete", ".lock", ".tmp", ".downloadinprogress", ".etag"),
    *(".crdownload", ".!qb"),
)

_MAX_FOLDERS = 4_000  # of the 8,192 watches that a user has on older kernels (fs.inotify.max_user_watches)
_MAX_ENTRIES = 200_000  # some seconds in a home folder


class FolderEvents:
    """Events of the operating system (inotify, FSEvents, …) in folders, for one thread.

    ``deep`` folders are watched with their subfolders, ``flat`` ones without. Polls only the identities of
    the folders themselves, to notice one that is replaced or comes back.
    """

    def __init__(self, deep: Sequence[Path], flat: Sequence[Path]) -> None:
        self._deep, self._flat = deep, flat
        self._watched: list[RustNotify] = []
        self._identities: dict[Path, tuple[int, int] | None] = {}
        self.reliable = False
        """Whether the system reports all changes; else the caller must poll."""

    def happened(self) -> bool:
        """Whether anything changed since the last call. Takes a millisecond, most of it asleep."""
        identities = {folder: device_and_inode(folder, follow=True) for folder in (*self._deep, *self._flat)}
        if identities != self._identities:
            self._identities = identities
            self._watch_again()
            return True
        changed = [_has_events(watch) for watch in self._watched]  # all of them: each must be emptied
        return any(changed)

    def close(self) -> None:
        for watch in self._watched:
            watch.close()
        self._watched = []

    def _watch_again(self) -> None:
        self.close()
        self.reliable = True
        for folders, recursive in ((self._deep, True), (self._flat, False)):
            there = [str(folder) for folder in folders if self._identities[folder] is not None]
            if there and recursive and not all(map(_can_be_watched, there)):
                self.reliable = False
            elif there:
                self._watch(there, recursive=recursive)

    def _watch(self, folders: list[str], *, recursive: bool) -> None:
        try:
            # watchfiles' own generators poll this 20 times a second.
            from watchfiles._rust_notify import RustNotify

            self._watched.append(RustNotify(folders, False, False, 0, recursive, True))
        except (ImportError, OSError, RuntimeError, UnicodeEncodeError):
            # RuntimeError is WatchfilesRustInternalError: no more watches (fs.inotify.max_user_watches) or no
            # support at all. The library rejects paths that are not UTF-8.
            self.reliable = False


def _can_be_watched(top: str) -> bool:
    """Whether each folder can be watched: not too many, and no link to a folder, which the library would
    follow anywhere, up to a whole disk.
    """
    waiting, folders, entries = [top], 0, 0
    while waiting:
        folders += 1
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as found:
            for entry in found:
                entries += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_symlink() and entry.is_dir():
                    return False
        if folders > _MAX_FOLDERS or entries > _MAX_ENTRIES:
            return False
    return True


def _has_events(watched: RustNotify) -> bool:
    """Take the pending events; a millisecond is the shortest wait."""
    changes = watched.watch(1, 1, 1, None)
    return not isinstance(changes, str) and any(not path.lower().endswith(_UNFINISHED) for _, path in changes)


class ModelWatch:
    """Watches folders, for ``async with ModelWatch(…) as watch: async for search in watch.changes()``.

    ``folders`` and ``paths`` as for ``search_models``; ``first`` is its first result. ``changes`` yields each
    new result, and only the last of several that come at once. For one event loop and one reader.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        paths: Sequence[str],
        first: Search,
        *,
        follow_links: bool = False,
        policy: DebouncePolicy = USUAL,
        tick_s: float = _TICK_S,
    ) -> None:
        self._folders, self._paths = tuple(folders), tuple(paths)
        self._follow_links = follow_links
        self._policy = policy
        self._tick_s = tick_s
        self._first = self._last = first
        self._latest: Search | None = None
        self._arrived = asyncio.Event()
        self._stop = threading.Event()
        self._watching = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="model-watch", daemon=True)

    async def __aenter__(self) -> Self:
        """Begin to watch: later changes are reported."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self._watching.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        joining = asyncio.ensure_future(asyncio.to_thread(self._thread.join, _JOIN_S))  # noqa: TID251 - owned here
        try:
            await asyncio.shield(joining)
        except asyncio.CancelledError:
            await joining  # no task is left behind
            raise

    async def changes(self) -> AsyncIterator[Search]:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            assert self._latest is not None
            yield self._latest

    # --- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        now_s = time.monotonic()
        self._debounced = initial_state(self._first.found, now_s)
        self._debounced_sources = initial_state(tuple(self._first.sources.values()), now_s)
        parents = {Path(path).parent for path in self._paths}
        events = FolderEvents(self._folders, sorted(parents))
        search_at_s = now_s  # once at the start: files may have changed since ``first``
        failed = ""
        try:
            while True:
                try:
                    happened = events.happened()
                    self._report_watching()
                    if happened or time.monotonic() >= search_at_s:
                        search_at_s = self._search(reliable=events.reliable)
                        failed = ""
                except Exception as error:  # an unexpected error removes no models
                    self._report_watching()
                    search_at_s = time.monotonic() + _POLL_INTERVAL_WITHOUT_EVENTS_S
                    if failed != (failed := repr(error)):  # logged once while it lasts
                        _log.exception("cannot search the models folders; trying again")
                if self._stop.wait(max(0.0, min(self._tick_s, search_at_s - time.monotonic()))):
                    return
        finally:
            events.close()

    def _search(self, *, reliable: bool) -> float:
        """Search everything, and report changes. Returns the time of the next search without an event."""
        search = search_models(self._folders, self._paths, follow_links=self._follow_links)
        now_s = time.monotonic()
        self._debounce(search, now_s)
        wake_at_s = min(self._debounced.wake_at_s, self._debounced_sources.wake_at_s)
        return min(wake_at_s, now_s + (_POLL_INTERVAL_S if reliable else _POLL_INTERVAL_WITHOUT_EVENTS_S))

    def _debounce(self, search: Search, now_s: float) -> None:
        hidden = search.hidden
        debounced = debounce(self._debounced, search.found, now_s, missing=hidden, policy=self._policy)
        readable = [model for model in search.sources.values() if not model.path.startswith(below(hidden))]
        sources = debounce(self._debounced_sources, readable, now_s, missing=hidden, policy=self._policy)
        self._debounced, self._debounced_sources = debounced, sources
        # A path may name any part of a split set: its model has the path of the first.
        at_path = {model.path: model for model in sources.models}
        asked = {path: at_path[found.path] for path, found in search.sources.items() if found.path in at_path}
        new = replace(search, found=debounced.models, sources=MappingProxyType(asked))
        if _compared(new) != _compared(self._last):
            self._last = new
            self._call_in_loop(partial(self._report, new))

    def _report_watching(self) -> None:
        if not self._watching.is_set():
            self._call_in_loop(self._watching.set)

    def _call_in_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    def _report(self, search: Search) -> None:
        self._latest = search
        self._arrived.set()


def _compared(search: Search) -> tuple[object, ...]:
    """Return the parts whose change is reported; errors are compared by their messages."""
    return (
        [(model.path, model.ids, model.files, _error(model)) for model in search.found],
        {path: (model.files, _error(model)) for path, model in search.sources.items()},
        {folder: error.message for folder, error in search.missing.items()},
    )


def _error(found: FoundModel) -> str:
    return found.outcome.message if isinstance(found.outcome, LlamasupError) else ""
