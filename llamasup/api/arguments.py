"""Declares the settings of a model as keyword arguments, for type checkers.

``scripts/docs.py`` writes the fields from their declarations in ``settings/model.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict


class ModelArguments(TypedDict, total=False):
    """The settings of a model as in a config (docs/configuration.md); times in seconds. None: unset."""

    # arguments: scripts/docs.py
    ctx_size: int | None
    parallel: int | None
    gpu_layers: int | Literal["auto", "all"] | None
    threads: int | None
    kv_type: str | None
    flash_attn: Literal["on", "off", "auto"] | None
    draft_model: str | Path | None
    mmproj: str | Path | None
    profile: Literal["latency", "throughput", "memory", "plain"] | None
    loras: Sequence[str | Path] | None
    devices: Sequence[str] | None
    rpc: Sequence[str] | None
    rpc_ca: str | Path | None
    rpc_cert: str | Path | None
    rpc_key: str | Path | None
    extra: Sequence[str] | None
    nice: int | None
    check_memory: bool | None
    warm_up: bool | None
    ttl_s: float | None
    pin: bool | None
    preload: bool | None
    replicas: int | None
    keep_slots: bool | None
    max_concurrent: int | None
    max_queued: int | None
    wait_timeout_s: float | None
    continue_streams: bool | None
    repair: Literal["off", "tools", "json", "both"] | None
    drain_timeout_s: float | None
    aliases: Sequence[str] | None
    # end of arguments
