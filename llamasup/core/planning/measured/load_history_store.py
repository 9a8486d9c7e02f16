"""Loads and saves, in the state folder, the history of a model file, and how long loads by a runtime took."""

from __future__ import annotations

import contextlib
from pathlib import Path

from msgspec.structs import replace

from llamasup.core.planning.measured.load_history import LoadHistory, validate
from llamasup.core.planning.measured.load_times import LoadTimes, add_times, is_possible
from llamasup.core.system.storage.fact_cache import FactCache, FileIdentity
from llamasup.core.system.storage.folders import private_folder, state_folder
from llamasup.errors import FolderUnusable

# Change it when the meaning of an entry changes.
_REVISION = "2"


def load(model_path: Path) -> LoadHistory:
    """The history of this file; empty if it cannot be read."""
    with contextlib.suppress(OSError, FolderUnusable):
        return validate(_store().get(FileIdentity.of(model_path)) or LoadHistory())
    return LoadHistory()


def save(model_path: Path, history: LoadHistory) -> None:
    """Save the history for the next start. The model is served even if the state folder is unusable."""
    with contextlib.suppress(OSError, FolderUnusable):
        _store().put(FileIdentity.of(model_path), history)


def times_of_runtime(program: Path) -> tuple[LoadTimes, ...]:
    """The times of the last loads of all files by this program; empty if they cannot be read."""
    with contextlib.suppress(OSError, FolderUnusable):
        times = _times_store().get(FileIdentity.of(program)) or ()
        return tuple(record for record in times if is_possible(record))
    return ()


def add_times_of_runtime(program: Path, times: LoadTimes) -> None:
    """Add the times of one load. Its size takes the place of the plan, of which another file has its own."""
    with contextlib.suppress(OSError, FolderUnusable):
        records = add_times(times_of_runtime(program), replace(times, key=str(times.weights_bytes)))
        _times_store().put(FileIdentity.of(program), records)


def _times_store() -> FactCache[tuple[LoadTimes, ...]]:
    folder = private_folder(state_folder() / "experience")
    return FactCache("loads", tuple[LoadTimes, ...], revision=_REVISION, folder=folder)


def _store() -> FactCache[LoadHistory]:
    folder = private_folder(state_folder() / "experience")
    return FactCache("model", LoadHistory, revision=_REVISION, folder=folder)
