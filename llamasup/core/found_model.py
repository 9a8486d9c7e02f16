"""A model file that was found: where, what it is or what is wrong with it, and which files it is made of."""

from __future__ import annotations

from dataclasses import dataclass

from llamasup.core.errors import LlamasupError
from llamasup.core.model_facts import ModelFacts

__all__ = ["FileState", "FoundModel"]

FileState = tuple[str, int, int]
"""A file as it was: real path, size in bytes, modification time in ns."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """One model, or what is wrong with it; of a split set the first file stands for all.

    ``files`` are all its files. ``ids``: what its place and name say that it is called (core.found_ids), its
    own id first.
    """

    path: str
    outcome: ModelFacts | LlamasupError
    files: tuple[FileState, ...] = ()
    ids: tuple[str, ...] = ()
