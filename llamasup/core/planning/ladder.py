"""The ladder of smaller plans: which setting is reduced next, before a start and after a failed one.

After a failed start the order is the documented one: a context that is longer than the profile requires,
slots, context, KV type, layers on the GPU. Before a start, the KV type comes before the context, because a
short context ends requests, and a packed cache only slows long ones. Settings of the user are never reduced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct, structs
from msgspec.structs import replace

from llamasup.core.llama_server.argv_builder import BY_USER
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.plan_limits import MIN_CTX_SIZE, Adjustment, Change, PlanLimits
from llamasup.core.planning.measured.load_history import FailedPlan, LoadHistory, add_failed_plan, has_served
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.planning.sizes import PlanSizes
from llamasup.core.settings.model import Settings

MAX_STEPS = 3
_MIN_CELLS = 256  # of a slot in llama-server
_BEFORE_A_START = ("--parallel", "--kv-type", "--ctx-size")
_AFTER_A_CRASH = ("--parallel", "--ctx-size", "--kv-type")
OUT_OF_MEMORY = frozenset({"out_of_memory_host", "out_of_memory_device", "fit_failed"})
# Matches kernels of the KV cache or of flash attention in the last log lines (#28524).
_KV_KERNEL = re.compile(
    r"fattn|flash[-_ ]?attn|set[-_]rows|cpy|kv[-_ ]cache|cache type|quantized V", re.IGNORECASE
)
# The ends of a start for which a flag of llamasup's own can be the reason.
_REFUSED_FLAGS = frozenset({"flag_unknown", "flag_removed", "flag_invalid"})
_REFUSED_DRAFTS = frozenset({"model_corrupt", "draft_mismatch"})
_UNCLEAR = frozenset({"load_failed", "device_unsupported", "segfault", "assertion", "aborted"})
_CRASHES = frozenset({"segfault", "assertion", "aborted", "device_error", "kv_unsupported"})


S = TypeVar("S", bound=PlanSizes)


class Admission(Struct, Generic[S], frozen=True):
    """The plan to start, and the plans considered, the preferred one first."""

    plan: S
    considered: tuple[S, ...]

    @property
    def preferred(self) -> S:
        return self.considered[0]


def admit(candidate: Callable[[PlanLimits], S], start: PlanLimits) -> Admission[S]:
    """Return the first plan down the ladder that fits, or the preferred one if none fits."""
    considered = [candidate(start)]
    while not considered[-1].memory.fits:
        smaller = _smaller(
            considered[-1], candidate, "the larger plan does not fit in memory", _BEFORE_A_START
        )
        if smaller is None:
            return Admission(considered[0], tuple(considered))
        considered.append(smaller)
    return Admission(considered[-1], tuple(considered))


def largest_that_fits(
    smallest: LaunchPlan, settings: Settings, candidate: Callable[[Settings, PlanLimits], LaunchPlan]
) -> LaunchPlan:
    """Find the largest plan that would fit if the user's own settings were reduced as well.

    The order is that of ``admit``, but layers come first: without a number, llama-server fits them itself.
    A context that is too short for most uses comes last. Arguments after ``--`` stay. If no plan fits, the
    smallest one is returned.
    """
    plan, bounds = smallest, smallest.bounds
    now = structs.replace(settings, parallel=plan.parallel, ctx_size=plan.ctx_size_of_slot)
    while not plan.memory.fits:
        parallel, ctx_size = now.parallel or 1, now.ctx_size or MIN_CTX_SIZE
        if plan.memory.lacks_device and now.gpu_layers is not None:
            now = structs.replace(now, gpu_layers=None)
        elif parallel > 1:
            now = structs.replace(now, parallel=parallel // 2)
        elif plan.kv.smaller is not None and bounds.kv_type is None:
            bounds = replace(bounds, kv_type=plan.kv.smaller)
        elif ctx_size > MIN_CTX_SIZE:
            now = structs.replace(now, ctx_size=max(MIN_CTX_SIZE, ctx_size // 2))
        elif now.kv_type is not None:
            now = structs.replace(now, kv_type=None)
        elif ctx_size > _MIN_CELLS:
            now = structs.replace(now, ctx_size=max(_MIN_CELLS, ctx_size // 2))
        else:
            break
        plan = candidate(now, bounds)
    return plan


class FailedStart(Struct, frozen=True):
    """A failed start, and the adjustment that is tried next."""

    plan: LaunchPlan
    diagnosis: Diagnosis
    adjustment: Adjustment
    available_bytes: int


def is_out_of_memory(diagnosis: Diagnosis) -> bool:
    return diagnosis.cause in OUT_OF_MEMORY


def step_down(
    plan: LaunchPlan,
    diagnosis: Diagnosis,
    candidate: Callable[[PlanLimits], LaunchPlan],
    *,
    steps_taken: int,
) -> Adjustment | None:
    """Choose the adjustment after a start of ``plan`` failed. None: no smaller plan may be tried.

    After out of memory one setting goes down far enough that the plan takes half of what it took besides its
    weights, or as far as it goes: three small steps would lead nowhere.
    """
    if steps_taken >= MAX_STEPS:
        return None
    if is_out_of_memory(diagnosis):
        bounds = _halved(plan, candidate, diagnosis)
    else:
        bounds = _plainer_cache(plan) if _is_kv_crash(plan, diagnosis) else None
        if bounds is None:
            bounds = _fewer_own_flags(plan, diagnosis)
    if bounds is None:
        return None
    changed = changes(plan, candidate(bounds))
    return Adjustment(steps_taken + 1, MAX_STEPS, changed, bounds) if changed else None


def without_result(plan: LaunchPlan, plain: LaunchPlan, *, steps_taken: int) -> Adjustment:
    """Leave out the result of ``llamasup tune`` after a start of ``plan``, which contains it, failed."""
    assert plan.measured is not None
    changed = plan.measured.changes
    flags = (Change(flag, value or "on", _value(plain, flag)) for flag, value in changed.flags)
    variables = (Change(name, value, plain.env.get(name, "none")) for name, value in changed.env)
    return Adjustment(steps_taken + 1, MAX_STEPS, (*flags, *variables), plan.bounds)


def _value(plan: LaunchPlan, flag: str) -> str:
    values = (each.value or "on" for each in plan.reasons if each.flag == flag and each.passed)
    return next(values, "none")


def _halved(
    plan: LaunchPlan, candidate: Callable[[PlanLimits], LaunchPlan], diagnosis: Diagnosis
) -> PlanLimits | None:
    """Reduce one setting until the context takes half, or until it has reached its lower limit."""
    why = "llama-server ran out of memory"
    last = _smaller(plan, candidate, why, _AFTER_A_CRASH)
    if last is None:
        return None if diagnosis.cause == "out_of_memory_host" else _fewer_layers(plan, why)
    setting = changes(plan, last)[0].setting
    while last.memory.context_bytes > plan.memory.context_bytes // 2:
        further = _smaller(last, candidate, why, _AFTER_A_CRASH)
        if further is None or any(change.setting != setting for change in changes(plan, further)):
            break
        last = further
    return last.bounds


def _smaller(plan: S, candidate: Callable[[PlanLimits], S], why: str, order: Sequence[str]) -> S | None:
    """The next smaller plan. Skips a step that saves nothing, such as fewer slots of a fixed context."""
    bounds = replace(plan.bounds, why=why)
    if plan.context.least_of_slot is not None:
        order = ("--ctx-size", *order)
    steps = (_fallback_step(plan, bounds, option) for option in order if option in plan.adjustable)
    plans = (candidate(step) for step in steps if step is not None)
    return next((one for one in plans if one.memory.context_bytes < plan.memory.context_bytes), None)


def _fallback_step(plan: PlanSizes, bounds: PlanLimits, option: str) -> PlanLimits | None:
    match option:
        case "--parallel" if plan.parallel > 1:
            return replace(bounds, parallel=plan.parallel // 2)
        case "--ctx-size" if plan.context.least_of_slot is not None:
            return replace(bounds, ctx_size=plan.context.least_of_slot)
        case "--ctx-size" if plan.ctx_size_of_slot > MIN_CTX_SIZE:
            return replace(bounds, ctx_size=max(MIN_CTX_SIZE, plan.ctx_size_of_slot // 2))
        # A bound of f16 follows a crash with a packed type.
        case "--kv-type" if plan.kv.smaller is not None and bounds.kv_type is None:
            return replace(bounds, kv_type=plan.kv.smaller)
    return None


def _fewer_layers(plan: LaunchPlan, why: str) -> PlanLimits | None:
    if "--gpu-layers" not in plan.adjustable or plan.gpu_layers == 0:
        return None
    # llama-server does not report the number of layers that it fits, so the estimate counts.
    expected = (plan.gpu_layers, plan.memory.gpu_layers, plan.layers)
    now = next(layers for layers in expected if layers is not None)
    return replace(plan.bounds, gpu_layers=now // 2, why=why)


def _is_kv_crash(plan: LaunchPlan, diagnosis: Diagnosis) -> bool:
    if diagnosis.cause not in _CRASHES:
        return False
    # A segmentation fault leaves no message, so try a plainer cache.
    return diagnosis.cause == "segfault" or _names_kv_cache(diagnosis)


def blames_kv_cache(diagnosis: Diagnosis) -> bool:
    """Whether a crash is evidence against the KV cache or flash attention.

    They compute nothing before the weights are read.
    """
    return _names_kv_cache(diagnosis) or (diagnosis.cause == "segfault" and diagnosis.weights_read)


def _names_kv_cache(diagnosis: Diagnosis) -> bool:
    return any(_KV_KERNEL.search(line) for line in (diagnosis.message, *diagnosis.lines))


def _plainer_cache(plan: LaunchPlan) -> PlanLimits | None:
    why = "llama-server crashed during its start with a packed KV cache or flash attention"
    if "--kv-type" in plan.adjustable and plan.kv_type != "f16":
        return replace(plan.bounds, kv_type="f16", why=why)
    if "--flash-attn" in plan.adjustable and plan.kv.flash in ("on", "auto") and plan.kv_type == "f16":
        return replace(plan.bounds, flash_attn_off=True, why=why)
    return None


def _fewer_own_flags(plan: LaunchPlan, diagnosis: Diagnosis) -> PlanLimits | None:
    """Leave out the drafts, which most often do not suit a file or a build; then all own flags."""
    if not plan.has_own_flags:
        return None
    cause = diagnosis.cause
    if plan.drafts_itself and cause in _REFUSED_FLAGS | _REFUSED_DRAFTS | _UNCLEAR:
        why = "llama-server did not start with the drafts of the model's own MTP layers"
        return replace(plan.bounds, drafts_off=True, why=why)
    own = (each.flag for each in plan.reasons if each.passed and each.reason != BY_USER)
    if cause in _UNCLEAR or (
        cause in _REFUSED_FLAGS and any(f"'{flag}'" in diagnosis.message for flag in own)
    ):
        why = "llama-server did not start with the flags that llamasup adds by itself"
        return replace(plan.bounds, bare=True, why=why)
    return None


def with_failed_starts(
    history: LoadHistory, failures: Sequence[FailedStart], runtime: str, preferred_key: str, today: str
) -> LoadHistory:
    """Add the failures before a plan that serves: one record for memory, one for kernels.

    ``preferred_key`` is the key of the plan without limits. ``today`` is an ISO date.
    """
    if not failures:
        return history
    short_of_memory = [failed for failed in failures if is_out_of_memory(failed.diagnosis)]
    crashed = [failed for failed in failures if _is_crash_of_plan(failed, history, runtime, today)]
    bounds = failures[-1].adjustment.bounds
    for out_of_memory, avoids in ((True, bounds.against_memory), (False, bounds.against_crashes)):
        evidence = short_of_memory if out_of_memory else crashed
        if evidence and avoids != PlanLimits():
            last = evidence[-1]
            failed = FailedPlan(
                runtime,
                preferred_key,
                avoids,
                cause=last.diagnosis.cause,
                out_of_memory=out_of_memory,
                date=today,
                available_bytes=last.available_bytes,
                failed=last.plan.key,
            )
            history = add_failed_plan(history, failed)
    return history


def _is_crash_of_plan(failed: FailedStart, history: LoadHistory, runtime: str, today: str) -> bool:
    if failed.plan.measured is not None:
        return False  # the measured flags were left out first
    if is_out_of_memory(failed.diagnosis) or has_served(history, runtime, failed.plan.key, today):
        return False
    return failed.adjustment.bounds.without_own_flags or blames_kv_cache(failed.diagnosis)


def changes(before: LaunchPlan, after: LaunchPlan) -> tuple[Change, ...]:
    """The settings of llamasup's own choice in which two plans of a model differ."""
    share = after.ctx_size_of_slot
    if after.parallel < before.parallel:
        share = min(share, before.ctx_size_of_slot)  # fewer slots of the same context are longer ones
    pairs = (
        ("--parallel", before.parallel, after.parallel),
        ("--ctx-size", before.ctx_size_of_slot, share),
        ("--kv-type", before.kv_type, after.kv_type),
        ("--flash-attn", _flash(before), _flash(after)),
        ("--gpu-layers", _layers(before), _layers(after)),
        ("--spec-type", before.draft or "none", after.draft or "none"),
        ("--profile", _profile(before), _profile(after)),
    )
    # Settings of the user are no changes: fewer slots of a fixed total context are larger slots.
    return tuple(
        Change(name, str(old), str(new))
        for name, old, new in pairs
        if old != new and name in before.adjustable
    )


def _profile(plan: LaunchPlan) -> str:
    return "plain" if plan.bounds.bare else "planned"


def _flash(plan: LaunchPlan) -> str:
    """Flash attention as on or off; "auto" counts as on, because a packed cache turns it into "on"."""
    return "off" if plan.kv.flash == "off" else "on"


def _layers(plan: LaunchPlan) -> str:
    return "auto" if plan.gpu_layers is None else str(plan.gpu_layers)
