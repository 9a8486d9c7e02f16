"""Loads and saves in the state folder what was measured on this machine.

Each model file has a history of its loads and its results of ``llamasup tune``. Each program has the times of
the loads of all files.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from llamasup.core.planning.measured.load_history import LoadHistory, validate
from llamasup.core.planning.measured.load_times import LoadTimes, add_times, is_possible
from llamasup.core.planning.measured.tuned import KeptResults
from llamasup.core.system.storage.fact_cache import FactCache, FileIdentity
from llamasup.core.system.storage.folders import private_folder, state_folder
from llamasup.errors import FolderUnusable

T = TypeVar("T")
# Change one when the meaning of its entries changes.
_LOADS_REVISION = "2"
_RESULTS_REVISION = "2"


def load_history(model_path: Path) -> LoadHistory:
    """Load the history of this file; empty if it cannot be read."""
    with contextlib.suppress(OSError, FolderUnusable):
        return validate(_store("model", LoadHistory).get(FileIdentity.of(model_path)) or LoadHistory())
    return LoadHistory()


def save_history(model_path: Path, history: LoadHistory) -> None:
    """Save the history for the next start. The model is served even if the state folder is unusable."""
    with contextlib.suppress(OSError, FolderUnusable):
        _store("model", LoadHistory).put(FileIdentity.of(model_path), history)


def times_of_runtime(program: Path) -> tuple[LoadTimes, ...]:
    """Load the times of the last loads of all files by this program; empty if they cannot be read."""
    with contextlib.suppress(OSError, FolderUnusable):
        times = _store("loads", tuple[LoadTimes, ...]).get(FileIdentity.of(program)) or ()
        return tuple(record for record in times if is_possible(record))
    return ()


def add_times_of_runtime(program: Path, times: LoadTimes) -> None:
    """Add the times of one load. Its size takes the place of the plan, of which another file has its own."""
    with contextlib.suppress(OSError, FolderUnusable):
        records = add_times(times_of_runtime(program), replace(times, key=str(times.weights_bytes)))
        _store("loads", tuple[LoadTimes, ...]).put(FileIdentity.of(program), records)


def _store(kind: str, value_type: type[T]) -> FactCache[T]:
    folder = private_folder(state_folder() / "experience")
    return FactCache(kind, value_type, revision=_LOADS_REVISION, folder=folder)


def load_results(model: FileIdentity) -> KeptResults:
    """Load the results of this state of the file; empty if there are none, or if they cannot be read."""
    with contextlib.suppress(FolderUnusable):
        return _results_store().get(model) or KeptResults()
    return KeptResults()


def save_results(model: FileIdentity, results: KeptResults) -> None:
    """Save the results of the file as it was when it was measured. Raises FolderUnusable."""
    folder = tuning_folder()
    try:
        _results_store().write(model, results)
    except OSError as error:
        raise FolderUnusable(
            f"{folder}: the results of tuning cannot be saved: {error.strerror}",
            remedy="Free space on this disk, or make the folder writable, and repeat the command.",
        ) from None


def tuning_folder() -> Path:
    """Make the folder of the results, the unfinished searches and their locks. Raises FolderUnusable."""
    return private_folder(state_folder() / "tuning")


def _results_store() -> FactCache[KeptResults]:
    return FactCache("tuned", KeptResults, revision=_RESULTS_REVISION, folder=tuning_folder())
