"""Loads and saves the results of ``llamasup tune`` for a model file, in the state folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

from llamasup.core.planning.measured.tuned import KeptResults
from llamasup.core.system.native import native
from llamasup.core.system.storage.fact_cache import FactCache, FileIdentity
from llamasup.core.system.storage.folders import private_folder, state_folder
from llamasup.errors import FolderUnusable

# Change it when the meaning of an entry changes.
_REVISION = "2"


def load_results(model: FileIdentity) -> KeptResults:
    """The results of this state of the file; empty if there are none, or if they cannot be read."""
    with contextlib.suppress(FolderUnusable):
        return _store().get(model) or KeptResults()
    return KeptResults()


def save_results(model: FileIdentity, results: KeptResults) -> None:
    """Save the results of the file as it was when it was measured. Raises FolderUnusable."""
    folder = tuning_folder()
    try:
        _store().write(model, results)
    except OSError as error:
        raise FolderUnusable(
            f"{folder}: the results of tuning cannot be saved: {error.strerror}",
            remedy="Free space there, or make the folder writable, and repeat the command.",
        ) from None


def tuning_folder() -> Path:
    """The folder of the results, the unfinished searches and their locks. Raises FolderUnusable."""
    return private_folder(state_folder() / "tuning")


def cpu_name() -> str:
    """The name of the processor; empty if the system does not report it."""
    return native.cpu_name()


def _store() -> FactCache[KeptResults]:
    return FactCache("tuned", KeptResults, revision=_REVISION, folder=tuning_folder())
