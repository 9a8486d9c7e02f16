"""Where other programs keep the models that they have downloaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from llamasup.core.errors import ConfigInvalid
from llamasup.effects.given_paths import expanded
from llamasup.effects.path_kind import PathKind, path_kind

__all__ = ["cache_folders", "cache_places"]


def cache_folders(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Those of ``cache_places`` that are there, or may be."""
    places = cache_places(names, environ)
    return tuple(place for place in places if path_kind(place) not in (PathKind.NOTHING, PathKind.FILE))


def cache_places(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where the folders of ``huggingface`` and ``llama.cpp`` are, or will be: absolute, each once.

    As huggingface_hub and llama.cpp (common/hf-cache.cpp of b11434, fs_get_cache_directory before) look
    for them. llama.cpp's own comes first where it has one: today it shares the hub's.

    Raises ConfigInvalid for a variable that leads to nobody's home.
    """
    return tuple(
        dict.fromkeys(
            place for name in names for place in (_hub if name == "huggingface" else _llama_cpp)(environ)
        )
    )


def _hub(environ: Mapping[str, str]) -> list[Path]:
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if given := environ.get(variable):
            return [expanded(given, ConfigInvalid, of=f"${variable}") / below]
    return [home / ".cache/huggingface/hub" for home in _home(environ)]


def _llama_cpp(environ: Mapping[str, str]) -> list[Path]:
    """Builds of 2024 and 2025 have a folder of their own without subfolders; later ones the hub's layout."""
    if given := environ.get("LLAMA_CACHE"):
        return [expanded(given, ConfigInvalid, of="$LLAMA_CACHE")]
    if sys.platform == "darwin":
        own = [home / "Library/Caches/llama.cpp" for home in _home(environ)]
    elif given := environ.get("XDG_CACHE_HOME"):
        own = [expanded(given, ConfigInvalid, of="$XDG_CACHE_HOME") / "llama.cpp"]
    else:
        own = [home / ".cache/llama.cpp" for home in _home(environ)]
    return [*own, *_hub(environ)]


def _home(environ: Mapping[str, str]) -> list[Path]:
    return [Path(home)] if (home := environ.get("HOME")) else []
