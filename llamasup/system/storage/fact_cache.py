"""Facts that were costly to read from a file, kept on disk until the file changes.

A cache entry is bound to the file's path, size and modification time. The cache decides nothing and is never
an error: an entry that is missing, stale, corrupt or unreadable reads as ``None``, and one that cannot be
written is not written. What it holds can always be read again from the file itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from llamasup.errors import FolderUnusable
from llamasup.system.storage.folders import cache_folder
from llamasup.system.text import INVALID_JSON

__all__ = ["FactCache", "FileIdentity", "default_cache_folder"]

Value = TypeVar("Value")

# One entry a file: about 100 KB for a runtime, a few KB for a model. Far above any real models folder, low
# enough that files which come and go (downloads, test runs) cannot fill the disk over the years.
_MAX_ENTRIES = 5_000
# An entry that is larger is not one of ours, unless its cache says so.
_MAX_ENTRY_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file as it was when a fact about it was read."""

    path: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> FileIdentity:
        """The identity of the file now, symbolic links followed. Raises OSError where there is none."""
        resolved = os.path.realpath(path)
        status = os.stat(resolved)  # noqa: PTH116 - a Path costs more than the call, and folders hold 1,000 models
        return cls(resolved, status.st_size, status.st_mtime_ns)


class _Entry(msgspec.Struct, frozen=True):
    revision: str
    path: str
    size_bytes: int
    mtime_ns: int
    value: msgspec.Raw


def default_cache_folder() -> Path | None:
    """``facts`` in the user's cache folder for llamasup, not created yet; None where there can be none.

    A service without a home, or a container with a read-only root: facts are then read anew each time.
    """
    try:
        return cache_folder() / "facts"
    except FolderUnusable:
        return None


class FactCache(Generic[Value]):
    """Values of one type, one per file.

    ``kind`` names the fact and is part of the file's name (letters and dashes). ``value_type`` is anything
    that msgspec encodes, frozen dataclasses included. ``revision`` names the code that read the fact: entries
    of another revision are stale, so change it whenever the reader or the type changes.
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
        """The fact about exactly this state of the file, or None."""
        if self._folder is None:
            return None
        try:
            entry = msgspec.json.decode(
                _read_own_file(self._entry_path(self._folder, identity), self._most_bytes), type=_Entry
            )
            if (entry.revision, entry.path, entry.size_bytes, entry.mtime_ns) != (
                self._revision,
                _printable(identity.path),
                identity.size_bytes,
                identity.mtime_ns,
            ):
                return None
            return self._decode(entry.value)
        except (OSError, *INVALID_JSON):
            return None

    def put(self, identity: FileIdentity, value: Value) -> None:
        """Keep the fact, in place of what was known about an earlier state of the file."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            entry = _Entry(
                self._revision,
                _printable(identity.path),
                identity.size_bytes,
                identity.mtime_ns,
                msgspec.Raw(msgspec.json.encode(value)),
            )
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self._entry_path(self._folder, identity), msgspec.json.encode(entry))
            self._prune(self._folder)

    def _entry_path(self, folder: Path, identity: FileIdentity) -> Path:
        digest = hashlib.sha256(os.fsencode(identity.path)).hexdigest()
        return folder / f"{self._kind}-{digest[:32]}.json"

    def _prune(self, folder: Path) -> None:
        """Drop the oldest half once the folder is full; looked at once in the cache's life."""
        if self._pruned:
            return
        self._pruned = True
        with os.scandir(folder) as entries:
            names = [entry.path for entry in entries if entry.name.startswith(f"{self._kind}-")]
        if len(names) <= _MAX_ENTRIES:
            return
        by_age = sorted((os.lstat(name).st_mtime_ns, name) for name in names)
        for _, name in by_age[: len(by_age) // 2]:
            Path(name).unlink(missing_ok=True)


def _printable(path: str) -> str:
    """A path with bytes outside UTF-8 (surrogates in Python) as text that JSON can hold."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _read_own_file(path: Path, most_bytes: int) -> bytes:
    """The bytes of a regular file of this user; a symbolic link is not followed (X13)."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
            raise ValueError(f"{path} is not a cache entry")
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            raise ValueError(f"{path} belongs to user {status.st_uid}")
        return file.read()


def _replace(path: Path, content: bytes) -> None:
    """Write ``path`` (0600) in one step: readers see the old entry or the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
