"""Reports changes in folders, from events of the operating system (inotify, FSEvents, …).

Polls only the identities of the folders themselves, to notice one that is replaced or comes back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from watchfiles._rust_notify import RustNotify

__all__ = ["FolderEvents"]

# Names of unfinished files: their changes are ignored.
_UNFINISHED = (
    *(".part", ".part.json", ".incomplete", ".lock", ".tmp", ".downloadinprogress", ".etag"),
    *(".crdownload", ".!qb"),
)

_MAX_FOLDERS = 4_000  # of the 8,192 watches that a user has on older kernels (fs.inotify.max_user_watches)
_MAX_ENTRIES = 200_000  # some seconds in a home folder


class FolderEvents:
    """For one thread. ``deep`` folders are watched with their subfolders, ``flat`` ones without."""

    def __init__(self, deep: Sequence[Path], flat: Sequence[Path]) -> None:
        self._deep, self._flat = deep, flat
        self._watched: list[RustNotify] = []
        self._identities: dict[Path, tuple[int, int] | None] = {}
        self.reliable = False
        """Whether the system reports all changes; else the caller must poll."""

    def happened(self) -> bool:
        """Whether anything changed since the last call. Takes a millisecond, most of it asleep."""
        identities = {folder: _identity(folder) for folder in (*self._deep, *self._flat)}
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
        for folders, below in ((self._deep, True), (self._flat, False)):
            there = [str(folder) for folder in folders if self._identities[folder] is not None]
            if there and below and not all(map(_can_be_watched, there)):
                self.reliable = False
            elif there:
                self._watch(there, below=below)

    def _watch(self, folders: list[str], *, below: bool) -> None:
        try:
            # watchfiles' own generators poll this 20 times a second.
            from watchfiles._rust_notify import RustNotify

            self._watched.append(RustNotify(folders, False, False, 0, below, True))
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


def _identity(folder: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = folder.stat()
        return status.st_dev, status.st_ino
    return None


def _has_events(watched: RustNotify) -> bool:
    """Take the pending events; a millisecond is the shortest wait."""
    changes = watched.watch(1, 1, 1, None)
    return not isinstance(changes, str) and _concerns(path for _, path in changes)


def _concerns(paths: Iterable[str]) -> bool:
    return any(not path.lower().endswith(_UNFINISHED) for path in paths)
