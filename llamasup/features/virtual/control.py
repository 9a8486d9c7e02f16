"""Virtual models in the control API: they are explained, and cannot be loaded (an ``OtherModels``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llamasup.errors import Conflict
from llamasup.features.virtual.backend import VirtualBackend


class VirtualModels:
    def __init__(self, backend: VirtualBackend) -> None:
        self._backend = backend

    def why(self, model: str, why_of: Callable[[str], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        name = self._backend.named(model)
        return None if name is None else self._backend.why(name, why_of)

    def refuse(self, what: str, model: str) -> None:
        if (name := self._backend.named(model)) is not None:
            raise Conflict(
                f"{name!r} is a virtual model, which has no process of its own.",
                remedy=f"Name a model that it stands for; `llamasup why {name}` lists them.",
            )
