"""Whether something happens in folders: asked from time to time, told by the system (inotify, FSEvents, …).

Nothing here polls files, except that a folder which is replaced or comes back is noticed by its own identity.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llamasup.system.storage.folders import file_id

if TYPE_CHECKING:
    from watchfiles._rust_notify import RustNotify

__all__ = ["FolderEvents"]

# Names that programs write under until a file is whole: what happens to them concerns nobody.
_UNFINISHED = (
    *(".part", ".part.json", ".incomplete", ".lock", ".tmp", ".downloadinprogress", ".etag"),
    *(".crdownload", ".!qb"),
)

_MAX_FOLDERS = 4_000  # of the 8,192 watches that a user has on older kernels (fs.inotify.max_user_watches)
_MAX_ENTRIES = 200_000  # as for listing: some seconds of a home folder


class FolderEvents:
    """Owned by one thread. ``deep`` folders count with all that is below them, ``flat`` ones alone."""

    def __init__(self, deep: Sequence[Path], flat: Sequence[Path]) -> None:
        self._deep, self._flat = deep, flat
        self._watched: list[RustNotify] = []
        self._identities: dict[Path, tuple[int, int] | None] = {}
        self.reliable = False
        """Whether the system tells what happens; else one has to look."""

    def happened(self) -> bool:
        """Whether anything did since the last call. Takes a millisecond, most of it asleep."""
        identities = {folder: file_id(folder, follow=True) for folder in (*self._deep, *self._flat)}
        if identities != self._identities:
            self._identities = identities
            self._watch_again()
            return True
        told = [_is_told(each) for each in self._watched]  # all of them: each is to be emptied
        return any(told)

    def close(self) -> None:
        for each in self._watched:
            each.close()
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
            # watchfiles' own generators sleep and look 20 times a second; this is what they look at.
            from watchfiles._rust_notify import RustNotify

            self._watched.append(RustNotify(folders, False, False, 0, below, True))
        except (ImportError, OSError, RuntimeError, UnicodeEncodeError):
            # RuntimeError is WatchfilesRustInternalError. No more watches (fs.inotify.max_user_watches), or
            # none at all; or a path that is no UTF-8, which the library does not take.
            self.reliable = False


def _can_be_watched(top: str) -> bool:
    """Whether it has so few folders that each can be watched, and no link to one: the library follows links
    wherever they lead, and watches a whole disk if one leads to its root.
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


def _is_told(watched: RustNotify) -> bool:
    """Empties what has gathered; a millisecond is the shortest that it waits."""
    changes = watched.watch(1, 1, 1, None)
    return not isinstance(changes, str) and _concerns(path for _, path in changes)


def _concerns(paths: Iterable[str]) -> bool:
    return any(not path.lower().endswith(_UNFINISHED) for path in paths)
