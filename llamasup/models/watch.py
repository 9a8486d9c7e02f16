"""Watches what can be served: models that come, change, go, and those that somebody is still writing.

The system says when something has happened; then all is looked at again, which is cheap for what is as it
was, and only what has settled is handed on (core.settling). Where the system says nothing, and for folders of
other machines, of which it says little, it is looked at from time to time as well.

A thread of its own looks: folders may be slow, and one on a dead network share would hold the event loop.
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
from llamasup.models.debounce import DebouncePolicy, debounce, initial_state
from llamasup.models.folder_events import FolderEvents
from llamasup.models.found import FoundModel
from llamasup.models.search import Search, search_models

__all__ = ["ModelWatch"]

_log = logging.getLogger(__name__)

_TICK_S = 1.0  # from one question to the next whether something has happened, at some 0.1 ms of CPU
_LOOK_S = 60.0  # at the latest: network folders tell nothing of what others do
_LOOK_UNTOLD_S = 10.0  # where the system tells nothing at all
_JOIN_S = 1.0  # a look at slow folders is not waited for: the thread is a daemon


class ModelWatch:
    """``async with ModelWatch(folders, paths, first) as watch: async for search in watch.changes(): …``

    ``folders`` and ``paths`` as for ``search_models``; ``first`` is what it said before, which counts as
    known. ``changes`` yields what is to be served from now on, each time that this is something else; of
    several changes during one turn of its loop only the last. For one loop, and one reader.
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
        """From here on nothing is missed."""
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
        look_at_s = now_s  # once, when it is watched: something may have happened between
        failed = ""
        try:
            while True:
                try:
                    happened = events.happened()
                    self._say_watching()
                    if happened or time.monotonic() >= look_at_s:
                        look_at_s = self._look(reliable=events.reliable)
                        failed = ""
                except Exception as error:  # what nobody thought of takes no models: they stay as they are
                    self._say_watching()
                    look_at_s = time.monotonic() + _LOOK_UNTOLD_S
                    if failed != (failed := repr(error)):  # told once as long as it lasts
                        _log.exception("the folders of models cannot be looked at; tried again")
                if self._stop.wait(max(0.0, min(self._tick_s, look_at_s - time.monotonic()))):
                    return
        finally:
            events.close()

    def _look(self, *, reliable: bool) -> float:
        """Look at everything, and tell what is to be served. When to look again if nothing is reported."""
        search = search_models(self._folders, self._paths, cache_folder=self._cache_folder)
        now_s = time.monotonic()
        self._settle(search, now_s)
        wake_at_s = min(self._debounced.wake_at_s, self._debounced_sources.wake_at_s)
        return min(wake_at_s, now_s + (_LOOK_S if reliable else _LOOK_UNTOLD_S))

    def _settle(self, search: Search, now_s: float) -> None:
        hidden = search.hidden
        debounced = debounce(self._debounced, search.found, now_s, missing=hidden, policy=self._policy)
        out_of_sight = tuple(f"{folder.rstrip('/')}/" for folder in hidden)
        in_sight = (each for each in search.sources.values() if not each.path.startswith(out_of_sight))
        sources = debounce(
            self._debounced_sources, tuple(in_sight), now_s, missing=hidden, policy=self._policy
        )
        self._debounced, self._debounced_sources = debounced, sources
        # A path may name any part of a set: what it leads to is its first.
        now_at = {each.path: each for each in sources.models}
        asked = {path: now_at[found.path] for path, found in search.sources.items() if found.path in now_at}
        new = replace(search, found=debounced.models, sources=MappingProxyType(asked))
        if _shown(new) != _shown(self._last):
            self._last = new
            self._hand_on(partial(self._tell, new))

    def _say_watching(self) -> None:
        if not self._watching.is_set():
            self._hand_on(self._watching.set)

    def _hand_on(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it is over, and nobody has to be told
            self._loop.call_soon_threadsafe(call)

    def _tell(self, search: Search) -> None:
        self._latest = search
        self._arrived.set()


def _shown(search: Search) -> tuple[object, ...]:
    """What of it makes a difference; errors are told apart by what they say."""
    return (
        [(each.path, each.ids, each.files, _error(each)) for each in search.found],
        {path: (each.files, _error(each)) for path, each in search.sources.items()},
        {folder: error.message for folder, error in search.missing.items()},
    )


def _error(found: FoundModel) -> str:
    return found.outcome.message if isinstance(found.outcome, LlamasupError) else ""
