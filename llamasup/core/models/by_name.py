"""Finds the file of a model by its name in ``llamasup list``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath

from llamasup.core.hub.reference import is_reference, parse_ref
from llamasup.core.hub.store import downloaded
from llamasup.core.models.found import FoundModel
from llamasup.core.models.names import folded
from llamasup.core.models.registry import Unknown, build
from llamasup.core.models.search import cache_folders, search_models
from llamasup.core.planning.facts import DEMO
from llamasup.core.system.storage.folders import models_folder
from llamasup.core.system.storage.paths import PathKind, path_kind
from llamasup.core.system.text import one_of_these
from llamasup.errors import ModelMissing

_is_name = re.compile(r"[\w.+@-]+(?:/[\w.+@-]+)?(?::[\w.+@-]+)?").fullmatch


def default_folders() -> tuple[Path, ...]:
    """The folders of ``llamasup list`` that exist."""
    caches = cache_folders(("huggingface", "llama.cpp"), os.environ)
    folders = dict.fromkeys((models_folder(), *caches))
    return tuple(folder for folder in folders if path_kind(folder) is not PathKind.NOTHING)


def file_of(name: str, *, folders: tuple[Path, ...] | None = None, required: bool = True) -> str:
    """Find the path of the file with this name.

    Returns ``name`` itself if it is a path, a URL, or a model that is not on this machine yet.

    The name is a name in ``list --all``, or the name of the file. llamasup searches the folders only if no
    file has the name. Raises ModelMissing for a name of several files, and if it is ``required`` for a name
    that nothing has.
    """
    is_file = name.lower().endswith(".gguf")
    is_path = (PurePath(name).name != name) if is_file else (name.startswith(".") or _is_name(name) is None)
    if is_path or name == DEMO or path_kind(Path(name)) is not PathKind.NOTHING:
        return name
    is_ref = is_reference(name)
    if is_ref and (ref := parse_ref(name)) is not None and downloaded(ref, models_folder()):
        return name
    found = _find(name, search_models(default_folders() if folders is None else folders).found)
    if not isinstance(found, Unknown):
        return found
    if is_ref or is_file or not required:
        return name
    raise ModelMissing(
        f"There is no model {name!r}: no such file, and no such name in `llamasup list`.",
        remedy=f"{_did_you_mean(found)}To download one, name its repository on Hugging Face: llamasup run "
        "org/repo:QUANT. Names of Ollama's library are not known.",
    )


def did_you_mean(name: str, folder: Path) -> str:
    """Suggest the most similar name in the folder, as a question for a remedy. Empty: no name is similar."""
    found = _find(name, search_models((folder,)).found)
    return _did_you_mean(found) if isinstance(found, Unknown) else ""


def _did_you_mean(found: Unknown) -> str:
    return f"{one_of_these(found.near[:1])} ".lstrip()


def _find(name: str, files: Sequence[FoundModel]) -> str | Unknown:
    """The path of the only file with this name. Raises ModelMissing for a name of several files."""
    paths = [file.path for file in files if PurePath(file.path).name == name]
    if len(paths) == 1:
        return paths[0]
    found = build((), files).find(name)
    if not isinstance(found, Unknown):
        return found.source
    if (problem := found.refused) is not None:
        use = f"Use {' or '.join(found.near)}" if found.near else "Give the path of one of them"
        raise ModelMissing(problem.message, remedy=f"{use}.")
    # Files that are no models by themselves, such as projectors.
    paths = paths or [file.path for file in files if file.ids and folded(file.ids[0]) == folded(name)]
    if len(paths) > 1:
        raise ModelMissing(
            f"{len(paths)} files have the name {name!r}: {', '.join(paths)}.",
            remedy="Give the path of one of them.",
        )
    return paths[0] if paths else found
