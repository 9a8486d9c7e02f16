"""What the user asked for. ``None`` means "not set by hand": then the plan decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FlashAttn", "GpuLayers", "Profile", "Settings"]

FlashAttn = Literal["on", "off", "auto"]
Profile = Literal["latency", "throughput", "memory", "plain"]
GpuLayers = int | Literal["auto", "all"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one model, as given on the command line or in the config.

    ``ctx_size`` is in tokens per request (one slot), not over all slots as in llama-server.
    ``keep_slots``: what its slots hold is on disk while it is not loaded. ``adapters`` are paths of LoRA
    adapters for requests that ask for them. ``extra`` are llama-server arguments passed on as they are.
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
