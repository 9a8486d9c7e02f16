"""What lies in the folders, under the names that the config gives it: the registry as it is now."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from llamasup.config import Config
from llamasup.core.model_rules import ModelRule
from llamasup.core.registry import Registry, build
from llamasup.effects.model_places import cache_folders
from llamasup.effects.model_search import Search, search_models
from llamasup.runtime.launch import DEMO, find_model

__all__ = ["Library", "Shelves", "library_of", "read_library", "shelves_of"]


@dataclass(frozen=True, slots=True)
class Shelves:
    """Where models are looked for: ``folders`` with all below them, and ``paths`` that the config names, of
    models and of what belongs to them.
    """

    folders: tuple[Path, ...]
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Library:
    """``notes`` say what was left out of the folders, and why. ``search`` is what it was made from."""

    registry: Registry
    notes: tuple[str, ...] = ()
    search: Search = field(default_factory=Search)


def read_library(config: Config, before: Search | None = None) -> Library:
    """Look into all folders; blocks for a second where there are a thousand models that were never seen. Of a
    folder that is not there, or may not be read, what was found ``before`` stays: it is not known to be gone.

    Raises ConfigInvalid for names that cannot be meant.
    """
    shelves = shelves_of(config)
    search = search_models(shelves.folders, shelves.paths)
    if before is not None and search.hidden:
        missing = tuple(f"{folder.rstrip('/')}/" for folder in search.hidden)
        known = {each.path for each in search.found}
        kept = (each for each in before.found if each.path.startswith(missing) and each.path not in known)
        sources = {
            path: before.sources.get(path, found) if path.startswith(missing) else found
            for path, found in search.sources.items()
        }
        search = replace(search, found=(*search.found, *kept), sources=MappingProxyType(sources))
    return library_of(config, search)


def shelves_of(config: Config, environ: Mapping[str, str] = os.environ) -> Shelves:
    rules = tuple(map(_found_here, config.rules))
    models = (rule.source for rule in rules if rule.source is not None and rule.source.startswith("/"))
    said = (config.default_options, *(rule.options for rule in rules))
    beside = (path for options in said for path in options.files)
    return Shelves(
        tuple(dict.fromkeys((*config.models_dir, *cache_folders(config.caches, environ)))),
        tuple(dict.fromkeys((*models, *beside))),
    )


def library_of(config: Config, search: Search) -> Library:
    """What is found under the config's names. Raises ConfigInvalid as ``read_library`` does."""
    registry = build(
        tuple(map(_found_here, config.rules)),
        search.found,
        sources=search.sources,
        groups=config.groups,
        defaults=config.default_options,
        default_model=config.default_model,
    )
    missing = tuple(error.message for error in search.missing.values())
    return Library(registry, (*missing, *search.notes), search)


def _found_here(rule: ModelRule) -> ModelRule:
    """The demo model is written where it is wanted for the first time."""
    return replace(rule, source=str(find_model(DEMO))) if rule.source == DEMO else rule
