"""Puts the virtual models of a config in front of the models of ``serve``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llamasup.core.config.config_keys import Config
from llamasup.errors import Conflict
from llamasup.features.virtual.backend import Models, VirtualBackend


class VirtualSource:
    """A ``CatalogueSource``. The control API explains virtual models, and cannot load them."""

    def __init__(self, models: Models, config: Config) -> None:
        self.backend = VirtualBackend(models, config.virtual_models)

    def apply(self, config: Config) -> None:
        self.backend.apply(config.virtual_models)

    def why(self, model: str, why_of: Callable[[str], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        name = self.backend.named(model)
        return None if name is None else self.backend.why(name, why_of)

    def refuse(self, what: str, model: str) -> None:
        if (name := self.backend.named(model)) is not None:
            raise Conflict(
                f"{name!r} is a virtual model, which has no process of its own.",
                remedy=f"Name a model that it stands for; `llamasup why {name}` lists them.",
            )
