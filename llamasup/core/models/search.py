"""Finds models in folders, in the caches of other programs, and at paths of a config.

The real path of a found file is in one of these folders as well: links that lead out are not followed. The
hub's cache links from snapshots to blobs of the same folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct, field
from msgspec.structs import replace

from llamasup.core.gguf.facts import is_served
from llamasup.core.models.folder import list_models, look_at
from llamasup.core.models.found import (
    FoundModel,
    current_files,
    ids_of,
    manifest_repo,
    parse_hub_path,
    qualified_id,
)
from llamasup.core.system.native import native
from llamasup.core.system.storage.paths import PathKind, expanded, path_kind
from llamasup.errors import ConfigInvalid, LlamasupError, ModelInvalid, ModelMissing

_MAX_REF_BYTES = 64  # of a commit and a newline


class Search(Struct, frozen=True):
    """The result of a search. ``sources``: path in the config → file, with the files next to these models.

    ``missing``: unreadable folder → error; ``closed``: unreadable subfolders. ``notes``: omissions.
    """

    found: tuple[FoundModel, ...] = ()
    sources: Mapping[str, FoundModel] = field(default_factory=lambda: MappingProxyType({}))
    missing: Mapping[str, LlamasupError] = field(default_factory=lambda: MappingProxyType({}))
    closed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def hidden(self) -> tuple[str, ...]:
        """All unreadable folders."""
        return (*self.missing, *self.closed)


def search_models(
    folders: Sequence[Path],
    paths: Iterable[str] = (),
    *,
    follow_links: bool = False,
) -> Search:
    """Find all models below ``folders``, and the models at ``paths`` (absolute) with the files next to them.

    ``follow_links``: links in folders of this user may lead anywhere.
    Reads new headers: up to a second for a thousand, then some 50 ms.
    """
    found: list[FoundModel] = []
    missing: dict[str, LlamasupError] = {}
    closed: list[str] = []
    notes: list[str] = []
    # Before the folders: if one disappears during the search, it is missing rather than its files.
    sources = {path: look_at(Path(path)) for path in dict.fromkeys(paths)}
    inside = tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)  # noqa: PTH118 - with a separator at the end
    for folder in dict.fromkeys(folders):
        try:
            listed = list_models(folder)
        except LlamasupError as error:
            is_there = path_kind(folder) is not PathKind.NOTHING
            missing[str(folder)] = error if is_there else _no_folder(folder)
            continue
        notes += listed.notes
        closed += listed.closed
        models = _named(folder, listed.models)
        follows = follow_links and _is_own(folder)
        found += (
            each if follows and _has_own_links(folder, each.path) else _kept_inside(each, inside)
            for each in models
        )
    once = {model.path: model for model in found}  # one folder may lie in another
    looked_into = {str(Path(path).parent) for path in once}
    for model in _beside(sources, looked_into):
        sources.setdefault(model.path, _kept_inside(model, inside) if _is_inside(model, inside) else model)
    return Search(
        tuple(once.values()),
        MappingProxyType(sources),
        MappingProxyType(missing),
        tuple(dict.fromkeys(closed)),
        tuple(notes),
    )


def _beside(sources: Mapping[str, FoundModel], looked_into: Container[str]) -> Iterator[FoundModel]:
    """The files next to the models among ``sources``. A broken file is most likely being replaced."""
    of_models = (
        model.path
        for model in sources.values()
        if isinstance(model.outcome, LlamasupError) or is_served(model.outcome)
    )
    for folder in dict.fromkeys(str(Path(path).parent) for path in of_models):
        if folder not in looked_into:
            with contextlib.suppress(LlamasupError):  # the model itself reports it
                yield from list_models(Path(folder), deepest=0).models


def _no_folder(folder: Path) -> ModelMissing:
    return ModelMissing(f"{folder}: there is no such folder", remedy="Create it, or give another one.")


def _named(folder: Path, models: Sequence[FoundModel]) -> Iterator[FoundModel]:
    """The models with their ids; only the current files of a hub's cache."""
    top = f"{str(folder).rstrip('/')}/"
    relative = {model.path: model.path.removeprefix(top) for model in models}
    broken = {relative[model.path] for model in models if isinstance(model.outcome, LlamasupError)}
    revisions: dict[str, dict[str, None]] = {}
    for path in relative.values():
        if (repo_file := parse_hub_path(path)) is not None:
            revisions.setdefault(repo_file.folder, {})[repo_file.revision] = None
    order = {repository: _newest_first(folder / repository, of) for repository, of in revisions.items()}
    kept = current_files(relative.values(), order, broken)
    ids = ids_of(kept, _repositories(folder), broken)
    for model in models:
        if (names := ids.get(relative[model.path])) is not None:
            yield replace(model, ids=names, qualified=qualified_id(relative[model.path]))


def _newest_first(repository: Path, revisions: Iterable[str]) -> list[str]:
    """The commit of ``main`` (or of another ref without main) first, then the latest download."""
    named = _named_revision(repository, set(revisions))

    def came_ns(revision: str) -> int:
        try:
            return (repository / "snapshots" / revision).stat().st_mtime_ns
        except OSError:
            return 0

    def rank(revision: str) -> tuple[bool, int, str]:
        return revision == named, came_ns(revision), revision

    return sorted(revisions, key=rank, reverse=True)


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
    """The repositories of manifests in llama.cpp's older cache."""
    try:
        with os.scandir(folder) as entries:
            return [repo for entry in entries if (repo := manifest_repo(entry.name)) is not None]
    except OSError:
        return []


def _is_own(folder: Path) -> bool:
    try:
        return native.is_own_folder(folder, folder.stat())
    except OSError:
        return False


def _has_own_links(folder: Path, path: str) -> bool:
    """Whether no other user has made one of the links below ``folder`` that lead to ``path``."""
    below = Path(path)
    while below != folder and below != below.parent:
        try:
            if below.is_symlink() and not native.is_own(below.lstat()):
                return False
        except OSError:
            return False
        below = below.parent
    return True


def _is_inside(model: FoundModel, inside: tuple[str, ...]) -> bool:
    """Whether its path, not its target, is in one of the folders."""
    folder = os.path.realpath(Path(model.path).parent)
    return os.path.join(folder, "").startswith(inside)  # noqa: PTH118 - as above


def _kept_inside(model: FoundModel, inside: tuple[str, ...]) -> FoundModel:
    outside = next((path for path, _, _ in model.files if not path.startswith(inside)), None)
    if outside is None:
        return model
    error = ModelInvalid(
        f"{model.path}: links to {outside}, which is in none of the models folders",
        remedy="Add that folder; or add the file to the config: models: {NAME: {path: …}}; or, if the folder "
        "belongs to this user, set follow_links: true.",
    )
    return replace(model, outcome=error)


def cache_folders(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the ``known_caches`` that exist, or may exist."""
    folders = known_caches(names, environ)
    return tuple(folder for folder in folders if path_kind(folder) not in (PathKind.NOTHING, PathKind.FILE))


def known_caches(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[Path, ...]:
    """List the absolute cache folders of ``huggingface`` and ``llama.cpp``, whether they exist or not.

    The rules are those of huggingface_hub and llama.cpp (common/hf-cache.cpp of b11434,
    fs_get_cache_directory before). llama.cpp's own folder comes first; today it shares the hub's.

    Raises ConfigInvalid for a variable with an unknown user's home.
    """
    return tuple(
        dict.fromkeys(
            folder for name in names for folder in (_hub if name == "huggingface" else _llama_cpp)(environ)
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
    """Builds of 2024 and 2025 have their own flat folder; later ones use the hub's layout."""
    if given := environ.get("LLAMA_CACHE"):
        return [expanded(given, ConfigInvalid, of="$LLAMA_CACHE")]
    if given := environ.get(native.cache_variable):
        own = [expanded(given, ConfigInvalid, of=f"${native.cache_variable}") / "llama.cpp"]
    else:
        own = [home / native.cache_in_home / "llama.cpp" for home in _home(environ)]
    return [*own, *_hub(environ)]


def _home(environ: Mapping[str, str]) -> list[Path]:
    home = environ.get("HOME") or environ.get("USERPROFILE")
    return [Path(home)] if home else []
