"""Smaller and smaller plans: down which order, how far before a start, and how far after a crash (S5).

After a crash the order is that of the promise: parallel slots, context, KV type, layers on the GPU. Before a
start there is time to think of the requests: too short a context ends them, a packed cache only slows the
long ones, so it comes first. Only what the user did not set by hand is made smaller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from llamasup.llama_server.diagnosis import Diagnosis
from llamasup.llama_server.plan_limits import MIN_CTX_SIZE, Adjustment, Change, PlanLimits
from llamasup.llama_server.settings import Settings
from llamasup.planning.memory.estimate import MemoryEstimate
from llamasup.planning.plan import LaunchPlan

__all__ = [
    "MAX_STEPS",
    "OUT_OF_MEMORY",
    "Admission",
    "admit",
    "blames_the_cache",
    "is_out_of_memory",
    "largest_that_fits",
    "step_down",
]

MAX_STEPS = 3
_MIN_CELLS = 256  # that llama-server gives a slot
_BEFORE_A_START = ("--parallel", "--kv-type", "--ctx-size")
_AFTER_A_CRASH = ("--parallel", "--ctx-size", "--kv-type")
OUT_OF_MEMORY = frozenset({"out_of_memory_host", "out_of_memory_device", "fit_failed"})
# What a kernel of the KV cache or of flash attention looks like in the last words (#28524).
_KV_KERNEL = re.compile(
    r"fattn|flash[-_ ]?attn|set[-_]rows|cpy|kv[-_ ]cache|cache type|quantized V", re.IGNORECASE
)
_CRASHES = frozenset({"segfault", "assertion", "aborted", "device_error", "kv_unsupported"})


class Sized(Protocol):
    """A plan, or just the sizes of one: what ``admit`` makes smaller."""

    @property
    def parallel(self) -> int: ...
    @property
    def ctx_size_of_slot(self) -> int: ...
    @property
    def smaller_kv_type(self) -> str | None: ...
    @property
    def bounds(self) -> PlanLimits: ...
    @property
    def adjustable(self) -> frozenset[str]: ...
    @property
    def memory(self) -> MemoryEstimate: ...


S = TypeVar("S", bound=Sized)


@dataclass(frozen=True, slots=True)
class Admission(Generic[S]):
    """The plan to start, and what was considered on the way to it, the preferred plan first."""

    plan: S
    considered: tuple[S, ...]

    @property
    def preferred(self) -> S:
        return self.considered[0]


def admit(candidate: Callable[[PlanLimits], S], start: PlanLimits) -> Admission[S]:
    """The first plan down the ladder that fits; the preferred one where none does."""
    considered = [candidate(start)]
    while not considered[-1].memory.fits:
        smaller = _smaller(considered[-1], candidate, "so that it fits in memory", _BEFORE_A_START)
        if smaller is None:
            return Admission(considered[0], tuple(considered))
        considered.append(smaller)
    return Admission(considered[-1], tuple(considered))


def largest_that_fits(
    smallest: LaunchPlan, settings: Settings, candidate: Callable[[Settings, PlanLimits], LaunchPlan]
) -> LaunchPlan:
    """What would fit if the user gave way too, from the smallest plan within what was set by hand.

    In the order of ``admit``, but for layers: told no number, llama-server finds out how many fit. A context
    that is too short for most uses comes last. What was passed after ``--`` stays. The smallest plan is
    returned, which does not fit, where none does.
    """
    made, bounds = smallest, smallest.bounds
    now = replace(settings, parallel=made.parallel, ctx_size=made.ctx_size_of_slot)
    while not made.memory.fits:
        parallel, ctx_size = now.parallel or 1, now.ctx_size or MIN_CTX_SIZE
        if made.memory.lacks_device and now.gpu_layers is not None:
            now = replace(now, gpu_layers=None)
        elif parallel > 1:
            now = replace(now, parallel=parallel // 2)
        elif made.smaller_kv_type is not None and bounds.kv_type is None:
            bounds = replace(bounds, kv_type=made.smaller_kv_type)
        elif ctx_size > MIN_CTX_SIZE:
            now = replace(now, ctx_size=max(MIN_CTX_SIZE, ctx_size // 2))
        elif now.kv_type is not None:
            now = replace(now, kv_type=None)
        elif ctx_size > _MIN_CELLS:
            now = replace(now, ctx_size=max(_MIN_CELLS, ctx_size // 2))
        else:
            break
        made = candidate(now, bounds)
    return made


def is_out_of_memory(diagnosis: Diagnosis) -> bool:
    return diagnosis.cause in OUT_OF_MEMORY


def step_down(
    made: LaunchPlan, diagnosis: Diagnosis, candidate: Callable[[PlanLimits], LaunchPlan], *, steps_taken: int
) -> Adjustment | None:
    """What to try after a start of ``made`` failed; None where nothing smaller may be tried.

    After out of memory one setting goes down far enough that the plan takes half of what it took besides its
    weights, or as far as it goes: three small steps would lead nowhere.
    """
    if steps_taken >= MAX_STEPS:
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
    return Adjustment(steps_taken + 1, MAX_STEPS, changes, bounds) if changes else None


def _half(
    made: LaunchPlan, candidate: Callable[[PlanLimits], LaunchPlan], diagnosis: Diagnosis
) -> PlanLimits | None:
    """One setting is made smaller, until half is reached or it cannot go further down."""
    why = "llama-server ran out of memory"
    last = _smaller(made, candidate, why, _AFTER_A_CRASH)
    if last is None:
        return None if diagnosis.cause == "out_of_memory_host" else _fewer_layers(made, why)
    setting = _changes(made, last)[0].setting
    while last.memory.context_bytes > made.memory.context_bytes // 2:
        further = _smaller(last, candidate, why, _AFTER_A_CRASH)
        if further is None or any(change.setting != setting for change in _changes(made, further)):
            break
        last = further
    return last.bounds


def _smaller(made: S, candidate: Callable[[PlanLimits], S], why: str, order: Sequence[str]) -> S | None:
    """The next plan down that takes less: fewer slots of a context set by hand, say, take as much."""
    bounds = replace(made.bounds, why=why)
    rungs = (_fallback_step(made, bounds, option) for option in order if option in made.adjustable)
    plans = (candidate(rung) for rung in rungs if rung is not None)
    return next((plan for plan in plans if plan.memory.context_bytes < made.memory.context_bytes), None)


def _fallback_step(made: Sized, bounds: PlanLimits, option: str) -> PlanLimits | None:
    match option:
        case "--parallel" if made.parallel > 1:
            return replace(bounds, parallel=made.parallel // 2)
        case "--ctx-size" if made.ctx_size_of_slot > MIN_CTX_SIZE:
            return replace(bounds, ctx_size=max(MIN_CTX_SIZE, made.ctx_size_of_slot // 2))
        # Bounded to f16, it is because the packed one crashed.
        case "--kv-type" if made.smaller_kv_type is not None and bounds.kv_type is None:
            return replace(bounds, kv_type=made.smaller_kv_type)
    return None


def _fewer_layers(made: LaunchPlan, why: str) -> PlanLimits | None:
    if "--gpu-layers" not in made.adjustable or made.gpu_layers == 0:
        return None
    # As many as fit by the estimate, where llama-server counts by itself and does not tell.
    expected = (made.gpu_layers, made.memory.gpu_layers, made.layers)
    now = next(layers for layers in expected if layers is not None)
    return replace(made.bounds, gpu_layers=now // 2, why=why)


def _is_kv_crash(made: LaunchPlan, diagnosis: Diagnosis) -> bool:
    if diagnosis.cause not in _CRASHES:
        return False
    # A segmentation fault leaves no message, so a plainer cache is worth a try.
    return diagnosis.cause == "segfault" or _names_the_cache(diagnosis)


def blames_the_cache(diagnosis: Diagnosis) -> bool:
    """Whether a crash is evidence against the KV cache or flash attention.

    Neither of them computes anything before the weights are read.
    """
    return _names_the_cache(diagnosis) or (diagnosis.cause == "segfault" and diagnosis.weights_read)


def _names_the_cache(diagnosis: Diagnosis) -> bool:
    return any(_KV_KERNEL.search(line) for line in (diagnosis.message, *diagnosis.lines))


def _plainer_cache(made: LaunchPlan) -> PlanLimits | None:
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
        ("--flash-attn", _flash(before), _flash(after)),
        ("--gpu-layers", _layers(before), _layers(after)),
    )
    # Fewer slots of a total that was set by hand are larger ones: that is no change to speak of, either.
    return tuple(
        Change(name, str(old), str(new))
        for name, old, new in pairs
        if old != new and name in before.adjustable
    )


def _flash(made: LaunchPlan) -> str:
    """A packed cache turns "auto" into "on", which is no change to speak of."""
    return "off" if made.flash_attn == "off" else "on"


def _layers(made: LaunchPlan) -> str:
    return "auto" if made.gpu_layers is None else str(made.gpu_layers)
