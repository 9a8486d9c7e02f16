"""What is loaded together with a model, of the files beside it: its projector, its LoRA adapters (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamasup.core.adapters import adapters_of
from llamasup.core.errors import LlamasupError
from llamasup.core.found_model import FileState, FoundModel
from llamasup.core.inspection import projectors_of

__all__ = ["Companions"]


@dataclass(frozen=True, slots=True)
class Companions:
    """By the model's path."""

    projectors: Mapping[str, str]
    adapters: Mapping[str, tuple[str, ...]]
    _files: Mapping[str, tuple[FileState, ...]]

    @classmethod
    def among(cls, found: Sequence[FoundModel]) -> Companions:
        sound = {each.path: each.outcome for each in found if not isinstance(each.outcome, LlamasupError)}
        broken = [each.path for each in found if each.path not in sound]
        files = {each.path: each.files for each in found}
        return cls(projectors_of(sound, broken), adapters_of(sound, broken), files)

    def files_of(self, path: str, *, projector: bool, adapters: tuple[str, ...]) -> tuple[FileState, ...]:
        """The files of the model's projector, if it takes the one beside it, and of these adapters."""
        beside = [*([self.projectors[path]] if projector and path in self.projectors else []), *adapters]
        return tuple(state for each in beside for state in self._files.get(each, ()))
