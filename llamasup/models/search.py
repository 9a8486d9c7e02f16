"""Finds models in folders, in the caches of other programs, and at paths of a config.

A found file lies in one of those folders by its real path, too (X10): a link that leads out of all of them is
not followed. The hub's own cache is made of links, from snapshots to blobs of the same folder.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from llamasup.errors import ConfigInvalid, LlamasupError, ModelInvalid, ModelMissing
from llamasup.gguf.facts import is_served
from llamasup.models.folder import list_models, look_at
from llamasup.models.found import FoundModel, current_files, hub_place, ids_of, manifest_repo
from llamasup.system.storage.paths import PathKind, expanded, path_kind

__all__ = ["Search", "cache_folders", "known_caches", "search_models"]


_MAX_REF_BYTES = 64  # of a commit and a newline


@dataclass(frozen=True, slots=True)
class Search:
    """What was found. ``sources``: what is at each path that was asked for, and beside those that are models,
    where no folder has it. ``missing``: folders that may not be looked into, and why; ``closed``: folders
    below the others that may not either. ``notes`` say what was left out.
    """

    found: tuple[FoundModel, ...] = ()
    sources: Mapping[str, FoundModel] = field(default_factory=lambda: MappingProxyType({}))
    missing: Mapping[str, LlamasupError] = field(default_factory=lambda: MappingProxyType({}))
    closed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def hidden(self) -> tuple[str, ...]:
        """Folders of which is not known what is in them now."""
        return (*self.missing, *self.closed)


def search_models(
    folders: Sequence[Path], paths: Iterable[str] = (), *, cache_folder: Path | None = None
) -> Search:
    """All models below ``folders``, and those at ``paths`` (absolute, wherever they lead), with what lies
    beside them.

    Reads headers that it has not seen before: up to a second for a thousand, then some 50 ms.
    """
    found: list[FoundModel] = []
    missing: dict[str, LlamasupError] = {}
    closed: list[str] = []
    notes: list[str] = []
    # Before the folders: a folder that disappears during the search is then missing, and no file of it is.
    sources = {path: look_at(Path(path), cache_folder=cache_folder) for path in dict.fromkeys(paths)}
    inside = tuple(f"{os.path.realpath(folder).rstrip('/')}/" for folder in folders)
    for folder in dict.fromkeys(folders):
        try:
            listed = list_models(folder, cache_folder=cache_folder)
        except LlamasupError as error:
            is_there = path_kind(folder) is not PathKind.NOTHING
            missing[str(folder)] = error if is_there else _no_folder(folder)
            continue
        notes += listed.notes
        closed += listed.closed
        found += (_kept_inside(each, inside) for each in _named(folder, listed.models))
    once = {each.path: each for each in found}  # one folder may lie in another
    looked_into = {path.rpartition("/")[0] for path in once}
    for each in _beside(sources, looked_into, cache_folder):
        sources.setdefault(each.path, _kept_inside(each, inside) if _is_inside(each, inside) else each)
    return Search(
        tuple(once.values()),
        MappingProxyType(sources),
        MappingProxyType(missing),
        tuple(dict.fromkeys(closed)),
        tuple(notes),
    )


def _beside(
    sources: Mapping[str, FoundModel], looked_into: Container[str], cache_folder: Path | None
) -> Iterator[FoundModel]:
    """What may belong to models that are named by their paths. A broken one is most likely being replaced."""
    of_models = (
        each.path
        for each in sources.values()
        if isinstance(each.outcome, LlamasupError) or is_served(each.outcome)
    )
    for folder in dict.fromkeys(path.rpartition("/")[0] for path in of_models):
        if folder not in looked_into:
            with contextlib.suppress(LlamasupError):  # what is wrong there is told of the model
                yield from list_models(Path(folder or "/"), deepest=0, cache_folder=cache_folder).models


def _no_folder(folder: Path) -> ModelMissing:
    return ModelMissing(f"{folder}: there is no such folder", remedy="Make it, or give another one.")


def _named(folder: Path, models: Sequence[FoundModel]) -> Iterator[FoundModel]:
    """With their names; of the hub's repositories what is current."""
    top = f"{str(folder).rstrip('/')}/"
    relative = {each.path: each.path.removeprefix(top) for each in models}
    broken = {relative[each.path] for each in models if isinstance(each.outcome, LlamasupError)}
    revisions: dict[str, dict[str, None]] = {}
    for path in relative.values():
        if (place := hub_place(path)) is not None:
            revisions.setdefault(place.folder, {})[place.revision] = None
    order = {each: _newest_first(folder / each, of) for each, of in revisions.items()}
    kept = current_files(relative.values(), order, broken)
    ids = ids_of(kept, _repositories(folder), broken)
    for each in models:
        if (names := ids.get(relative[each.path])) is not None:
            yield replace(each, ids=names)


def _newest_first(repository: Path, revisions: Iterable[str]) -> list[str]:
    """The commit that ``main`` is at, or another name if it has no main; then by when they came."""
    named = _named_revision(repository, set(revisions))

    def came_ns(revision: str) -> int:
        try:
            return (repository / "snapshots" / revision).stat().st_mtime_ns
        except OSError:
            return 0

    return sorted(revisions, key=lambda each: (each == named, came_ns(each), each), reverse=True)


def _named_revision(repository: Path, revisions: Container[str]) -> str | None:
    try:
        refs = sorted((repository / "refs").iterdir(), key=lambda ref: (ref.name != "main", ref.name))
    except OSError:
        return None
    for ref in refs:
        try:
            with ref.open("rb") as file:
                commit = file.read(_MAX_REF_BYTES).decode("ascii", "replace").strip()
        except OSError:
            continue
        if commit in revisions:
            return commit
    return None


def _repositories(folder: Path) -> list[str]:
    """Those that llama.cpp's older cache has manifests of."""
    try:
        with os.scandir(folder) as entries:
            return [repo for entry in entries if (repo := manifest_repo(entry.name)) is not None]
    except OSError:
        return []


def _is_inside(model: FoundModel, inside: tuple[str, ...]) -> bool:
    """Whether it lies in one of the folders, wherever it leads."""
    return f"{os.path.realpath(os.path.dirname(model.path))}/".startswith(inside)  # noqa: PTH120 - as paths


def _kept_inside(model: FoundModel, inside: tuple[str, ...]) -> FoundModel:
    outside = next((path for path, _, _ in model.files if not path.startswith(inside)), None)
    if outside is None:
        return model
    error = ModelInvalid(
        f"{model.path}: leads to {outside}, which is in none of the folders that are served from",
        remedy="Name that folder, too, or the file itself in the config: models: {NAME: {path: …}}.",
    )
    return replace(model, outcome=error)


def cache_folders(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Those of ``cache_places`` that are there, or may be."""
    places = known_caches(names, environ)
    return tuple(place for place in places if path_kind(place) not in (PathKind.NOTHING, PathKind.FILE))


def known_caches(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where the folders of ``huggingface`` and ``llama.cpp`` are, or will be: absolute, each once.

    As huggingface_hub and llama.cpp (common/hf-cache.cpp of b11434, fs_get_cache_directory before) look
    for them. llama.cpp's own comes first where it has one: today it shares the hub's.

    Raises ConfigInvalid for a variable that leads to nobody's home.
    """
    return tuple(
        dict.fromkeys(
            place for name in names for place in (_hub if name == "huggingface" else _llama_cpp)(environ)
        )
    )


def _hub(environ: Mapping[str, str]) -> list[Path]:
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if given := environ.get(variable):
            return [expanded(given, ConfigInvalid, of=f"${variable}") / below]
    return [home / ".cache/huggingface/hub" for home in _home(environ)]


def _llama_cpp(environ: Mapping[str, str]) -> list[Path]:
    """Builds of 2024 and 2025 have a folder of their own without subfolders; later ones the hub's layout."""
    if given := environ.get("LLAMA_CACHE"):
        return [expanded(given, ConfigInvalid, of="$LLAMA_CACHE")]
    if sys.platform == "darwin":
        own = [home / "Library/Caches/llama.cpp" for home in _home(environ)]
    elif given := environ.get("XDG_CACHE_HOME"):
        own = [expanded(given, ConfigInvalid, of="$XDG_CACHE_HOME") / "llama.cpp"]
    else:
        own = [home / ".cache/llama.cpp" for home in _home(environ)]
    return [*own, *_hub(environ)]


def _home(environ: Mapping[str, str]) -> list[Path]:
    return [Path(home)] if (home := environ.get("HOME")) else []
