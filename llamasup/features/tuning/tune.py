"""Runs one tuning in its own event loop: lock, run folder, session, unfinished search, kept result."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from llamasup.core.planning.facts import Launch
from llamasup.core.planning.measured.stores import load_results, save_results, tuning_folder
from llamasup.core.planning.measured.tuned import NO_CHANGES, Kept, add_result, result_for
from llamasup.core.system.process.guardian import guarded_run_folder
from llamasup.core.system.process.platform import loop_factory
from llamasup.core.system.process.run_folder import NO_CONTROL
from llamasup.core.system.storage.fact_cache import FactCache, FileIdentity
from llamasup.core.system.storage.folders import Claimed, claim_file
from llamasup.errors import FolderUnusable, ModelMissing, TuningFailed
from llamasup.features.tuning.candidates import Setup
from llamasup.features.tuning.report import SessionResult
from llamasup.features.tuning.search import Search
from llamasup.features.tuning.session import Options, SavedSearch, Session, new_search

# Change it when the meaning of an entry changes.
_REVISION = "2"


class _Stored(msgspec.Struct, frozen=True):
    """A stored search; ``search`` is None once it has ended."""

    search: SavedSearch | None


def saved_search(model: FileIdentity) -> SavedSearch | None:
    """Return the unfinished search of this state of the file; None without one, or if it cannot be read."""
    with contextlib.suppress(FolderUnusable):
        stored = _store().get(model)
        return None if stored is None else stored.search
    return None


def store_search(model: FileIdentity, search: SavedSearch | None) -> None:
    """Save the search for the next call. The tuning continues if the disk is full."""
    with contextlib.suppress(FolderUnusable):
        _store().put(model, _Stored(search))


@contextmanager
def only_tuning(model_path: Path) -> Iterator[None]:
    """Hold the lock of this model. Raises TuningFailed if another process tunes it, FolderUnusable."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(model_path))).hexdigest()[:32]
    path = tuning_folder() / f"{digest}.lock"
    try:
        lock = claim_file(path)
    except Claimed:
        raise TuningFailed(
            f"{model_path.name} is being tuned by another llamasup: the two would disturb each other.",
            remedy="Wait until it has finished, or stop it with Ctrl-C. What it has measured is not lost.",
        ) from None
    except OSError as error:
        raise FolderUnusable(
            f"{path}: the lock file cannot be created: {error.strerror}",
            remedy="Make the state folder writable.",
        ) from None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _store() -> FactCache[_Stored]:
    return FactCache("search", _Stored, revision=_REVISION, folder=tuning_folder())


def tune(
    launch: Launch,
    options: Options,
    *,
    say: Callable[[str], None],
    on_stop: Callable[[Callable[[], None]], None] = lambda _stop: None,
    search_of: Callable[[Setup], Search] = new_search,
    clock: Callable[[], float] = time.monotonic,
) -> SessionResult | None:
    """Measure, and keep what is proven. ``on_stop`` gets a function that stops it, callable from anywhere and
    at any time; a second call kills servers that have not ended.
    ``search_of`` makes a new search, and ``clock`` decides when the time has run out.

    Returns None if it was stopped. Raises TuningFailed, FolderUnusable, and what planning raises.
    """
    with only_tuning(launch.model_path), asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_tune(launch, options, say, on_stop, search_of=search_of, clock=clock))


async def _tune(
    launch: Launch,
    options: Options,
    say: Callable[[str], None],
    on_stop: Callable[[Callable[[], None]], None],
    **of_session: Any,
) -> SessionResult | None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    model = _identity(launch)
    with guarded_run_folder() as (folder, _guardian):
        (folder / NO_CONTROL).touch()
        session = Session(
            launch,
            options,
            model,
            folder,
            saved=saved_search(model),
            save=lambda search: store_search(model, search),
            say=say,
            **of_session,
        )
        if session.resumed:
            say("continuing the search that an earlier call began")
        stopped = False

        def stop() -> None:
            nonlocal stopped
            if not loop.is_closed():
                loop.call_soon_threadsafe(session.stop_now if stopped else task.cancel)
            stopped = True

        on_stop(stop)
        try:
            found = await session.run()
        except asyncio.CancelledError:
            if stopped:
                return None
            raise
    if found.kept is not None:
        keep(model, found.kept, say, allow_lossy=options.allow_lossy)
        store_search(model, None)
    return found


def _identity(launch: Launch) -> FileIdentity:
    try:
        return FileIdentity.of(launch.model_path)
    except OSError as error:
        raise ModelMissing(f"{launch.model_path}: {error.strerror}") from None


def keep(model: FileIdentity, kept: Kept, say: Callable[[str], None], *, allow_lossy: bool = False) -> None:
    """Keep a result of the file ``model`` for the next plan. Raises FolderUnusable."""
    results = load_results(model)
    earlier = result_for(results, kept.conditions)
    if earlier is not None and earlier.unchecked and not allow_lossy:
        say(f"the earlier result was taken with --allow-lossy, so it is dropped: {earlier.changes}")
    elif kept.changes == NO_CHANGES and earlier is not None:
        # It is proven, and that this search did not find it again proves nothing.
        say(f"the earlier result stays: {earlier.changes}")
        return
    save_results(model, add_result(results, kept))
