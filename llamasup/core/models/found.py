"""The files that were found: their ids, and the projector and the LoRA adapters next to a model (pure).

The ids come from the path: from the name of the file, or from the repository of its download.

    models_dir/…/NAME.gguf                              NAME
    models_dir/ORG/REPO/…/NAME.gguf                     NAME, and ORG/REPO:QUANT
    …/models--ORG--REPO/snapshots/REVISION/…/NAME.gguf  ORG/REPO:QUANT (the hub's cache; llama.cpp's today)
    llama.cpp's cache/ORG_REPO_NAME.gguf                ORG/REPO:QUANT, with a manifest=ORG=REPO=TAG.json

Two files of a repository with the same quantization, or without one in the name, get ``ORG/REPO:NAME.gguf``,
as for downloads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import PurePath, PurePosixPath
from types import MappingProxyType

from msgspec import Struct

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.hub.choose import quant_tag
from llamasup.core.models.names import file_id
from llamasup.core.planning.adapters import adapters_of
from llamasup.core.planning.projectors import Pairing, has_projector_name, pairings_of
from llamasup.core.settings.names import why_not_a_name
from llamasup.errors import LlamasupError

_SNAPSHOT = re.compile(
    r"(?P<repository>(?:.*/)?models--(?P<repo>[^/]+))/snapshots/(?P<revision>[^/]+)/(?P<file>.+)", re.DOTALL
)
_MANIFEST = re.compile(r"manifest=(?P<org>[^=/]+)=(?P<repo>[^=/]+)=[^/]*\.json")


class HubFile(Struct, frozen=True):
    """A path in the hub's cache; ``folder`` is the repository's, relative if the path was."""

    folder: str
    repo: str
    revision: str
    file: str


def parse_hub_path(path: str) -> HubFile | None:
    """Parse a path in a hub's cache. None: it is outside of such a cache."""
    found = _SNAPSHOT.fullmatch(path)
    if found is None:
        return None
    return HubFile(found["repository"], found["repo"].replace("--", "/", 1), found["revision"], found["file"])


def current_files(
    paths: Iterable[str], revisions: Mapping[str, Sequence[str]], broken: Container[str] = ()
) -> list[str]:
    """Leave out files of the hub's cache that a newer revision replaces.

    ``revisions``: folder of a repository → its revisions, the current one first. A file that is missing or
    ``broken`` in one revision is taken from the next that has it.
    """
    kept, of_hub = [], list[tuple[bool, int, str, HubFile]]()
    for path in paths:
        if (where := parse_hub_path(path)) is None:
            kept.append(path)
        else:
            of_hub.append((path in broken, revisions[where.folder].index(where.revision), path, where))
    chosen: dict[tuple[str, ...], str] = {}
    for _, _, path, where in sorted(of_hub, key=lambda entry: entry[:3]):
        # The quantization identifies a file that was renamed or split.
        tag = "" if has_projector_name(where.file) else quant_tag(where.file)
        keys = [
            (where.folder, "file", where.file),
            *([(where.folder, "tag", tag)] if tag else []),
        ]
        if all(chosen.setdefault(key, where.revision) == where.revision for key in keys):
            kept.append(path)
    return kept


def manifest_repo(name: str) -> str | None:
    """Parse the repository from a manifest's name in llama.cpp's older cache."""
    found = _MANIFEST.fullmatch(name)
    return None if found is None else f"{found['org']}/{found['repo']}"


def ids_of(
    paths: Sequence[str], repositories: Iterable[str] = (), broken: Container[str] = ()
) -> Mapping[str, tuple[str, ...]]:
    """Derive the ids of each path, the main one first. A name without a valid part has none.

    ``paths`` are relative to the searched folder. ``repositories``: those of manifests in llama.cpp's older
    cache. ``broken`` paths do not change the ids of valid ones.
    """
    prefixes = {repository.replace("/", "_") + "_": repository for repository in repositories}
    locations = {path: _repo_file(path, prefixes) for path in paths}
    tags = {
        path: (where.repo, quant_tag(where.file))
        for path, where in locations.items()
        if where and not has_projector_name(where.file)
    }
    everywhere = Counter(tags.values())
    sound = Counter(tag for path, tag in tags.items() if path not in broken)
    return {
        path: tuple(_ids(path, locations[path], everywhere if path in broken else sound)) for path in paths
    }


def _ids(path: str, where: _RepoFile | None, tags: Mapping[tuple[str, str], int]) -> Iterable[str]:
    own = file_id(path)
    if where is None:
        return [own] if own else []
    tag = quant_tag(where.file)
    hub_id = f"{where.repo}:{tag if tag and tags[where.repo, tag] < 2 else where.file}"
    names = [hub_id] if where.certain else [own, hub_id]
    return [name for name in names if not why_not_a_name(name)] or ([own] if own else [])


def qualified_id(path: str) -> str:
    """Return ``FOLDER/NAME`` for a file in a subfolder, and an empty text for another file."""
    parts = PurePosixPath(path).parts
    own = file_id(path)
    qualified = f"{parts[0]}/{own}"
    return qualified if len(parts) == 2 and own and not why_not_a_name(qualified) else ""


class _RepoFile(Struct, frozen=True):
    """The repository of a file.

    It is ``certain`` from the layout of a cache, and else only looks like one.
    """

    repo: str
    file: str
    certain: bool


def _repo_file(path: str, prefixes: Mapping[str, str]) -> _RepoFile | None:
    if (hub := parse_hub_path(path)) is not None:
        return _RepoFile(hub.repo, hub.file, certain=True)
    folders = PurePosixPath(path).parts
    if len(folders) == 1:
        # The longest one: the name of one repository may begin with another's.
        prefix = max((entry for entry in prefixes if path.startswith(entry)), key=len, default="")
        return _RepoFile(prefixes[prefix], path.removeprefix(prefix), certain=True) if prefix else None
    if len(folders) == 2:
        return None
    return _RepoFile("/".join(folders[:2]), "/".join(folders[2:]), certain=False)


FileState = tuple[str, int, int]
"""Real path, size in bytes, modification time in ns."""


class FoundModel(Struct, frozen=True):
    """One model, or its error; ``path`` is the first file of a split set. ``ids``: the main id first.
    ``qualified``: its id if other files share its only name.
    """

    path: str
    outcome: ModelFacts | LlamasupError
    files: tuple[FileState, ...] = ()
    ids: tuple[str, ...] = ()
    qualified: str = ""


NO_SOURCES: Mapping[str, FoundModel] = MappingProxyType({})


class Attachments(Struct, frozen=True):
    """The projector (or why none was chosen) and the adapters of each model, by the path of the model."""

    pairings: Mapping[str, Pairing]
    adapters: Mapping[str, tuple[str, ...]]
    _files: Mapping[str, tuple[FileState, ...]]

    @classmethod
    def among(
        cls, found: Sequence[FoundModel], sources: Mapping[str, FoundModel] = NO_SOURCES
    ) -> Attachments:
        """Pair the models with the files next to them.

        The paths of ``sources`` (path → file) may lead anywhere.
        """
        there = (entry for entry in sources.values() if entry.files)
        here = {entry.path: entry.outcome for entry in (*found, *there)}
        sound = {path: facts for path, facts in here.items() if not isinstance(facts, LlamasupError)}
        broken = [path for path in here if path not in sound]
        by_path = {**{entry.path: entry for entry in found}, **sources}
        files = {path: entry.files for path, entry in by_path.items()}
        return cls(pairings_of(sound, broken), adapters_of(sound, broken), files)

    def states_of(self, paths: Iterable[str]) -> tuple[FileState, ...]:
        """Read the states of these files, without missing ones."""
        return tuple(state for path in paths for state in self._files.get(path, ()))


def projector_going_with(model: str, found: Sequence[FoundModel]) -> str | None:
    """Find the projector to remove together with ``model``. Both are paths, and both are in ``found``.

    A plan would load this projector with the model. None if another model may use it, by its path or through
    a link, or if a file in its folder is unreadable: it may be an unfinished copy of another quantization.
    """
    attachments = Attachments.among(found)
    mine = attachments.pairings.get(model)
    if mine is None or mine.projector is None:
        return None
    path = mine.projector.path
    others = [
        projector
        for other, pair in attachments.pairings.items()
        if other != model
        for projector in (*((pair.projector.path,) if pair.projector else ()), *pair.undecided)
    ]
    used = {path_used for other in others for path_used in (other, *_real_paths(attachments, other))}
    unread = any(
        isinstance(entry.outcome, LlamasupError) and PurePath(entry.path).parent == PurePath(path).parent
        for entry in found
    )
    return None if path in used or unread else path


def _real_paths(attachments: Attachments, path: str) -> tuple[str, ...]:
    return tuple(real for real, _, _ in attachments.states_of([path]))
