"""What is loaded together with a model, of the files beside it: its projector, its LoRA adapters (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType

from llamasup.errors import LlamasupError
from llamasup.models.found import FileState, FoundModel
from llamasup.planning.adapters import adapters_of
from llamasup.planning.projectors import Pairing, pairings_of

__all__ = ["Attachments", "projector_going_with"]

_NO_SOURCES: Mapping[str, FoundModel] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Attachments:
    """By the model's path. ``pairings`` are its projector, or why none of those beside it is."""

    pairings: Mapping[str, Pairing]
    adapters: Mapping[str, tuple[str, ...]]
    _files: Mapping[str, tuple[FileState, ...]]

    @classmethod
    def among(
        cls, found: Sequence[FoundModel], sources: Mapping[str, FoundModel] = _NO_SOURCES
    ) -> Attachments:
        """``sources`` are by the paths that a config names: those may lead where others may not."""
        there = (each for each in sources.values() if each.files)
        here = {each.path: each.outcome for each in (*found, *there)}
        sound = {path: facts for path, facts in here.items() if not isinstance(facts, LlamasupError)}
        broken = [path for path in here if path not in sound]
        by_path = {**{each.path: each for each in found}, **sources}
        files = {path: each.files for path, each in by_path.items()}
        return cls(pairings_of(sound, broken), adapters_of(sound, broken), files)

    def states_of(self, paths: Iterable[str]) -> tuple[FileState, ...]:
        """The files of these models, projectors or adapters, as far as they are there."""
        return tuple(state for path in paths for state in self._files.get(path, ()))


def projector_going_with(model: str, found: Sequence[FoundModel]) -> str | None:
    """The projector to remove together with ``model``. Both are paths, and both are in ``found``.

    It is the projector that a plan would load with the model. None if another model is paired with it or may
    be, by its own path or through a link to it, or if a file in its folder is unreadable: that file may be
    another quantization of the model, partially copied.
    """
    attachments = Attachments.among(found)
    mine = attachments.pairings.get(model)
    if mine is None or mine.projector is None:
        return None
    path = mine.projector.path
    others = [
        projector
        for other, pair in attachments.pairings.items()
        if other != model
        for projector in (*((pair.projector.path,) if pair.projector else ()), *pair.undecided)
    ]
    used = {path_used for other in others for path_used in (other, *_real_paths(attachments, other))}
    unread = any(
        isinstance(each.outcome, LlamasupError) and PurePath(each.path).parent == PurePath(path).parent
        for each in found
    )
    return None if path in used or unread else path


def _real_paths(attachments: Attachments, path: str) -> tuple[str, ...]:
    return tuple(real for real, _, _ in attachments.states_of([path]))
