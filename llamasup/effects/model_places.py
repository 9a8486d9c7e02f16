"""Where other programs keep the models that they have downloaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from llamasup.core.errors import ConfigInvalid
from llamasup.effects.given_paths import expanded

__all__ = ["cache_folders"]


def cache_folders(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The folders of ``huggingface`` and ``llama.cpp`` that are there, each once.

    As huggingface_hub and llama.cpp (common/hf-cache.cpp of b11434, fs_get_cache_directory before) look
    for them. llama.cpp's own comes first where it has one: today it shares the hub's.

    Raises ConfigInvalid for a variable that leads to nobody's home.
    """
    candidates = [
        folder for name in names for folder in (_hub if name == "huggingface" else _llama_cpp)(environ)
    ]
    return tuple(dict.fromkeys(folder for folder in candidates if folder.is_dir()))


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
        own = [Path(given) / "llama.cpp"]
    else:
        own = [home / ".cache/llama.cpp" for home in _home(environ)]
    return [*own, *_hub(environ)]


def _home(environ: Mapping[str, str]) -> list[Path]:
    return [Path(home)] if (home := environ.get("HOME")) else []
