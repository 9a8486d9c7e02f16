"""Keeps unfinished searches in the state folder, and lets only one tuning of a model run at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from llamasup.core.planning.measured.tuned_store import tuning_folder
from llamasup.core.system.storage.fact_cache import FactCache, FileIdentity
from llamasup.core.system.storage.folders import Claimed, claim_file
from llamasup.errors import FolderUnusable, TuningFailed
from llamasup.features.tuning.session import SavedSearch

# Change it when the meaning of an entry changes.
_REVISION = "2"


class _Stored(msgspec.Struct, frozen=True):
    """``search`` is None after the end of a search."""

    search: SavedSearch | None


def saved_search(model: FileIdentity) -> SavedSearch | None:
    """The unfinished search of this state of the file; None without one, or if it cannot be read."""
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
            remedy="Wait for its end, or stop it with Ctrl-C. What it has measured is not lost.",
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
