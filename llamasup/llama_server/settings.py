"""The settings of one model, and the names that requests use for it.

``None`` means that the user did not set it and the plan decides.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Literal

from msgspec import Struct

from llamasup.errors import UsageInvalid

__all__ = ["FlashAttn", "GpuLayers", "Names", "Profile", "Settings", "names_of"]


FlashAttn = Literal["on", "off", "auto"]
Profile = Literal["latency", "throughput", "memory", "plain"]
GpuLayers = int | Literal["auto", "all"]


class Settings(Struct, frozen=True):
    """The settings of one model, as given on the command line or in the config.

    ``ctx_size`` is in tokens per request (one slot), not over all slots as in llama-server.
    ``keep_slots``: save the slots on disk while the model is not loaded. ``adapters``: paths of LoRA adapters
    that requests can choose. ``extra``: llama-server arguments, passed on unchanged.
    """

    alias: str | None = None
    ctx_size: int | None = None
    parallel: int | None = None
    gpu_layers: GpuLayers | None = None
    threads: int | None = None
    kv_type: str | None = None
    flash_attn: FlashAttn | None = None
    draft_model: str | None = None
    mmproj: str | None = None
    profile: Profile | None = None
    check_memory: bool = True
    keep_slots: bool = False
    adapters: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


_PART = re.compile(r"-\d{5}-of-\d{5}$")  # llama_split_path of llama.cpp


class Names(Struct, frozen=True):
    """``name`` is the one in answers; ``aliases`` are other names of the same model."""

    name: str
    aliases: tuple[str, ...] = ()


def names_of(model_path: str, alias: str | None) -> Names:
    """From ``--alias``, with commas between several names; else the file's name without its part number.

    Raises UsageInvalid for an empty name.
    """
    if alias is None:
        stem = _PART.sub("", PurePath(model_path).stem)
        # For llama-server a comma ends the name.
        return Names(stem.replace(",", "_").strip() or "model")
    names = [name.strip() for name in alias.split(",")]
    if not all(names):
        raise UsageInvalid(
            f"--alias {alias!r} has an empty name", remedy="give one name, or several with a comma between"
        )
    first, *others = dict.fromkeys(names)
    return Names(first, tuple(others))
