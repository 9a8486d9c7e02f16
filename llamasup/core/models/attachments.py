"""Finds the projector and the LoRA adapters of a model among the files next to it (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType

from msgspec import Struct

from llamasup.core.models.found import FileState, FoundModel
from llamasup.core.planning.adapters import adapters_of
from llamasup.core.planning.projectors import Pairing, pairings_of
from llamasup.errors import LlamasupError

NO_SOURCES: Mapping[str, FoundModel] = MappingProxyType({})


class Attachments(Struct, frozen=True):
    """The projector (or why none was chosen) and the adapters of each model, by the path of the model."""

    pairings: Mapping[str, Pairing]
    adapters: Mapping[str, tuple[str, ...]]
    _files: Mapping[str, tuple[FileState, ...]]

    @classmethod
    def among(
        cls, found: Sequence[FoundModel], sources: Mapping[str, FoundModel] = NO_SOURCES
    ) -> Attachments:
        """Pair the models with the files next to them.

        The paths of ``sources`` (path → file) may lead anywhere.
        """
        there = (entry for entry in sources.values() if entry.files)
        here = {entry.path: entry.outcome for entry in (*found, *there)}
        sound = {path: facts for path, facts in here.items() if not isinstance(facts, LlamasupError)}
        broken = [path for path in here if path not in sound]
        by_path = {**{entry.path: entry for entry in found}, **sources}
        files = {path: entry.files for path, entry in by_path.items()}
        return cls(pairings_of(sound, broken), adapters_of(sound, broken), files)

    def states_of(self, paths: Iterable[str]) -> tuple[FileState, ...]:
        """Read the states of these files, without missing ones."""
        return tuple(state for path in paths for state in self._files.get(path, ()))


def projector_going_with(model: str, found: Sequence[FoundModel]) -> str | None:
    """Find the projector to remove together with ``model``. Both are paths, and both are in ``found``.

    A plan would load this projector with the model. None if another model may use it, by its path or through
    a link, or if a file in its folder is unreadable: it may be an unfinished copy of another quantization.
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
        isinstance(entry.outcome, LlamasupError) and PurePath(entry.path).parent == PurePath(path).parent
        for entry in found
    )
    return None if path in used or unread else path


def _real_paths(attachments: Attachments, path: str) -> tuple[str, ...]:
    return tuple(real for real, _, _ in attachments.states_of([path]))
