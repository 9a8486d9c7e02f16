"""The model inventory: the models in the folders with the names that the config gives them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct, field
from msgspec.structs import replace

from llamasup.core.config.config_keys import Config
from llamasup.core.models.debounce import DebouncePolicy, below, debounce_by_age
from llamasup.core.models.registry import Registry, build
from llamasup.core.models.rules import ModelRule
from llamasup.core.models.search import Search, known_caches, search_models
from llamasup.core.planning.facts import DEMO, demo_file


class SearchPaths(Struct, frozen=True):
    """``folders`` are searched recursively; ``paths`` are single models and attachments."""

    folders: tuple[Path, ...]
    paths: tuple[str, ...]
    follow_links: bool = False


class ModelInventory(Struct, frozen=True):
    """``notes`` explain which files of the folders were ignored. ``search`` is the result it was built from.
    ``settles_in_s``: the time until new files are used; 0 if no file is new, or new files look broken.
    """

    registry: Registry
    notes: tuple[str, ...] = ()
    search: Search = field(default_factory=Search)
    settles_in_s: float = 0.0


def read_inventory(config: Config, before: Search | None = None) -> ModelInventory:
    """Search all folders.

    Blocks for a second if a thousand models are new.

    Compared with the search ``before``, only changes that have settled are used (models/debounce.py). The
    models of a folder that is missing or not readable stay, as they are not known to be gone.

    Raises ConfigInvalid for invalid names.
    """
    paths = search_paths(config)
    search = search_models(paths.folders, paths.paths, follow_links=paths.follow_links)
    if before is None:
        return build_inventory(config, search)
    search, settles_in_s = _settled(before, search)
    return replace(build_inventory(config, search), settles_in_s=settles_in_s)


def _settled(before: Search, now: Search) -> tuple[Search, float]:
    """Find the changes of ``now`` that have settled, and how long to wait for the others."""
    now_s = time.time_ns() / 1e9  # comparable with the files' times
    found = debounce_by_age(before.found, now.found, now_s, missing=now.hidden)
    hidden = below(now.hidden)
    # Models that are new in the config are used at once.
    known = [
        model
        for path, model in now.sources.items()
        if path in before.sources and not model.path.startswith(hidden)
    ]
    sources = debounce_by_age(tuple(before.sources.values()), known, now_s, missing=now.hidden)
    settled = {model.path: model for model in sources.models}
    named = {
        path: settled.get(model.path, model) if path in before.sources else model
        for path, model in now.sources.items()
    }
    wait_s = min(found.wake_at_s, sources.wake_at_s) - now_s
    search = replace(now, found=found.models, sources=MappingProxyType(named))
    return search, wait_s if wait_s <= DebouncePolicy().sound_s else 0.0


def search_paths(config: Config, environ: Mapping[str, str] = os.environ) -> SearchPaths:
    rules = tuple(map(_found_here, config.rules))
    models = (rule.source for rule in rules if rule.source is not None and Path(rule.source).is_absolute())
    all_options = (config.default_options, *(rule.options for rule in rules))
    attachments = (path for options in all_options for path in options.files)
    return SearchPaths(
        tuple(dict.fromkeys((*config.models_dir, *known_caches(config.caches, environ)))),
        tuple(dict.fromkeys((*models, *attachments))),
        config.follow_links,
    )


def build_inventory(config: Config, search: Search) -> ModelInventory:
    """Give the found models the config's names. Raises ConfigInvalid like ``read_inventory``."""
    registry = build(
        tuple(map(_found_here, config.rules)),
        search.found,
        sources=search.sources,
        groups=config.groups,
        defaults=config.default_options,
        default_model=config.default_model,
    )
    expected = _expected_folders(config, search)
    missing = (error.message for folder, error in search.missing.items() if folder in expected)
    return ModelInventory(registry, (*missing, *search.notes), search)


def _expected_folders(config: Config, search: Search) -> set[str]:
    """The folders that must exist. Of the folders of a cache one is enough, unless models were in others."""
    expected = set(map(str, config.models_dir))
    for cache in config.caches:
        folders = list(map(str, known_caches((cache,), os.environ)))
        none_exists = all(folder in search.missing for folder in folders)
        expected.update(
            folder
            for folder in folders
            if none_exists or any(model.path.startswith(f"{folder}/") for model in search.found)
        )
    return expected


def _found_here(rule: ModelRule) -> ModelRule:
    """Write the demo model if the rule names it. In a config the name never means a file in the current
    folder.
    """
    return replace(rule, source=str(demo_file())) if rule.source == DEMO else rule
