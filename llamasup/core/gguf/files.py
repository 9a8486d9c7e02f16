"""Reads and caches the facts of a model file, and reports files that cannot be read.

It reads only regular files, so that no pipe or device can block it, and maps none, because a mapped file that
shrinks kills its reader (SIGBUS).
"""

from __future__ import annotations

import difflib
import errno
import io
import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from llamasup._version import __version__
from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.gguf.facts_from_header import facts_of, split_of
from llamasup.core.gguf.header import Container, NeedMore, read_container
from llamasup.core.system.native import native
from llamasup.core.system.storage.fact_cache import FactCache, FileIdentity, default_cache_folder
from llamasup.core.system.storage.paths import PathKind, path_kind
from llamasup.core.system.text import one_of_these
from llamasup.errors import ModelInvalid, ModelMissing

# Change the number with every change of the reader or of ModelFacts, so that cached facts become stale. The
# version does that for each release.
REVISION = f"{__version__}/10"
# Enough for the headers of small models; for a larger header, its beginning shows the size to read.
_FIRST_READ_BYTES = 64 * 1024
# llama_split_path of llama.cpp.
_SPLIT_NAME = re.compile(r"(?P<prefix>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_SHOWN_NAMES = 8
_SPECIAL_FILES = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


class CachedFacts(Struct, frozen=True):
    """The cache entry of a model's first file; ``parts`` are the states of its other files."""

    facts: ModelFacts
    parts: tuple[tuple[str, int, int], ...]  # path, size in bytes, mtime in ns

    def is_current(self) -> bool:
        """Return whether the other files are unchanged."""
        return all(FileIdentity.find(part[0]) == FileIdentity(*part) for part in self.parts)


class SplitName(Struct, frozen=True):
    """The number of a part of a split set, and the name of the first part."""

    number: int
    first: str


def read_model(path: str | Path) -> ModelFacts:
    """Return the facts of the model at ``path``; for the first part of a split set, the facts of the whole
    set.

    Facts are cached on disk (in the user's cache) until a file of the model changes its size or modification
    time. Raises ModelMissing if the file is missing or may not be read, and
    ModelInvalid if llama-server could not load it.
    """
    path = Path(path)
    with os_errors_of(path):
        _check_regular(path, path.stat())
        identity = FileIdentity.of(path)
    cache = _cache(default_cache_folder())
    remembered = cache.get(identity)
    if remembered is None or not remembered.is_current():
        remembered = read_uncached(path)
        cache.put(identity, remembered)
    return remembered.facts


def read_uncached(path: Path) -> CachedFacts:
    """Read the facts from the files, with the states that later show whether the files have changed."""
    containers, parts = [_read(path)], []
    with _invalid_naming(path):
        split = split_of(containers[0])
    if split.index == 0 and split.count > 1:
        parts = split_paths(path, split.count)[1:]
        containers += [_read_part(part, number, path) for number, part in enumerate(parts, start=2)]
    with _invalid_naming(path):
        facts = facts_of(containers)
    with os_errors_of(path):
        identities = (FileIdentity.of(part) for part in parts)
        seen = tuple((part.path, part.size_bytes, part.mtime_ns) for part in identities)
    return CachedFacts(facts, seen)


def read_parts(paths: Sequence[Path]) -> ModelFacts:
    """Return the facts of a model from its files in order, which do not have their final names yet.

    Raises ModelInvalid and ModelMissing as ``read_model`` does.
    """
    containers = [_read(path) for path in paths]
    for number, (path, container) in enumerate(zip(paths, containers, strict=True)):
        with _invalid_naming(path):
            split = split_of(container)
            if len(paths) > 1 and (split.index, split.count) != (number, len(paths)):
                raise ModelInvalid(
                    f"the header says part {split.index + 1} of {split.count}, but the name says part "
                    f"{number + 1} of {len(paths)}",
                    remedy="Report this to the publisher of the model.",
                )
    with _invalid_naming(paths[0]):
        return facts_of(containers)


def split_name(name: str) -> SplitName | None:
    """Return the part of a set that a file named ``name`` is; None for a model in one file."""
    found = _SPLIT_NAME.fullmatch(name)
    if found is None:
        return None
    return SplitName(int(found["part"]), f"{found['prefix']}-00001-of-{found['count']}.gguf")


def split_paths(path: Path, count: int) -> list[Path]:
    """Return the files of a set of ``count`` parts, given its first one.

    Raises ModelInvalid for another name.
    """
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or int(name["count"]) != count or int(name["part"]) != 1:
        raise ModelInvalid(
            f"{path}: the header says part 1 of {count}, but the name does not",
            remedy=f"Name them NAME-00001-of-{count:05d}.gguf and so on: llama-server finds them by name.",
        )
    return [
        path.with_name(f"{name['prefix']}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)
    ]


def parts_of(file: Path) -> tuple[Path, ...]:
    """Return all parts of the split set that ``file`` belongs to, whether they exist or not."""
    part = split_name(file.name)
    if part is None:
        return (file,)
    number = int(part.first.removesuffix(".gguf")[-5:])
    parts = tuple(split_paths(file.with_name(part.first), number))
    return parts if file in parts else (file,)  # part 3 of 2


@lru_cache(maxsize=8)  # building msgspec's decoder takes longer than a look-up
def _cache(folder: Path | None) -> FactCache[CachedFacts]:
    return FactCache("model", CachedFacts, revision=REVISION, folder=folder)


def _read_part(part: Path, number: int, first: Path) -> Container:
    try:
        part.stat()
    except FileNotFoundError:
        raise ModelMissing(
            f"{part}: part {number} of the model {first.name} is missing",
            remedy="Download the missing part into the same folder.",
        ) from None
    except OSError:
        pass  # _read reports it
    container = _read(part)
    with _invalid_naming(part):
        found = split_of(container)
        if found.index + 1 != number:
            raise ModelInvalid(
                f"the name says part {number}, but the header says part {found.index + 1} of {found.count}",
                remedy="Download this part again.",
            )
    return container


def _read(path: Path) -> Container:
    """The header, from as few bytes as necessary."""
    # O_NONBLOCK: a pipe that replaced the file after the first check cannot block the open.
    flags = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))
    with os_errors_of(path):
        _check_regular(path, path.stat())
        with os.fdopen(os.open(path, os.O_RDONLY | flags), "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            _check_regular(path, before)
            _check_downloaded(path)
            wanted = min(_FIRST_READ_BYTES, before.st_size)
            while True:
                header = bytearray(wanted)
                filled = _fill(file, header)
                after = os.fstat(file.fileno())
                if filled < wanted or _state(before) != _state(after):
                    raise ModelInvalid(
                        f"{path}: changed while it was read, from {before.st_size} to {after.st_size} bytes",
                        remedy="Wait until the download or copy has finished, then try again.",
                    )
                with _invalid_naming(path):
                    outcome = read_container(header, before.st_size)
                if not isinstance(outcome, NeedMore):
                    return outcome
                wanted = outcome.bytes_needed
                del header  # before the next allocation, because it can have 32 MiB


def _fill(file: io.FileIO, header: bytearray) -> int:
    """Read from the beginning until ``header`` is full or the file ends. Returns the bytes read."""
    file.seek(0)
    filled = 0
    with memoryview(header) as view:
        while filled < len(header) and (count := file.readinto(view[filled:])):
            filled += count
    return filled


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


# --- errors --------------------------------------------------------------------------------------


def _check_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise _is_folder(path)
    kind = next((kind for is_kind, kind in _SPECIAL_FILES if is_kind(status.st_mode)), "not a file")
    raise ModelInvalid(f"{path}: is {kind}, not a model file", remedy="Give the path of a .gguf file.")


def _check_downloaded(path: Path) -> None:
    """aria2 creates a file with its final name and size, so it soon has a header, followed by zeros."""
    if path_kind(path.with_name(f"{path.name}.aria2")) is PathKind.FILE:
        raise ModelInvalid(
            f"{path}: the download is not complete: aria2 still has {path.name}.aria2 next to it",
            remedy="Let aria2c finish it (--continue); if the file is complete, remove the .aria2 file.",
        )


def _is_folder(path: Path) -> ModelMissing:
    names = _model_names(path)
    if not names:
        return ModelMissing(
            f"{path}: is a folder without .gguf files",
            remedy="Give the path of a .gguf file; `llamasup inspect FOLDER` also searches subfolders.",
        )
    return ModelMissing(
        f"{path}: is a folder; the models in it are {_listed(names)}",
        remedy=f"Name one of them, for example {shlex.quote(str(path / names[0]))}.",
    )


def _is_missing(path: Path) -> ModelMissing:
    if path.is_symlink():
        return ModelMissing(
            f"{path}: is a symbolic link to {path.readlink()}, which does not exist",
            remedy="Restore the target of the link, or give another path.",
        )
    folder, longest = path.parent, native.longest_path()
    if longest is not None and (length := _length_for_windows(path)) > longest:
        return ModelMissing(
            f"{path}: the path has {length} characters, and Windows finds no file with more than {longest}",
            remedy="Move the model into a folder with a shorter path, or let Windows use long paths "
            "(LongPathsEnabled in its registry).",
        )
    if path_kind(folder) is not PathKind.FOLDER:
        return ModelMissing(
            f"{path}: there is no such file, and no folder {folder}", remedy="Check the path of the model."
        )
    part = split_name(path.name)
    others = filter(None, map(split_name, _listed_folder(folder)))
    if part is not None and any(other.first == part.first for other in others):
        return ModelMissing(
            f"{path}: part {part.number} of this model is missing; other parts are there",
            remedy="Download the missing part into the same folder.",
        )
    names = _model_names(folder)
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if near:
        remedy = one_of_these(shlex.quote(str(folder / name)) for name in near)
    elif names:
        remedy = f"The models in that folder are {_listed(names)}."
    else:
        remedy = f"There is no .gguf file in {folder}: check the path of the model."
    return ModelMissing(f"{path}: there is no such file", remedy=remedy)


def _length_for_windows(path: Path) -> int:
    """Count in the characters of UTF-16. A path that begins with ``\\\\?\\`` has no limit."""
    if str(path).startswith("\\\\?\\"):
        return 0
    return len(str(path.absolute()).encode("utf-16-le", "surrogatepass")) // 2


def _model_names(folder: Path) -> list[str]:
    """Return the names of the .gguf files in a folder, sorted; of a split set only the first part."""
    names = sorted(name for name in _listed_folder(folder) if name.lower().endswith(".gguf"))
    return [name for name in names if (part := split_name(name)) is None or part.number == 1]


def _listed_folder(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except OSError:
        return []


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


@contextmanager
def _invalid_naming(path: Path) -> Iterator[None]:
    """Put the path in front of the message of an invalid header."""
    try:
        yield
    except ModelInvalid as error:
        raise ModelInvalid(f"{path}: {error.message}", remedy=error.remedy) from None


@contextmanager
def os_errors_of(path: Path) -> Iterator[None]:
    """Turn an OSError about ``path`` into ModelMissing."""
    try:
        yield
    except FileNotFoundError:
        raise _is_missing(path) from None
    except PermissionError as error:
        raise ModelMissing(
            f"{path}: may not be read ({error.strerror})",
            remedy="Let this user read the file and enter its folders (chmod, chown), or use another user.",
        ) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ModelMissing(
                f"{path}: the symbolic links form a circle", remedy="Give the path of the file itself."
            ) from None
        raise ModelMissing(
            f"{path}: cannot be read: {error.strerror}", remedy="Check the path, and the disk that holds it."
        ) from None
    except ValueError as error:  # a NUL in the path
        raise ModelMissing(f"{str(path)!r}: is not a path ({error})", remedy="Check the path.") from None
