"""A disk cache of facts that are slow to read from a file, valid until the file changes.

An entry belongs to the file's path, size and modification time. An entry that is missing, stale, corrupt or
unreadable reads as ``None``. An entry that cannot be written is dropped, or raises: ``put`` or ``write``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from llamasup.core.system.storage.folders import atomic_write, cache_folder, open_private
from llamasup.core.system.text import INVALID_JSON, path_text
from llamasup.errors import FolderUnusable

Value = TypeVar("Value")

# One entry per file: about 100 KB for a runtime, a few KB for a model. Far above any real models folder, low
# enough that temporary files (downloads, test runs) cannot fill the disk over the years.
_MAX_ENTRIES = 5_000
# Larger files are not cache entries, unless the cache sets another limit.
_MAX_ENTRY_BYTES = 8 * 1024 * 1024


class FileIdentity(Struct, frozen=True):
    """The state of a file at the time when a fact about it was read."""

    path: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> FileIdentity:
        """Return the identity of the file now, symlinks followed. Raises OSError if it does not exist."""
        resolved = os.path.realpath(path)
        status = os.stat(resolved)  # noqa: PTH116 - a Path costs more than the call, and folders hold 1,000 models
        return cls(resolved, status.st_size, status.st_mtime_ns)

    @classmethod
    def find(cls, path: str | os.PathLike[str]) -> FileIdentity | None:
        """Return the identity of the file now; None if it does not exist, or cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return cls.of(path)
        return None


class _Entry(msgspec.Struct, frozen=True):
    revision: str
    path: str
    size_bytes: int
    mtime_ns: int
    value: msgspec.Raw


def default_cache_folder() -> Path | None:
    """Return ``facts`` in the user's cache folder for llamasup, not created yet; None without such a folder.

    A service without a home and a container with a read-only root have none: they read facts again each time.
    """
    try:
        return cache_folder() / "facts"
    except FolderUnusable:
        return None


class FactCache(Generic[Value]):
    """Values of one type, one per file.

    ``kind`` names the fact and is part of the file name (letters and dashes). ``value_type`` is any type that
    msgspec encodes, such as a frozen Struct. ``revision`` names the code that read the fact: entries of
    another revision are stale, so change it whenever the reader or the type changes.
    """

    def __init__(
        self,
        kind: str,
        value_type: type[Value],
        *,
        revision: str,
        folder: Path | None = None,
        most_bytes: int = _MAX_ENTRY_BYTES,
    ) -> None:
        self._kind = kind
        self._revision = revision
        self._folder = default_cache_folder() if folder is None else folder
        self._most_bytes = most_bytes
        self._decode = msgspec.json.Decoder(value_type).decode
        self._pruned = False

    def get(self, identity: FileIdentity) -> Value | None:
        """Return the fact about this state of the file, or None."""
        if self._folder is None:
            return None
        try:
            entry = msgspec.json.decode(
                _read(self._entry_path(self._folder, identity), self._most_bytes), type=_Entry
            )
            if (entry.revision, entry.path, entry.size_bytes, entry.mtime_ns) != (
                self._revision,
                path_text(identity.path),
                identity.size_bytes,
                identity.mtime_ns,
            ):
                return None
            return self._decode(entry.value)
        except (OSError, *INVALID_JSON):
            return None

    def put(self, identity: FileIdentity, value: Value) -> None:
        """Store the fact, if it can be written. It replaces a fact about an earlier state of the file."""
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            self.write(identity, value)

    def write(self, identity: FileIdentity, value: Value) -> None:
        """Store the fact as ``put`` does, for facts that cannot be read again from the file.

        Raises OSError.
        """
        if self._folder is None:
            return
        entry = _Entry(
            self._revision,
            path_text(identity.path),
            identity.size_bytes,
            identity.mtime_ns,
            msgspec.Raw(msgspec.json.encode(value)),
        )
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(self._entry_path(self._folder, identity), msgspec.json.encode(entry))
        self._prune(self._folder)

    def _entry_path(self, folder: Path, identity: FileIdentity) -> Path:
        digest = hashlib.sha256(os.fsencode(identity.path)).hexdigest()
        return folder / f"{self._kind}-{digest[:32]}.json"

    def _prune(self, folder: Path) -> None:
        """Drop the oldest half of a full folder. Checked once per cache object."""
        if self._pruned:
            return
        self._pruned = True
        with os.scandir(folder) as entries:
            # An unfinished entry has a dot before its name (atomic_write).
            names = [entry.path for entry in entries if re.match(rf"\.?{self._kind}-", entry.name)]
        if len(names) <= _MAX_ENTRIES:
            return
        by_age = sorted((os.lstat(name).st_mtime_ns, name) for name in names)
        for _, name in by_age[: len(by_age) // 2]:
            Path(name).unlink(missing_ok=True)


def _read(path: Path, most_bytes: int) -> bytes:
    with os.fdopen(open_private(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise ValueError(f"{path} is too large for a cache entry")
        return file.read()
