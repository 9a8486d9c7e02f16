"""Saved slots on the disk: files that llama-server writes and reads, and a list file for each set.

They contain conversations: the folder has mode 0700 and each file 0600, a set is removed once its model's
files change, and a restored set is removed. A set is valid once its list is written, which is the last step.
Nothing is synced: after a power cut a checksum fails, and the slot starts empty. All functions block.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.gguf.files import parts_of
from llamasup.core.llama_server.slots.policy import (
    STRAY_AFTER_S,
    FileState,
    KeptSlots,
    SavedSet,
    SavedSlot,
    SlotHome,
    file_name,
    is_current,
    is_slot_file,
    list_name,
    sets_to_remove,
)
from llamasup.core.settings.model import SLOTS_BYTES
from llamasup.core.system.native import native
from llamasup.core.system.storage.fact_cache import FileIdentity
from llamasup.core.system.storage.folders import atomic_write, cache_folder, open_private, private_folder
from llamasup.core.system.text import INVALID_JSON
from llamasup.errors import FolderUnusable

_LIST = msgspec.json.Decoder(SavedSet)
# Enough for a few hundred slots.
_MAX_LIST_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20


def slot_home(model: Path, words: Iterable[str], *, make: bool) -> SlotHome | None:
    """Return the slot folder, with the files that a server of ``model`` is started from: its parts, and each
    file in the ``words`` of its command line. None if there is no usable folder. ``make``: create the
    folder, without which llama-server (b11434) does not start.
    """
    try:
        folder = cache_folder() / "slots"
        if make:
            private_folder(folder)
    except FolderUnusable:
        return None
    paths = dict.fromkeys((*map(str, parts_of(model)), *(path for word in words for path in _paths_in(word))))
    states = map(_state_of, paths)
    return SlotHome(str(folder), tuple(state for state in states if state is not None))


def _paths_in(word: str) -> list[str]:
    """Return the path, and the paths in ``a.gguf,b.gguf`` and ``a.gguf:0.5,b.gguf``, as in LoRA options."""
    pieces = [word, *word.split(",")]
    pieces += [piece.rpartition(":")[0] for piece in pieces]
    return [piece for piece in pieces if os.path.isabs(piece)]  # noqa: PTH117


def sweep_slots() -> None:
    """Remove sets whose model is gone. Call it after model files were removed."""
    with contextlib.suppress(FolderUnusable):
        folder = cache_folder() / "slots"
        if folder.exists():
            SlotStore(folder).sweep()


def _state_of(path: str) -> FileState | None:
    found = FileIdentity.find(path)
    return None if found is None else (path, found.size_bytes, found.mtime_ns)


class Taken(Struct, frozen=True):
    """A set to restore. ``damaged``: how many of its slots had changed and were removed."""

    saved: SavedSet
    damaged: int


class SlotStore:
    """The saved slots in one folder.

    ``most_bytes``: the limit for all sets. Files that are being written may exceed it.
    """

    def __init__(self, folder: Path, most_bytes: int = SLOTS_BYTES) -> None:
        self._folder = folder
        self.most_bytes = most_bytes

    # --- saving -----------------------------------------------------------------------------------

    def new_set(self, kept: KeptSlots) -> SavedSet:
        """Begin a set without slots. Raises FolderUnusable."""
        private_folder(self._folder)
        self.sweep()
        self._make_room(0)  # the limit may be lower than before
        return SavedSet(kept.key, secrets.token_hex(8), time.time_ns(), kept.files, ())

    def add(self, saved: SavedSet, number: int, tokens: int) -> SavedSet | None:
        """Add the slot whose file llama-server has just written; None if it exceeds the limit.

        Raises OSError, also if it is not a regular file of this user, and then removes the file.
        """
        name = file_name(saved.key, saved.token, number)
        try:
            with self._opened(name) as fd:
                native.set_mode(fd, 0o600)  # llama-server's umask may allow more
                size_bytes, crc32 = _checksum(fd)
        except (OSError, ValueError):
            self._remove(name)
            raise
        larger = replace(saved, slots=(*saved.slots, SavedSlot(number, name, tokens, size_bytes, crc32)))
        if larger.size_bytes > self.most_bytes:
            self._remove(name)
            return None
        self._make_room(larger.size_bytes)
        return larger

    def commit(self, saved: SavedSet) -> None:
        """Write the list, which makes the set valid. Raises OSError after removing the set's files."""
        try:
            content = msgspec.json.encode(saved)
            atomic_write(self._folder / list_name(saved.key, saved.token), content)
        except OSError:
            self.discard(saved)
            raise
        self._make_room(0)  # another model may have saved slots meanwhile

    def remove_unfinished(self, saved: SavedSet, number: int) -> None:
        """Remove the file of a slot that was not saved completely."""
        self._remove(file_name(saved.key, saved.token, number))

    # --- restoring --------------------------------------------------------------------------------

    def take(self, key: str) -> Taken | None:
        """Take the newest set for this plan. It cannot be taken again, so if it crashes the server, the next
        start is without it.
        """
        self.sweep()
        matching = [saved for saved in self._sets() if saved.key == key]
        for saved in sorted(matching, key=lambda saved: saved.saved_ns, reverse=True):
            try:
                (self._folder / list_name(saved.key, saved.token)).unlink()
            except OSError:
                continue  # another process has taken it
            intact = tuple(slot for slot in saved.slots if self._is_intact(slot))
            for slot in set(saved.slots) - set(intact):
                self._remove(slot.name)
            return Taken(replace(saved, slots=intact), len(saved.slots) - len(intact))
        return None

    def discard(self, saved: SavedSet) -> None:
        for slot in saved.slots:
            self._remove(slot.name)

    def _is_intact(self, slot: SavedSlot) -> bool:
        try:
            with self._opened(slot.name) as fd:
                os.utime(fd if os.utime in os.supports_fd else self._folder / slot.name)  # not stray
                return _checksum(fd) == (slot.size_bytes, slot.crc32)
        except (OSError, ValueError):
            return False

    # --- removing ---------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Remove sets whose model's files have changed or are gone, and old files that are in no list."""
        sets = list(self._sets())
        outdated = [saved for saved in sets if not is_current(saved, _state_of)]
        self._remove_sets(outdated)
        named = {slot.name for saved in sets for slot in saved.slots}
        named |= {list_name(saved.key, saved.token) for saved in sets}
        for path in self._entries():
            if path.name not in named:
                with contextlib.suppress(OSError):
                    if time.time_ns() - path.lstat().st_mtime_ns > STRAY_AFTER_S * 1e9:
                        path.unlink()

    def _make_room(self, size_bytes: int) -> None:
        self._remove_sets(sets_to_remove(list(self._sets()), self.most_bytes - size_bytes))

    def _remove_sets(self, sets: Sequence[SavedSet]) -> None:
        for saved in sets:
            # The list first: without it the files are invalid.
            self._remove(list_name(saved.key, saved.token))
            self.discard(saved)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()

    def _sets(self) -> Iterator[SavedSet]:
        for path in self._entries():
            if path.suffix != ".json":
                continue
            try:
                with self._opened(path.name) as fd:
                    saved = _LIST.decode(os.read(fd, _MAX_LIST_BYTES))
            except (OSError, *INVALID_JSON):
                continue
            # The list names files to read and remove: accept only names of saved slots.
            names = {list_name(saved.key, saved.token), *(slot.name for slot in saved.slots)}
            if path.name in names and all(map(is_slot_file, names)):
                yield saved

    def _entries(self) -> list[Path]:
        try:
            return [path for path in self._folder.iterdir() if is_slot_file(path.name)]
        except OSError:
            return []

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """A file of this user; a symlink is not followed (X13). Raises OSError."""
        fd = open_private(self._folder / name)
        try:
            yield fd
        finally:
            os.close(fd)


def _checksum(fd: int) -> tuple[int, int]:
    """Length and CRC-32 (7 GB/s), against damage but not against an attacker."""
    size_bytes = crc32 = 0
    while piece := os.read(fd, _PIECE_BYTES):
        size_bytes += len(piece)
        crc32 = zlib.crc32(piece, crc32)
    return size_bytes, crc32
