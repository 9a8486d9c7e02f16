"""Refuses a plan that does not fit: what was needed, what is free, and the largest setting that does fit."""

from __future__ import annotations

from llamasup.core.errors import DoesNotFit
from llamasup.core.memory import MemoryEstimate, Part
from llamasup.core.plan import LaunchPlan
from llamasup.core.units import memory_text

__all__ = ["memory_rows", "refusal"]


def refusal(name: str, preferred: LaunchPlan, fitting: LaunchPlan) -> DoesNotFit:
    """The error for ``preferred``; ``fitting`` is the largest plan found, if it fits at all."""
    memory = preferred.memory
    needed, free = memory_text(memory.total_bytes), memory_text(memory.available_bytes)
    what = (
        f"{preferred.parallel} × {preferred.ctx_size_of_slot} tokens of context, KV cache {preferred.kv_type}"
    )
    if fitting.memory.fits:
        remedy = f"Fits: {_options(fitting)}. Or free memory; --no-memory-check starts it all the same."
    else:
        remedy = "No setting fits: use a smaller quantization or model, or free memory."
    return DoesNotFit(
        f"{name} does not fit: it needs {needed} ({what}), and {free} are free.",
        remedy=remedy,
        details=tuple(f"{name:24}{amount}" for name, amount in memory_rows(memory)),
    )


def memory_rows(memory: MemoryEstimate) -> tuple[tuple[str, str], ...]:
    """The memory table: every part, the sum, and what is free."""
    split = memory.room.devices > 0
    rows = [(part.name, _placed(part, split=split)) for part in memory.parts]
    rows.append(("needed", _sum(memory.host_bytes, memory.device_bytes, split=split)))
    rows.append(("free", _sum(memory.room.host_bytes, memory.room.device_bytes, split=split)))
    return tuple(rows)


def _placed(part: Part, *, split: bool) -> str:
    return _sum(part.host_bytes, part.device_bytes, split=split)


def _sum(host_bytes: int, device_bytes: int, *, split: bool) -> str:
    if not split:
        return memory_text(host_bytes + device_bytes)
    return f"{memory_text(host_bytes)} host, {memory_text(device_bytes)} device"


def _options(made: LaunchPlan) -> str:
    kv_type = "" if "/" in made.kv_type else f" --kv-type {made.kv_type}"
    return f"--parallel {made.parallel} --ctx-size {made.ctx_size_of_slot}{kv_type}"
