"""What lies in the folders, under the names that the config gives it: the registry as it is now."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from llamasup.config import Config
from llamasup.models.debounce import DebouncePolicy, debounce_by_age
from llamasup.models.registry import Registry, build
from llamasup.models.rules import ModelRule
from llamasup.models.search import Search, known_caches, search_models
from llamasup.planning.facts import DEMO, demo_file

__all__ = ["ModelInventory", "SearchPaths", "library_of", "read_library", "shelves_of"]


@dataclass(frozen=True, slots=True)
class SearchPaths:
    """Where models are looked for: ``folders`` with all below them, and ``paths`` that the config names, of
    models and of what belongs to them.
    """

    folders: tuple[Path, ...]
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelInventory:
    """``notes`` say what was left out of the folders, and why. ``search`` is what it was made from.
    ``settles_in_s``: until those count that were left out because somebody has just written them; 0: there
    are none, or they look broken.
    """

    registry: Registry
    notes: tuple[str, ...] = ()
    search: Search = field(default_factory=Search)
    settles_in_s: float = 0.0


def read_library(config: Config, before: Search | None = None) -> ModelInventory:
    """Look into all folders; blocks for a second where there are a thousand models that were never seen.

    Over what was found ``before`` counts only what has settled, as while it is watched (core.settling); of a
    folder that is not there, or may not be read, all stays: it is not known to be gone.

    Raises ConfigInvalid for names that cannot be meant.
    """
    shelves = shelves_of(config)
    search = search_models(shelves.folders, shelves.paths)
    if before is None:
        return library_of(config, search)
    search, settles_in_s = _settled(before, search)
    return replace(library_of(config, search), settles_in_s=settles_in_s)


def _settled(before: Search, now: Search) -> tuple[Search, float]:
    """What counts of what is found now, and for how long to wait for more."""
    now_s = time.time_ns() / 1e9  # as the files' times
    found = debounce_by_age(before.found, now.found, now_s, missing=now.hidden)
    out_of_sight = tuple(f"{folder.rstrip('/')}/" for folder in now.hidden)
    in_sight = {path: each for path, each in now.sources.items() if not each.path.startswith(out_of_sight)}
    # What the config names for the first time is meant as it is.
    again = [each for path, each in in_sight.items() if path in before.sources]
    sources = debounce_by_age(tuple(before.sources.values()), again, now_s, missing=now.hidden)
    settled = {each.path: each for each in sources.models}
    named = {
        path: settled.get(each.path, each) if path in before.sources else each
        for path, each in now.sources.items()
    }
    wait_s = min(found.wake_at_s, sources.wake_at_s) - now_s
    search = replace(now, found=found.models, sources=MappingProxyType(named))
    return search, wait_s if wait_s <= DebouncePolicy().sound_s else 0.0


def shelves_of(config: Config, environ: Mapping[str, str] = os.environ) -> SearchPaths:
    rules = tuple(map(_found_here, config.rules))
    models = (rule.source for rule in rules if rule.source is not None and rule.source.startswith("/"))
    said = (config.default_options, *(rule.options for rule in rules))
    beside = (path for options in said for path in options.files)
    return SearchPaths(
        tuple(dict.fromkeys((*config.models_dir, *known_caches(config.caches, environ)))),
        tuple(dict.fromkeys((*models, *beside))),
    )


def library_of(config: Config, search: Search) -> ModelInventory:
    """What is found under the config's names. Raises ConfigInvalid as ``read_library`` does."""
    registry = build(
        tuple(map(_found_here, config.rules)),
        search.found,
        sources=search.sources,
        groups=config.groups,
        defaults=config.default_options,
        default_model=config.default_model,
    )
    missed = _missed(config, search)
    missing = (error.message for folder, error in search.missing.items() if folder in missed)
    return ModelInventory(registry, (*missing, *search.notes), search)


def _missed(config: Config, search: Search) -> set[str]:
    """The folders that should be there. Of the places of a cache one is enough, except where models were."""
    missed = set(map(str, config.models_dir))
    for cache in config.caches:
        places = list(map(str, known_caches((cache,), os.environ)))
        none_is_there = all(place in search.missing for place in places)
        missed.update(
            place
            for place in places
            if none_is_there or any(each.path.startswith(f"{place}/") for each in search.found)
        )
    return missed


def _found_here(rule: ModelRule) -> ModelRule:
    """The demo model is written where it is wanted for the first time. A file of that name in the current
    folder is none of a config's.
    """
    return replace(rule, source=str(demo_file())) if rule.source == DEMO else rule
