"""The names of models in Ollama's API: ``name[:tag]``, where a missing tag is ``latest`` (pure)."""

from __future__ import annotations

from typing import Final

_LATEST: Final = ":latest"


def shown_name(id_: str) -> str:
    """The id of a model with a tag. Clients compare the names of a list with those that users write."""
    return id_ if ":" in id_ else id_ + _LATEST


def spellings(name: str) -> tuple[str, ...]:
    """The names under which a model may be served, the first preferred: ``qwen3:4b`` may be ``qwen3-4b``."""
    if name.endswith(_LATEST):
        return name, name.removesuffix(_LATEST)
    base, colon, tag = name.rpartition(":")
    return (name, f"{base}-{tag}") if colon else (name,)
