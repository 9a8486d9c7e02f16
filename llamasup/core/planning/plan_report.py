"""The reports of a plan: its JSON object, what it reduces, and the error if it does not fit (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct, to_builtins

from llamasup.core.llama_server.plan_limits import Change, Reduction
from llamasup.core.planning.ladder import changes
from llamasup.core.planning.memory.estimate import MemoryEstimate, memory_rows
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.settings.model import Profile, Settings
from llamasup.core.system.process.child import RuntimeKind
from llamasup.core.system.text import memory_text
from llamasup.errors import DoesNotFit, LlamasupError


def plan_as_json(
    plan: LaunchPlan,
    *,
    model: str,
    path: str,
    kind: RuntimeKind,
    version: str,
    profile: Profile | None,
    alternatives: Sequence[LaunchPlan],
    refused: LlamasupError | None,
) -> dict[str, Any]:
    """Make the JSON object of a plan.

    ``alternatives`` are the plans considered, the preferred one first. ``refused`` is the error of ``run``.
    """
    measured, drafts = plan.measured, plan.draft_counts
    return {
        "model": model,
        "runtime": {"path": path, "kind": kind, "version": version},
        "argv": list(plan.argv),
        "env": plan.env_shown,
        "env_reasons": dict(plan.env_reasons),
        "reasons": to_builtins(plan.reasons),
        "memory": _memory_as_json(plan.memory),
        "profile": profile,
        "measured": measured and {"taken": measured.changes.as_json, "reason": measured.why},
        "drafts": drafts and {"proposed": drafts.proposed, "accepted": drafts.accepted},
        "slots": plan.parallel,
        "ctx_size": plan.ctx_size,  # of one request, as in the status
        "alternatives": [_alternative_as_json(alternative) for alternative in alternatives],
        "remedy": None if refused is None else refused.remedy,
    }


_OF_MEMORY = (
    *("weights_bytes", "kv_bytes", "compute_bytes", "prompt_cache_bytes", "total_bytes", "available_bytes"),
    *("fits", "measured"),
)


def _memory_as_json(memory: MemoryEstimate) -> dict[str, Any]:
    return {
        **{name: getattr(memory, name) for name in _OF_MEMORY},
        "host": {"needed_bytes": memory.host_bytes, "available_bytes": memory.free.host_bytes},
        "devices": {"needed_bytes": memory.device_bytes, "available_bytes": memory.free.device_bytes},
        "parts": [
            {"name": part.name, "host_bytes": part.host_bytes, "device_bytes": part.device_bytes}
            for part in memory.parts
        ],
    }


def _alternative_as_json(plan: LaunchPlan) -> dict[str, Any]:
    return {
        "parallel": plan.parallel,
        "ctx_size": plan.ctx_size_of_slot,
        "kv_type": plan.kv_type,
        "gpu_layers": plan.gpu_layers,
        "total_bytes": plan.memory.total_bytes,
        "fits": plan.memory.fits,
    }


def reductions(preferred: LaunchPlan, made: LaunchPlan, settings: Settings) -> tuple[Reduction, ...]:
    """List the settings that are smaller than in ``preferred``, the plan without limits.

    llamasup never reduces a setting of the user, but llama-server limits the context of a request to that of
    the model.
    """
    reduced = [Reduction(change, made.bounds.why) for change in changes(preferred, made)]
    asked = settings.ctx_size
    if asked is not None and made.ctx_size < asked:
        why = f"the model was trained for {made.ctx_size:,} tokens, and this build gives no request more"
        reduced.append(Reduction(Change("--ctx-size", str(asked), str(made.ctx_size)), why, fixed=True))
    return tuple(reduced)


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
