"""What a found file is called, from where it lies: by its own name, or by the repository that it came from.

    models_dir/…/NAME.gguf                              NAME
    models_dir/ORG/REPO/…/NAME.gguf                     NAME, and ORG/REPO:QUANT
    …/models--ORG--REPO/snapshots/REVISION/…/NAME.gguf  ORG/REPO:QUANT (the hub's cache; llama.cpp's today)
    llama.cpp's cache/ORG_REPO_NAME.gguf                ORG/REPO:QUANT, beside its manifest=ORG=REPO=TAG.json

Two files of a repository with one quantization, or none in the name, are told apart by their names:
``ORG/REPO:NAME.gguf``, as for downloads (core.hub).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from llamasup.downloads.choose import quant_tag
from llamasup.errors import LlamasupError
from llamasup.gguf.facts import ModelFacts
from llamasup.models.names import file_id, why_not_a_name

__all__ = ["FileState", "FoundModel", "HubPlace", "current_files", "hub_place", "ids_of", "manifest_repo"]


_SNAPSHOT = re.compile(
    r"(?P<repository>(?:.*/)?models--(?P<repo>[^/]+))/snapshots/(?P<revision>[^/]+)/(?P<file>.+)", re.DOTALL
)
_MANIFEST = re.compile(r"manifest=(?P<org>[^=/]+)=(?P<repo>[^=/]+)=[^/]*\.json")


@dataclass(frozen=True, slots=True)
class HubPlace:
    """Where a file of the hub's cache lies; ``folder`` is the repository's, relative as the path was."""

    folder: str
    repo: str
    revision: str
    file: str


def hub_place(path: str) -> HubPlace | None:
    """What the hub's cache says by a path; None for any other place."""
    found = _SNAPSHOT.fullmatch(path)
    if found is None:
        return None
    return HubPlace(
        found["repository"], found["repo"].replace("--", "/", 1), found["revision"], found["file"]
    )


def current_files(
    paths: Iterable[str], revisions: Mapping[str, Sequence[str]], broken: Container[str] = ()
) -> list[str]:
    """Without those files of the hub's cache in whose place there are others.

    ``revisions``: by the folder of a repository, the current one first. What that one does not have, since it
    is still downloaded or nobody asked for it, is taken from the newest that has it; half a file is none.
    """
    kept, of_hub = [], list[tuple[bool, int, str, HubPlace]]()
    for path in paths:
        if (place := hub_place(path)) is None:
            kept.append(path)
        else:
            of_hub.append((path in broken, revisions[place.folder].index(place.revision), path, place))
    chosen: dict[tuple[str, ...], str] = {}
    for _, _, path, place in sorted(of_hub, key=lambda each: each[:3]):
        # A file that was renamed, or is in more parts now, is known by its quantization.
        tag = quant_tag(place.file) if _is_model(place.file) else ""
        means = [(place.folder, "file", place.file), *([(place.folder, "tag", tag)] if tag else [])]
        if all(chosen.setdefault(each, place.revision) == place.revision for each in means):
            kept.append(path)
    return kept


def manifest_repo(name: str) -> str | None:
    """The repository that a manifest of llama.cpp's older cache is about."""
    found = _MANIFEST.fullmatch(name)
    return None if found is None else f"{found['org']}/{found['repo']}"


def ids_of(
    paths: Sequence[str], repositories: Iterable[str] = (), broken: Container[str] = ()
) -> Mapping[str, tuple[str, ...]]:
    """The names of each file, its own id first; none where nothing of its name can be one.

    ``paths`` are relative to the folder that is looked into. ``repositories`` are those that the manifests of
    llama.cpp's older cache name. ``broken`` are those of the paths that change no name of a sound one.
    """
    prefixes = {repository.replace("/", "_") + "_": repository for repository in repositories}
    places = {path: _place(path, prefixes) for path in paths}
    tags = {
        path: (place.repo, quant_tag(place.file))
        for path, place in places.items()
        if place and _is_model(place.file)
    }
    everywhere = Counter(tags.values())
    sound = Counter(tag for path, tag in tags.items() if path not in broken)
    return {path: tuple(_ids(path, places[path], everywhere if path in broken else sound)) for path in paths}


def _ids(path: str, place: _Place | None, tags: Mapping[tuple[str, str], int]) -> Iterable[str]:
    own = file_id(path)
    if place is None:
        return [own] if own else []
    tag = quant_tag(place.file)
    hub_id = f"{place.repo}:{tag if tag and tags[place.repo, tag] < 2 else place.file}"
    names = [hub_id] if place.certain else [own, hub_id]
    return [name for name in names if not why_not_a_name(name)] or ([own] if own else [])


@dataclass(frozen=True, slots=True)
class _Place:
    """``certain``: a cache says it; else a folder only looks like a repository's."""

    repo: str
    file: str
    certain: bool


def _place(path: str, prefixes: Mapping[str, str]) -> _Place | None:
    if (hub := hub_place(path)) is not None:
        return _Place(hub.repo, hub.file, certain=True)
    folders = PurePosixPath(path).parts
    if len(folders) == 1:
        # The longest: the names of one repository may begin as another's do.
        prefix = max((each for each in prefixes if path.startswith(each)), key=len, default="")
        return _Place(prefixes[prefix], path.removeprefix(prefix), certain=True) if prefix else None
    if len(folders) == 2:
        return None
    return _Place("/".join(folders[:2]), "/".join(folders[2:]), certain=False)


def _is_model(file: str) -> bool:
    return "mmproj" not in PurePosixPath(file).name.lower()


FileState = tuple[str, int, int]
"""A file as it was: real path, size in bytes, modification time in ns."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """One model, or what is wrong with it; of a split set the first file stands for all.

    ``files`` are all its files. ``ids``: what its place and name say that it is called (core.found_ids), its
    own id first.
    """

    path: str
    outcome: ModelFacts | LlamasupError
    files: tuple[FileState, ...] = ()
    ids: tuple[str, ...] = ()
