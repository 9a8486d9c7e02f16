"""Lists the models of a folder and its subfolders, with one cache entry for the whole list.

The depth, the number of entries and the number of models are bounded. No folder is entered twice (circular
links), and no file system with kernel state. A broken file is listed with its error.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from msgspec import Struct, field

from llamasup.core.gguf.files import REVISION, CachedFacts, os_errors_of, read_uncached, split_name
from llamasup.core.models.found import FileState, FoundModel
from llamasup.core.system.hardware.probe import system_text
from llamasup.core.system.native import native
from llamasup.core.system.storage.fact_cache import FactCache, FileIdentity, default_cache_folder
from llamasup.errors import LlamasupError

# Not tmpfs: users put models into /dev/shm for fast loads.
_PSEUDO = frozenset(
    {"proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "securityfs", "selinuxfs", "smackfs"}
    | {"debugfs", "tracefs", "configfs", "pstore", "efivarfs", "bpf", "nsfs", "mqueue", "hugetlbfs"}
    | {"fusectl", "binfmt_misc", "rpc_pipefs", "nfsd", "resctrl"}
)


def pseudo_devices(mountinfo: str) -> frozenset[tuple[int, int]]:
    """Return the device numbers of file systems with kernel state in /proc/self/mountinfo (proc(5)).

    Ignores invalid lines.
    """
    found = set()
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        number = re.match(r"\S+\s+\S+\s+(\d{1,9}):(\d{1,9})(?!\S)", before.strip())
        if number and (after.split() or [""])[0] in _PSEUDO:
            found.add((int(number[1]), int(number[2])))
    return frozenset(found)


# ~/.cache/huggingface/hub/models--ORG--REPO/snapshots/COMMIT/QUANT/x.gguf is six levels below ~/.cache.
_MAX_DEPTH = 6
_MAX_ENTRIES = 200_000  # some seconds in a home folder
_MAX_MODELS = 5_000  # the facts of one take up to 5 KB in the cache
_MAX_NOTES = 3
_MAX_INDEX_BYTES = 32 * 1024 * 1024


class ModelFolder(Struct, frozen=True):
    """The models of a folder, omissions and their reasons (``notes``), unreadable subfolders (``closed``)."""

    models: tuple[FoundModel, ...]
    notes: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()


class _Indexed(Struct, frozen=True):
    size_bytes: int
    mtime_ns: int
    remembered: CachedFacts


def list_models(folder: Path, *, deepest: int = _MAX_DEPTH) -> ModelFolder:
    """List every .gguf file in ``folder`` and its subfolders that is not hidden, sorted by path.

    Raises ModelMissing if the folder cannot be read.
    """
    with os_errors_of(folder):
        walk = _Walk(pseudo_devices(system_text(Path("/proc/self/mountinfo"))), deepest)
        paths = walk.models_in(folder)
    cache = _cache(default_cache_folder())
    # A list stays valid as long as its files do; the times of the folder say little about them.
    identity = FileIdentity(os.path.realpath(folder), 0 if deepest else -2, 0)
    known = cache.get(identity) or {}
    kept: dict[str, _Indexed] = {}
    real_folders = _RealFolders()
    models = tuple(_read_entry(path, known, kept, real_folders) for path in sorted(paths, key=str.casefold))
    if kept != known:
        cache.put(identity, kept)
    return ModelFolder(models, walk.notes, tuple(walk.closed))


def look_at(path: Path) -> FoundModel:
    """Read the model at ``path``, or the split set that it is a part of."""
    part = split_name(path.name)
    if part is not None:
        path = path.with_name(part.first)
    cache = _cache(default_cache_folder())
    identity = FileIdentity(str(path), -1, 0)
    known, kept = cache.get(identity) or {}, dict[str, _Indexed]()
    found = _read_entry(str(path), known, kept, _RealFolders())
    if kept != known:
        cache.put(identity, kept)
    return found


class _RealFolders:
    """Real paths of files, with a cache of folders: ``realpath`` of a path of five levels costs ten calls."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def file(self, path: str) -> str:
        if os.path.islink(path):  # noqa: PTH114 - as below
            return os.path.realpath(path)
        folder, name = os.path.split(path)
        real = self._of.get(folder)
        if real is None:
            real = self._of[folder] = os.path.realpath(folder)
        return os.path.join(real, name)  # noqa: PTH118 - as below


def _read_entry(
    path: str, known: dict[str, _Indexed], kept: dict[str, _Indexed], real_folders: _RealFolders
) -> FoundModel:
    """The model at ``path``, from ``known`` if its files are unchanged; adds it to ``kept``."""
    key = os.fsencode(path).decode("utf-8", "backslashreplace")
    entry = known.get(key)
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path costs more than the call, and folders hold 1,000 models
    except OSError:
        status = None  # read_anew raises the precise error
    if entry is None or status is None or not _is_current(entry, status):
        try:
            remembered = read_uncached(Path(path))
        except LlamasupError as error:
            return FoundModel(path, error, _states(path, status, real_folders))
        if status is None:  # the file came back just now
            return FoundModel(path, remembered.facts)
        entry = _Indexed(status.st_size, status.st_mtime_ns, remembered)
    kept[key] = entry
    files = (*_states(path, status, real_folders), *entry.remembered.parts)
    return FoundModel(path, entry.remembered.facts, files)


def _states(path: str, status: os.stat_result | None, real_folders: _RealFolders) -> tuple[FileState, ...]:
    return () if status is None else ((real_folders.file(path), status.st_size, status.st_mtime_ns),)


def _is_current(entry: _Indexed, status: os.stat_result) -> bool:
    return (
        (entry.size_bytes, entry.mtime_ns) == (status.st_size, status.st_mtime_ns)
        and stat.S_ISREG(status.st_mode)
        and entry.remembered.is_current()
    )


@lru_cache(maxsize=8)
def _cache(folder: Path | None) -> FactCache[dict[str, _Indexed]]:
    return FactCache(
        "folder", dict[str, _Indexed], revision=REVISION, folder=folder, most_bytes=_MAX_INDEX_BYTES
    )


# --- finding files -------------------------------------------------------------------------------


class _Walk(Struct):
    """One walk through folders, for one call of ``list_models``."""

    pseudo: frozenset[tuple[int, int]]
    deepest: int
    _stopped: str = ""
    _too_deep: bool = False
    closed: dict[str, str] = field(default_factory=dict[str, str])
    """Folder → why it cannot be read."""
    _seen_folders: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    _entries: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """The omissions, in a few lines."""
        shown = [f"{folder} was skipped: {why}" for folder, why in self.closed.items()][:_MAX_NOTES]
        more = len(self.closed) - _MAX_NOTES
        were = "folder was" if more == 1 else "folders were"
        return (
            *shown,
            *([f"{more} more {were} skipped"] if more > 0 else []),
            *([f"folders more than {self.deepest} levels down were skipped"] if self._too_deep else []),
            *filter(None, [self._stopped]),
        )

    def models_in(self, top: Path) -> list[str]:
        """Paths of models. Raises OSError if ``top`` itself cannot be listed."""
        paths: list[str] = []
        os.scandir(top).close()
        waiting = [(str(top), 0)]
        while waiting:
            folder, depth = waiting.pop()
            names: set[str] = set()
            for entry in self._entries_of(folder):
                if self._entries >= _MAX_ENTRIES or len(paths) + len(names) >= _MAX_MODELS:
                    found = len(paths) + len(names)
                    self._stopped = f"stopped after {self._entries:,} names and {found:,} models"
                    return [*paths, *_whole_models(folder, names)]
                self._entries += 1
                if entry.name.startswith("."):
                    continue
                if self._is_folder(entry):
                    if depth < self.deepest:
                        waiting.append((entry.path, depth + 1))
                    else:
                        self._too_deep = True
                elif entry.name.lower().endswith(".gguf"):
                    names.add(entry.name)
            paths += _whole_models(folder, names)
        top.stat()  # raises if the folder disappeared meanwhile: its models are not known to be gone
        return paths

    def _entries_of(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """The entries of a folder; none if it was seen before or cannot be listed."""
        try:
            status = os.stat(folder)  # noqa: PTH116 - as above
            if (status.st_dev, status.st_ino) in self._seen_folders:
                return
            if self.pseudo and native.device_numbers(status.st_dev) in self.pseudo:
                return
            self._seen_folders.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                yield from entries
        except FileNotFoundError:
            return  # it was removed just now
        except OSError as error:
            self.closed[folder] = error.strerror or str(error)

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        try:
            return entry.is_dir()
        except OSError as error:  # a file with a model's name gets its error when it is read
            if error.errno != errno.ELOOP and not entry.name.lower().endswith(".gguf"):
                self.closed[entry.path] = error.strerror or str(error)
            return False


def _whole_models(folder: str, names: set[str]) -> Iterator[str]:
    """Replace a split set by its first part, even if only that part is missing."""
    parts = {name: split_name(name) for name in names}
    for name in {name if part is None else part.first for name, part in parts.items()}:
        yield os.path.join(folder, name)  # noqa: PTH118 - as above
