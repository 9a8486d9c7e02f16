"""The error for a plan that does not fit: memory needed, memory free, and the largest settings that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from llamasup.core.planning.memory.estimate import MemoryEstimate, memory_rows
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.system.text import memory_text
from llamasup.errors import DoesNotFit


class _Syntax(Struct, frozen=True):
    """The spelling of settings in a remedy: as command-line options, or as keys of a config."""

    setting: Callable[[str, object], str]
    separator: str
    extra: str
    more_memory: str
    unchecked: str


_OPTIONS = _Syntax(
    lambda name, value: f"--{name.replace('_', '-')} {value}",
    separator=" ",
    extra="after --",
    more_memory="free memory",
    unchecked="--no-memory-check starts it anyway.",
)
_KEYS = _Syntax(
    lambda name, value: f"{name}: {value}",
    separator=", ",
    extra="in extra",
    more_memory="allow more (memory)",
    unchecked="check_memory: false starts it anyway.",
)


def refusal(
    name: str,
    preferred: LaunchPlan,
    fitting: LaunchPlan,
    *,
    extra: Sequence[str] = (),
    by_config: bool = False,
) -> DoesNotFit:
    """Make the error for ``preferred``. ``fitting`` is the largest plan that fits, or the smallest plan.

    ``extra`` are the arguments after ``--``, which are never changed. ``by_config``: a config sets the memory
    that the model may take.
    """
    memory = preferred.memory
    return DoesNotFit(
        f"{name} does not fit: it needs {_short_of(memory)} ({_sizes(preferred)}).",
        remedy=_remedy(preferred, fitting, extra, _KEYS if by_config else _OPTIONS),
        details=tuple(f"{name:24}{amount}" for name, amount in memory_rows(memory)),
    )


def _short_of(memory: MemoryEstimate) -> str:
    needed, free, where = memory.host_bytes, memory.free.host_bytes, ""
    if memory.free.user_placed:
        needed, free, where = memory.total_bytes, memory.available_bytes, " of host and device together"
    elif memory.free.devices and memory.lacks_device:
        needed, free, where = memory.device_bytes, memory.free.device_bytes, " on the device"
    elif memory.free.devices:
        where = " of host memory"
    return f"{memory_text(needed)}{where}, and {memory_text(free)} are free"


def _remedy(preferred: LaunchPlan, fitting: LaunchPlan, extra: Sequence[str], syntax: _Syntax) -> str:
    memory = fitting.memory
    otherwise = f"Or {syntax.more_memory}. {syntax.unchecked}"
    if memory.fits:
        return f"Fits: {_settings(preferred, fitting, syntax)}. {otherwise}"
    if memory.without_prompt_cache.fits:
        # The planned prompt cache always fits, so this is a --cache-ram that the user passed.
        limit_mib = memory.without_prompt_cache.spare_host_bytes >> 20
        return f"Fits: --cache-ram {limit_mib} or less {syntax.extra}. {otherwise}"
    needs = f"The smallest plan does not fit either: {_sizes(fitting)} needs {_short_of(memory)}"
    extra_args = f"reduce the values {syntax.extra}, " if extra else ""
    more_memory = syntax.more_memory[0].upper() + syntax.more_memory[1:]
    return f"{needs}. {more_memory}, {extra_args}or use a smaller quantization or model. {syntax.unchecked}"


def _sizes(plan: LaunchPlan) -> str:
    return f"{plan.parallel} × {plan.ctx_size_of_slot} tokens of context, KV cache {plan.kv_type}"


def _settings(preferred: LaunchPlan, fitting: LaunchPlan, syntax: _Syntax) -> str:
    """The settings in which the two plans differ."""
    layers = "auto" if fitting.gpu_layers is None else fitting.gpu_layers
    settings = (
        ("parallel", fitting.parallel, fitting.parallel != preferred.parallel),
        ("ctx_size", fitting.ctx_size_of_slot, fitting.ctx_size_of_slot != preferred.ctx_size_of_slot),
        ("kv_type", fitting.kv_type, fitting.kv_type != preferred.kv_type and "/" not in fitting.kv_type),
        ("gpu_layers", layers, fitting.gpu_layers != preferred.gpu_layers),
    )
    return syntax.separator.join(syntax.setting(name, value) for name, value, differs in settings if differs)
