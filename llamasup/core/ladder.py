"""Smaller and smaller plans: down which order, how far before a start, and how far after a crash (S5).

The order is that of the promise: parallel slots, context, KV type, layers on the GPU. Only what the user
did not set by hand is made smaller.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from llamasup.core.bounds import Adjustment, Bounds, Change
from llamasup.core.diagnosis import Diagnosis
from llamasup.core.plan import LaunchPlan

__all__ = ["MOST_STEPS", "Admission", "admit", "is_out_of_memory", "step_down"]

MOST_STEPS = 3
# Below this a chat with a system prompt and tools no longer fits; a person can still ask for it.
_LEAST_CTX_SIZE = 2048
_OUT_OF_MEMORY = frozenset({"out_of_memory_host", "out_of_memory_device", "fit_failed"})
# What a kernel of the KV cache or of flash attention looks like in the last words (#28524).
_KV_KERNEL = re.compile(
    r"fattn|flash[-_ ]?attn|set[-_]rows|cpy|kv[-_ ]cache|cache type|quantized V", re.IGNORECASE
)
_CRASHES = frozenset({"segfault", "assertion", "aborted", "device_error", "kv_unsupported"})

Candidate = Callable[[Bounds], LaunchPlan]


@dataclass(frozen=True, slots=True)
class Admission:
    """The plan to start, and what was considered on the way to it, the preferred plan first."""

    plan: LaunchPlan
    considered: tuple[LaunchPlan, ...]

    @property
    def preferred(self) -> LaunchPlan:
        return self.considered[0]


def admit(candidate: Candidate, start: Bounds) -> Admission:
    """The first plan down the ladder that fits; the preferred one where none does."""
    made = candidate(start)
    considered = [made]
    while not made.memory.fits:
        bounds = _smaller(made, "so that it fits in memory")
        if bounds is None:
            return Admission(considered[0], tuple(considered))
        made = candidate(bounds)
        considered.append(made)
    return Admission(made, tuple(considered))


def is_out_of_memory(diagnosis: Diagnosis) -> bool:
    return diagnosis.cause in _OUT_OF_MEMORY


def step_down(
    made: LaunchPlan, diagnosis: Diagnosis, candidate: Candidate, *, steps_taken: int
) -> Adjustment | None:
    """What to try after a start of ``made`` failed; None where nothing smaller may be tried.

    After out of memory one setting goes down far enough that the plan takes half of what it took besides its
    weights, or as far as it goes: three small steps would lead nowhere.
    """
    if steps_taken >= MOST_STEPS:
        return None
    if is_out_of_memory(diagnosis):
        bounds = _half(made, candidate, diagnosis)
    elif _is_kv_crash(made, diagnosis):
        bounds = _plainer_cache(made)
    else:
        return None
    if bounds is None:
        return None
    changes = _changes(made, candidate(bounds))
    return Adjustment(steps_taken + 1, MOST_STEPS, changes, bounds) if changes else None


def _half(made: LaunchPlan, candidate: Candidate, diagnosis: Diagnosis) -> Bounds | None:
    """One setting is made smaller, until half is reached or it cannot go further down."""
    why = "llama-server ran out of memory"
    bounds = _smaller(made, why)
    if bounds is None:
        return None if diagnosis.cause == "out_of_memory_host" else _fewer_layers(made, why)
    limit = _besides_weights(made) // 2
    last = candidate(bounds)
    setting = _changes(made, last)[0].setting
    while _besides_weights(last) > limit and (bounds := _smaller(last, why)) is not None:
        further = candidate(bounds)
        if any(change.setting != setting for change in _changes(made, further)):
            break
        last = further
    return last.bounds


def _besides_weights(made: LaunchPlan) -> int:
    return made.memory.kv_bytes + made.memory.compute_bytes


def _smaller(made: LaunchPlan, why: str) -> Bounds | None:
    bounds, free = replace(made.bounds, why=why), made.adjustable
    if "--parallel" in free and made.parallel > 1:
        return replace(bounds, parallel=made.parallel // 2)
    if "--ctx-size" in free and made.ctx_size_of_slot > _LEAST_CTX_SIZE:
        return replace(bounds, ctx_size=max(_LEAST_CTX_SIZE, made.ctx_size_of_slot // 2))
    if made.smaller_kv_type is not None:
        return replace(bounds, kv_type=made.smaller_kv_type)
    return None


def _fewer_layers(made: LaunchPlan, why: str) -> Bounds | None:
    if "--gpu-layers" not in made.adjustable or made.gpu_layers == 0:
        return None
    now = made.layers if made.gpu_layers is None else made.gpu_layers
    return replace(made.bounds, gpu_layers=now // 2, why=why)


def _is_kv_crash(made: LaunchPlan, diagnosis: Diagnosis) -> bool:
    if diagnosis.cause not in _CRASHES:
        return False
    # A segmentation fault has no last words.
    told = (diagnosis.message, *diagnosis.lines)
    return diagnosis.cause == "segfault" or any(_KV_KERNEL.search(line) for line in told)


def _plainer_cache(made: LaunchPlan) -> Bounds | None:
    why = "llama-server crashed at its start with a packed KV cache or flash attention"
    if "--kv-type" in made.adjustable and made.kv_type != "f16":
        return replace(made.bounds, kv_type="f16", why=why)
    if "--flash-attn" in made.adjustable and made.flash_attn in ("on", "auto") and made.kv_type == "f16":
        return replace(made.bounds, flash_attn_off=True, why=why)
    return None


def _changes(before: LaunchPlan, after: LaunchPlan) -> tuple[Change, ...]:
    pairs = (
        ("--parallel", before.parallel, after.parallel),
        ("--ctx-size", before.ctx_size_of_slot, after.ctx_size_of_slot),
        ("--kv-type", before.kv_type, after.kv_type),
        ("--flash-attn", before.flash_attn, after.flash_attn),
        ("--gpu-layers", _layers(before), _layers(after)),
    )
    return tuple(Change(name, str(old), str(new)) for name, old, new in pairs if old != new)


def _layers(made: LaunchPlan) -> str:
    return "auto" if made.gpu_layers is None else str(made.gpu_layers)
