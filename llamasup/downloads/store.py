"""Finds a downloaded model in the models folder by its reference. Reads the folder only; asks no server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from llamasup.downloads.choose import Choice, RepoFile, choose
from llamasup.downloads.part_file import origin_of_file, remember_names
from llamasup.downloads.reference import Ref, RepoRef, UrlRef, asked_as, local_path, split_urls
from llamasup.errors import LlamasupError, UsageInvalid

__all__ = ["FetchedModel", "downloaded", "know_as"]

_MAX_FILES = 10_000  # of one repository
_MAX_DEPTH = 6
_MAIN = "main"


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """Absolute paths. ``path`` is what a server is started with: the first of the ``parts``."""

    path: Path
    parts: tuple[Path, ...]
    mmproj: Path | None = None


def downloaded(ref: Ref, folder: Path) -> FetchedModel | None:
    """The very model that ``ref`` names, in the models ``folder``; None where it is not there, or not whole.

    Where nothing is said of the quantization, whichever there is will do; of several the one that would be
    downloaded. So it is with the revision and a URL's query. What is said has to be what the file is known
    to be; what comes near to it is asked about. Raises UsageInvalid where several are meant.
    """
    found = _of_repo(ref, folder) if isinstance(ref, RepoRef) else _of_url(ref, folder)
    if found is None or ref.sha256 is None:
        return found
    origin = origin_of_file(found.path)
    return found if len(found.parts) == 1 and origin is not None and origin.sha256 == ref.sha256 else None


def know_as(ref: Ref, model: FetchedModel, folder: Path) -> None:
    """From now on ``downloaded`` finds for ``ref`` what has come for it: only the hub knows what is near.

    Raises what ``remember_names`` raises.
    """
    with contextlib.suppress(UsageInvalid):
        found = downloaded(ref, folder)
        if found is not None and found.path == model.path:
            return
    remember_names(model.path, asked_as(ref))


def _of_repo(ref: RepoRef, folder: Path) -> FetchedModel | None:
    top = folder / ref.repo
    files = list(_files(top))
    several: UsageInvalid | None = None
    if ref.revision == _MAIN:
        try:
            return _fetched(top, choose(ref, files, exact=True))
        except UsageInvalid as error:
            several = error
        except LlamasupError:
            pass
    (name,) = asked_as(ref)
    known = {each.path: origin_of_file(top / each.path) for each in files}
    named = [(origin.mtime_ns, path) for path, origin in known.items() if origin and name in origin.names]
    if named:  # of several the last one: the repository has changed
        _, path = max(named)
        with contextlib.suppress(LlamasupError):
            return _fetched(top, choose(replace(ref, file=path, quant=None), files, exact=True))
    if several is not None:
        raise several
    return None


def _of_url(ref: UrlRef, folder: Path) -> FetchedModel | None:
    paths = _paths_of_url(ref, folder)
    if not all(map(_is_file, paths)):
        return None
    model = FetchedModel(paths[0], paths)
    origin = origin_of_file(model.path)
    name = asked_as(ref)[-1]
    if origin is None:  # somebody's own: nothing is known of it but where it lies
        return None if "?" in name else model
    return model if name in (*origin.names, origin.url) else None


def _paths_of_url(ref: UrlRef, folder: Path) -> tuple[Path, ...]:
    return tuple(folder / local_path(ref, unquote(urlsplit(url).path)) for url in split_urls(ref.url))


def _fetched(top: Path, choice: Choice) -> FetchedModel:
    parts = tuple(top / each.path for each in choice.parts)
    return FetchedModel(parts[0], parts, top / choice.projector.path if choice.projector else None)


def _files(top: Path) -> Iterator[RepoFile]:
    """What is below ``top`` as if it were the repository."""
    waiting = [(top, "", 0)]
    seen = 0
    while waiting:
        folder, prefix, depth = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            seen += 1
            if seen > _MAX_FILES or entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                if depth < _MAX_DEPTH:
                    waiting.append((folder / entry.name, f"{prefix}{entry.name}/", depth + 1))
            elif entry.name.lower().endswith(".gguf"):
                # A link in a circle, a target that may not be read, a file that has just gone: none of them
                # is there.
                with contextlib.suppress(OSError):
                    if entry.is_file():
                        yield RepoFile(prefix + entry.name, entry.stat().st_size)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


# --- removing ----------------------------------------------------------------------------------------
