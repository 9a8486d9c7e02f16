"""Looks beside a model file that stands for itself for what may belong to it. Which of it does is decided in
core.projectors; models of folders are paired with what was found there (core.companions).
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from llamasup.core.errors import ModelInvalid, ModelMissing
from llamasup.core.model_facts import ModelClass
from llamasup.core.projectors import Candidate
from llamasup.effects.model_file import read_model

__all__ = ["projectors_beside"]

_MOST_ENTRIES = 10_000  # of the folder; listing them takes some 10 ms
_MOST_PROJECTORS = 32  # headers that are read, each once and then from the cache


def projectors_beside(model: Path, *, cache_folder: Path | None = None) -> tuple[list[Candidate], list[str]]:
    """The projectors in the model's folder, and the names of the other model files there.

    Only files that are called so ("mmproj") are looked into; one that cannot be read is none.
    """
    try:
        with os.scandir(model.parent) as entries:
            names = sorted(
                entry.name
                for entry in islice(entries, _MOST_ENTRIES)
                if entry.name.lower().endswith(".gguf") and entry.name != model.name
            )
    except OSError:
        return [], []
    projectors = [name for name in names if "mmproj" in name.lower()]
    candidates = []
    for name in projectors[:_MOST_PROJECTORS]:
        path = model.parent / name
        try:
            facts = read_model(path, cache_folder=cache_folder)
        except (ModelInvalid, ModelMissing):
            continue
        if facts.model_class is ModelClass.PROJECTOR:
            candidates.append(Candidate(str(path), facts))
    return candidates, [name for name in names if name not in projectors]
