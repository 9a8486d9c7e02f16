"""Refuses a plan that does not fit: what was needed, what is free, and the largest setting that does fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamasup.errors import DoesNotFit
from llamasup.planning.memory.estimate import MemoryEstimate, Part
from llamasup.planning.plan import LaunchPlan
from llamasup.system.text import memory_text

__all__ = ["memory_rows", "refusal"]


@dataclass(frozen=True, slots=True)
class _Words:
    """What somebody writes to have it otherwise: a setting, what goes to llama-server as it is, …"""

    setting: Callable[[str, object], str]
    between: str
    extra: str
    more_memory: str
    unchecked: str


_OPTIONS = _Words(
    lambda name, value: f"--{name.replace('_', '-')} {value}",
    between=" ",
    extra="after --",
    more_memory="free memory",
    unchecked="--no-memory-check starts it all the same.",
)
_KEYS = _Words(
    lambda name, value: f"{name}: {value}",
    between=", ",
    extra="in extra",
    more_memory="allow more (memory)",
    unchecked="check_memory: false has it started all the same.",
)


def refusal(
    name: str,
    preferred: LaunchPlan,
    fitting: LaunchPlan,
    *,
    extra: Sequence[str] = (),
    by_config: bool = False,
) -> DoesNotFit:
    """The error for ``preferred``; ``fitting`` is the largest plan found, if it fits at all.

    ``extra`` is what was passed on to llama-server, which was left as it is. ``by_config``: it is one of many
    models, of which a config says what they may take.
    """
    memory = preferred.memory
    return DoesNotFit(
        f"{name} does not fit: it needs {_short_of(memory)} ({_sizes(preferred)}).",
        remedy=_remedy(preferred, fitting, extra, _KEYS if by_config else _OPTIONS),
        details=tuple(f"{name:24}{amount}" for name, amount in memory_rows(memory)),
    )


def _short_of(memory: MemoryEstimate) -> str:
    needed, free, where = memory.host_bytes, memory.room.host_bytes, ""
    if memory.room.placed_by_hand:
        needed, free, where = memory.total_bytes, memory.available_bytes, " of host and device together"
    elif memory.room.devices and memory.lacks_device:
        needed, free, where = memory.device_bytes, memory.room.device_bytes, " on the device"
    elif memory.room.devices:
        where = " of the host's memory"
    return f"{memory_text(needed)}{where}, and {memory_text(free)} are free"


def _remedy(preferred: LaunchPlan, fitting: LaunchPlan, extra: Sequence[str], words: _Words) -> str:
    memory = fitting.memory
    otherwise = f"Or {words.more_memory}. {words.unchecked}"
    if memory.fits:
        return f"Fits: {_settings(preferred, fitting, words)}. {otherwise}"
    if memory.without_prompt_cache.fits:
        # Ours is never more than what is spare: it is the --cache-ram that was passed on.
        most_mib = memory.without_prompt_cache.spare_host_bytes >> 20
        return f"Fits: --cache-ram {most_mib} or less {words.extra}. {otherwise}"
    needs = f"Not even {_sizes(fitting)}, would fit: that needs {_short_of(memory)}"
    extra_args = f"make smaller what is passed {words.extra}, " if extra else ""
    more_memory = words.more_memory[0].upper() + words.more_memory[1:]
    return f"{needs}. {more_memory}, {extra_args}or use a smaller quantization or model. {words.unchecked}"


def _sizes(made: LaunchPlan) -> str:
    return f"{made.parallel} × {made.ctx_size_of_slot} tokens of context, KV cache {made.kv_type}"


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


def _settings(preferred: LaunchPlan, fitting: LaunchPlan, words: _Words) -> str:
    """Those that make the one out of the other."""
    layers = "auto" if fitting.gpu_layers is None else fitting.gpu_layers
    settings = (
        ("parallel", fitting.parallel, fitting.parallel != preferred.parallel),
        ("ctx_size", fitting.ctx_size_of_slot, fitting.ctx_size_of_slot != preferred.ctx_size_of_slot),
        ("kv_type", fitting.kv_type, fitting.kv_type != preferred.kv_type and "/" not in fitting.kv_type),
        ("gpu_layers", layers, fitting.gpu_layers != preferred.gpu_layers),
    )
    return words.between.join(words.setting(name, value) for name, value, differs in settings if differs)
