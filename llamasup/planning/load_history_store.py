"""Loads and saves the history of a model file, in the state folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

from llamasup.errors import FolderUnusable
from llamasup.planning.load_history import LoadHistory, validate
from llamasup.system.storage.fact_cache import FactCache, FileIdentity
from llamasup.system.storage.folders import private_folder, state_folder

__all__ = ["load", "save"]

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


def _store() -> FactCache[LoadHistory]:
    folder = private_folder(state_folder() / "experience")
    return FactCache("model", LoadHistory, revision=_REVISION, folder=folder)
