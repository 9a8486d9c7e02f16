"""The names that a model is asked for by: decided here once, for llamasup and for llama-server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

from llamasup.core.errors import UsageInvalid

__all__ = ["Names", "names_of"]

_PART = re.compile(r"-\d{5}-of-\d{5}$")  # llama_split_path of llama.cpp


@dataclass(frozen=True, slots=True)
class Names:
    """``name`` is the one that answers carry; ``aliases`` are others that mean the same model."""

    name: str
    aliases: tuple[str, ...] = ()


def names_of(model_path: str, alias: str | None) -> Names:
    """From ``--alias``, several separated by commas; else from the file's name without its part number.

    Raises UsageInvalid for an alias without letters.
    """
    if alias is None:
        stem = _PART.sub("", PurePath(model_path).stem)
        # llama-server would read a comma as the end of the name.
        return Names(stem.replace(",", "_").strip() or "model")
    names = [name.strip() for name in alias.split(",")]
    if not all(names):
        raise UsageInvalid(
            f"--alias {alias!r} has an empty name", remedy="give one name, or several with a comma between"
        )
    first, *others = dict.fromkeys(names)
    return Names(first, tuple(others))
