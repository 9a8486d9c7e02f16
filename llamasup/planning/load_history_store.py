"""Reads and writes what loads of a model have measured, in the cache."""

from __future__ import annotations

import contextlib
from pathlib import Path

from llamasup.errors import FolderUnusable
from llamasup.planning.load_history import LoadHistory, validate
from llamasup.system.storage.fact_cache import FactCache, FileIdentity
from llamasup.system.storage.folders import private_folder, state_folder

__all__ = ["recall", "record"]

# Change it when the meaning of what is kept changes.
_REVISION = "2"


def recall(model_path: Path) -> LoadHistory:
    """What is known of this very file; nothing where nothing could be read."""
    with contextlib.suppress(OSError, FolderUnusable):
        return validate(_store().get(FileIdentity.of(model_path)) or LoadHistory())
    return LoadHistory()


def record(model_path: Path, history: LoadHistory) -> None:
    """Keep it for the next start. Without a place to keep it the model is served all the same."""
    with contextlib.suppress(OSError, FolderUnusable):
        _store().put(FileIdentity.of(model_path), history)


def _store() -> FactCache[LoadHistory]:
    folder = private_folder(state_folder() / "experience")
    return FactCache("model", LoadHistory, revision=_REVISION, folder=folder)
