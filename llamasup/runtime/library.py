"""What lies in the folders, under the names that the config gives it: the registry as it is now."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from llamasup.config import Config
from llamasup.core.errors import ModelMissing
from llamasup.core.found_model import FoundModel
from llamasup.core.model_rules import ModelRule
from llamasup.core.registry import Registry, build
from llamasup.effects.model_folder import list_models, look_at
from llamasup.runtime.launch import DEMO, find_model

__all__ = ["Library", "read_library"]


@dataclass(frozen=True, slots=True)
class Library:
    """``notes`` say what was left out of the folders, and why."""

    registry: Registry
    notes: tuple[str, ...] = ()


def read_library(config: Config) -> Library:
    """Look into all folders; blocks for a second where there are a thousand models that were never seen.

    Raises ConfigInvalid for names that cannot be meant.
    """
    found: dict[str, FoundModel] = {}
    notes: list[str] = []
    for folder in config.models_dir:
        try:
            listed = list_models(folder)
        except ModelMissing as error:
            notes.append(error.message)
            continue
        notes += listed.notes
        found |= {model.path: model for model in listed.models}
    rules = tuple(map(_found_here, config.rules))
    for rule in rules:
        if rule.source is not None and rule.source.startswith("/") and rule.source not in found:
            found[rule.source] = look_at(Path(rule.source))
    registry = build(
        rules,
        tuple(found.values()),
        groups=config.groups,
        defaults=config.default_options,
        default_model=config.default_model,
    )
    return Library(registry, tuple(notes))


def _found_here(rule: ModelRule) -> ModelRule:
    """The demo model is written where it is wanted for the first time."""
    return replace(rule, source=str(find_model(DEMO))) if rule.source == DEMO else rule
