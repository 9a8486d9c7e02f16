"""Saved slots on the disk: files that llama-server writes and reads, and a list for each set of them.

They hold conversations: the folder is 0700, each file 0600, nothing is kept longer than its model's files
stay as they are, and what is taken up is removed. A set counts once its list is there, which is written last.
Nothing is synced: after a power cut a checksum fails, and the slot starts empty. All of it blocks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from llamasup.errors import FolderUnusable
from llamasup.gguf.files import split_name, split_paths
from llamasup.llama_server.slots.flags import SlotHome
from llamasup.llama_server.slots.policy import (
    MAX_BYTES,
    STRAY_AFTER_S,
    FileState,
    KeptSlots,
    SavedSet,
    SavedSlot,
    file_name,
    is_current,
    is_ours,
    list_name,
    to_drop,
)
from llamasup.system.storage.fact_cache import FileIdentity
from llamasup.system.storage.folders import atomic_write, cache_folder, open_private, private_folder
from llamasup.system.text import INVALID_JSON

__all__ = ["SlotStore", "Taken", "slot_home", "sweep_slots"]

_LIST = msgspec.json.Decoder(SavedSet)
# Of a few hundred slots; a longer one is not ours.
_MAX_LIST_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20


def slot_home(model: Path, words: Iterable[str], *, make: bool) -> SlotHome | None:
    """Where slots of a server of ``model`` are kept, and what it is started from: its parts, and each file
    that its other ``words`` name. ``make``: llama-server (b11434) does not start where the folder is missing.
    None: nowhere.
    """
    try:
        folder = cache_folder() / "slots"
        if make:
            private_folder(folder)
    except FolderUnusable:
        return None
    paths = dict.fromkeys((*_parts_of(model), *(path for word in words for path in _paths_in(word))))
    states = map(_state_of, paths)
    return SlotHome(str(folder), tuple(state for state in states if state is not None))


def _paths_in(word: str) -> list[str]:
    """Also ``a.gguf,b.gguf`` and ``a.gguf:0.5,b.gguf``, as LoRAs are given."""
    pieces = [word, *word.split(",")]
    pieces += [piece.rpartition(":")[0] for piece in pieces]
    return [piece for piece in pieces if Path(piece).is_absolute()]


def _parts_of(model: Path) -> list[str]:
    name = split_name(model.name)
    if name is None or name.number != 1:
        return [str(model)]
    count = int(name.first.removesuffix(".gguf").rpartition("-")[2])
    return [str(path) for path in split_paths(model, count)]


def sweep_slots() -> None:
    """Remove what no model can take up any more: call it where model files were removed."""
    with contextlib.suppress(FolderUnusable):
        folder = cache_folder() / "slots"
        if folder.exists():
            SlotStore(folder).sweep()


def _state_of(path: str) -> FileState | None:
    try:
        identity = FileIdentity.of(path)
    except (OSError, ValueError):
        return None
    return path, identity.size_bytes, identity.mtime_ns


@dataclass(frozen=True, slots=True)
class Taken:
    """``damaged``: how many slots of the set were not as they had been saved."""

    saved: SavedSet
    damaged: int


class SlotStore:
    """``most_bytes``: of all sets together. It may be exceeded by files that are being written."""

    def __init__(self, folder: Path, most_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes

    # --- saving -----------------------------------------------------------------------------------

    def new_set(self, kept: KeptSlots) -> SavedSet:
        """A set without slots. Raises FolderUnusable."""
        private_folder(self._folder)
        self.sweep()
        self._make_room(0)  # for less than before, maybe
        return SavedSet(kept.key, secrets.token_hex(8), time.time_ns(), kept.files, ())

    def added(self, saved: SavedSet, number: int, tokens: int) -> SavedSet | None:
        """The set with the slot whose file has just been written; None where there is no room for it.

        Raises OSError, or ValueError for what is no file of ours; the file is gone then, as without room.
        """
        name = file_name(saved.key, saved.token, number)
        try:
            with self._opened(name) as fd:
                if hasattr(os, "fchmod"):
                    os.fchmod(fd, 0o600)  # llama-server leaves that to its umask
                size_bytes, crc32 = _checksum(fd)
        except (OSError, ValueError):
            self._remove(name)
            raise
        more = replace(saved, slots=(*saved.slots, SavedSlot(number, name, tokens, size_bytes, crc32)))
        if more.size_bytes > self._most_bytes:
            self._remove(name)
            return None
        self._make_room(more.size_bytes)
        return more

    def keep(self, saved: SavedSet) -> None:
        """From now on it can be taken up. Raises OSError; its files are gone then."""
        try:
            content = msgspec.json.encode(saved)
            atomic_write(self._folder / list_name(saved.key, saved.token), content)
        except OSError:
            self.discard(saved)
            raise
        self._make_room(0)  # another model's may have come meanwhile

    def remove_unfinished(self, saved: SavedSet, number: int) -> None:
        """The file of a slot that was not saved, or not to its end."""
        self._remove(file_name(saved.key, saved.token, number))

    # --- taking up --------------------------------------------------------------------------------

    def take(self, key: str) -> Taken | None:
        """The newest set for this plan, which then is nobody else's, now or later: whatever comes of it.

        A server that it crashes is so started without it the next time.
        """
        self.sweep()
        fitting = [saved for saved in self._sets() if saved.key == key]
        for saved in sorted(fitting, key=lambda each: each.saved_ns, reverse=True):
            try:
                (self._folder / list_name(saved.key, saved.token)).unlink()
            except OSError:
                continue  # another one was quicker
            sound = tuple(slot for slot in saved.slots if self._is_sound(slot))
            for slot in set(saved.slots) - set(sound):
                self._remove(slot.name)
            return Taken(replace(saved, slots=sound), len(saved.slots) - len(sound))
        return None

    def discard(self, saved: SavedSet) -> None:
        for slot in saved.slots:
            self._remove(slot.name)

    def _is_sound(self, slot: SavedSlot) -> bool:
        try:
            with self._opened(slot.name) as fd:
                os.utime(fd if os.utime in os.supports_fd else self._folder / slot.name)  # no stray one now
                return _checksum(fd) == (slot.size_bytes, slot.crc32)
        except (OSError, ValueError):
            return False

    # --- tidying ----------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Remove sets whose model's files have changed or gone, and files that no list names."""
        sets = list(self._sets())
        gone = [saved for saved in sets if not is_current(saved, _state_of)]
        self._drop(gone)
        named = {slot.name for saved in sets for slot in saved.slots}
        named |= {list_name(saved.key, saved.token) for saved in sets}
        for path in self._entries():
            if path.name not in named:
                with contextlib.suppress(OSError):
                    if time.time_ns() - path.lstat().st_mtime_ns > STRAY_AFTER_S * 1e9:
                        path.unlink()

    def _make_room(self, size_bytes: int) -> None:
        self._drop(to_drop(list(self._sets()), self._most_bytes - size_bytes))

    def _drop(self, sets: Sequence[SavedSet]) -> None:
        for saved in sets:
            # The list first: files without one are nothing, a list without files is a disappointment.
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
            # What is to be removed or read is named in it: nothing but files of ours.
            names = {list_name(saved.key, saved.token), *(slot.name for slot in saved.slots)}
            if path.name in names and all(map(is_ours, names)):
                yield saved

    def _entries(self) -> list[Path]:
        try:
            return [path for path in self._folder.iterdir() if is_ours(path.name)]
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
    """Length and CRC-32 of all that is in it: 7 GB/s, and it need not stand up to anybody."""
    size_bytes = crc32 = 0
    while piece := os.read(fd, _PIECE_BYTES):
        size_bytes += len(piece)
        crc32 = zlib.crc32(piece, crc32)
    return size_bytes, crc32
