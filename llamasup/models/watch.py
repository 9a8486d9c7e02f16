"""Watches the models folders and reports complete models that were added, changed or removed.

After an event of the operating system everything is searched again, which is cheap for unchanged files, and
``debounce`` holds back unfinished ones. It also polls, for network folders and systems without events.

The search runs in its own thread: a slow folder or a dead network share must not block the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from llamasup.errors import LlamasupError
from llamasup.models.debounce import DebouncePolicy, below, debounce, initial_state
from llamasup.models.folder_events import FolderEvents
from llamasup.models.found import FoundModel
from llamasup.models.search import Search, search_models

__all__ = ["ModelWatch"]

_log = logging.getLogger(__name__)

_TICK_S = 1.0  # between two reads of events, at some 0.1 ms of CPU
_POLL_INTERVAL_S = 60.0  # network folders report no changes by other machines
_POLL_INTERVAL_WITHOUT_EVENTS_S = 10.0
_JOIN_S = 1.0  # a daemon thread: a search of slow folders is not awaited


class ModelWatch:
    """``async with ModelWatch(folders, paths, first) as watch: async for search in watch.changes(): …``

    ``folders`` and ``paths`` as for ``search_models``; ``first`` is its first result. ``changes`` yields each
    new result, and only the last of several that come at once. For one event loop and one reader.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        paths: Sequence[str],
        first: Search,
        *,
        cache_folder: Path | None = None,
        policy: DebouncePolicy | None = None,
        tick_s: float = _TICK_S,
    ) -> None:
        self._folders, self._paths = tuple(folders), tuple(paths)
        self._cache_folder = cache_folder
        self._policy = DebouncePolicy() if policy is None else policy
        self._tick_s = tick_s
        self._first = self._last = first
        self._latest: Search | None = None
        self._arrived = asyncio.Event()
        self._stop = threading.Event()
        self._watching = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="model-watch", daemon=True)

    async def __aenter__(self) -> Self:
        """Changes from here on are reported."""
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
        search = search_models(self._folders, self._paths, cache_folder=self._cache_folder)
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
    """The parts whose change is reported; errors are compared by their messages."""
    return (
        [(model.path, model.ids, model.files, _error(model)) for model in search.found],
        {path: (model.files, _error(model)) for path, model in search.sources.items()},
        {folder: error.message for folder, error in search.missing.items()},
    )


def _error(found: FoundModel) -> str:
    return found.outcome.message if isinstance(found.outcome, LlamasupError) else ""
