"""The history of earlier loads of a model: measured memory, plans that served, and plans that failed.

If llama-server or the kernel reported a lack of memory, later starts avoid the plan until more memory is
free. A crash is weaker evidence: it counts against the KV cache and flash attention only if it happened while
they were in use, happened twice in a row, and the same plan has not served within ``MAX_DAYS``. All these
records expire after ``MAX_DAYS``, and when the build of llama-server changes.

Kept per model file in the state folder (:mod:`llamasup.planning.load_history_store`); read and extended here,
pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

from llamasup.llama_server.capabilities import Capabilities
from llamasup.llama_server.plan_limits import MIN_CTX_SIZE, PlanLimits
from llamasup.planning.memory.estimate import ESTIMATED, Correction, MemoryEstimate

__all__ = [
    "MAX_DAYS",
    "FailedPlan",
    "LoadHistory",
    "Measurement",
    "Served",
    "bounds_of",
    "correction_of",
    "forget_crashes",
    "has_served",
    "learn",
    "learn_served",
    "remember",
    "runtime_id",
    "validate",
]

# Plans of one model that people use in turn: a few profiles and contexts.
_MAX_LESSONS = 16
# Estimates are never so wrong: such a factor is a damaged file, or a log that was misread.
_MAX_FACTOR = 100.0
# A plan that was too much is tried again once there is so much more free memory than there was then.
_MORE_ROOM = 1.5
# Drivers, kernels and other programs change within this time. Trying the full plan again costs one start.
MAX_DAYS = 14
# A single crash can have other causes: a memory error, a disk, a debugger.
_CRASHES_BELIEVED = 2


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured load. ``kv`` and ``compute`` are measured over estimated, before any correction."""

    runtime: str
    key: str  # of the plan: what decides its sizes
    kv: float
    compute: float
    runtime_bytes: int
    resident_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class FailedPlan:
    """A plan that failed on this machine, and the bounds of the one that served.

    ``seen``: how many times in a row. ``failed``: the key of the plan that failed. An entry without these two
    fields (older versions) counts as seen once.
    """

    runtime: str
    asked: str  # the key of the plan without bounds: another wish says nothing about this one
    bounds: PlanLimits
    cause: str
    out_of_memory: bool
    date: str  # ISO date of the last occurrence
    available_bytes: int
    seen: int = 1
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """A plan that has generated a token on this machine.

    ``date``: ISO date of the last proof. An entry without it (older versions) counts as expired: it does not
    say which driver or kernel it was proven with, and the next proof adds the date.
    """

    runtime: str
    key: str
    date: str = ""


@dataclass(frozen=True, slots=True)
class LoadHistory:
    """Of one model file; the newest is the last."""

    lessons: tuple[Measurement, ...] = ()
    setbacks: tuple[FailedPlan, ...] = ()
    served: tuple[Served, ...] = ()


def validate(history: LoadHistory) -> LoadHistory:
    """Without what no load can have taught: a file on disk may say anything."""
    return LoadHistory(
        tuple(lesson for lesson in history.lessons if _is_possible(lesson)),
        tuple(setback for setback in history.setbacks if _can_be_planned(setback.bounds)),
        history.served,
    )


def _is_possible(lesson: Measurement) -> bool:
    factors = all(0 <= factor <= _MAX_FACTOR for factor in (lesson.kv, lesson.compute))
    # A process takes no more by itself than all that was seen of it.
    return factors and 0 <= lesson.runtime_bytes <= lesson.resident_bytes + lesson.device_bytes


def _can_be_planned(bounds: PlanLimits) -> bool:
    parallel, ctx_size, layers = bounds.parallel, bounds.ctx_size, bounds.gpu_layers
    if (parallel is not None and parallel < 1) or (layers is not None and layers < 0):
        return False
    return (ctx_size is None or ctx_size >= MIN_CTX_SIZE) and bounds.kv_type in (None, "f16", "q8_0")


def runtime_id(command: Sequence[str], capabilities: Capabilities) -> str:
    """Which build a lesson was learnt with."""
    return " ".join(filter(None, (*command, capabilities.version, capabilities.build)))


def correction_of(history: LoadHistory, runtime: str, key: str) -> Correction:
    """How to correct the estimate of the plan ``key``.

    The very plan was measured: its numbers stand. Another plan of this model was: what it showed to be
    estimated too low is raised, but nothing is lowered, since the ratio differs from shape to shape.
    """
    of_runtime = [lesson for lesson in history.lessons if lesson.runtime == runtime]
    same = [lesson for lesson in of_runtime if lesson.key == key]
    if same:
        last = same[-1]
        return Correction(last.kv, last.compute, last.runtime_bytes, measured=True)
    if of_runtime:
        last = of_runtime[-1]
        return Correction(max(1.0, last.kv), max(1.0, last.compute), last.runtime_bytes)
    return ESTIMATED


def learn(
    history: LoadHistory,
    *,
    runtime: str,
    key: str,
    estimated: MemoryEstimate,
    used: Correction,
    weights_bytes: int,
    kv_bytes: int,
    compute_bytes: int,
    resident_bytes: int,
    device_bytes: int = 0,
) -> LoadHistory:
    """Add a load: sizes from llama-server's log, and of its process.

    ``used`` is the correction that ``estimated`` was made with. What the process takes besides the logged
    sizes is its own; less than nothing where a part was not resident, or is on a device that was not asked.
    A log that tells no size of a KV cache that there must be is one that we cannot read, and teaches nothing.
    """
    if estimated.kv_bytes and not kv_bytes:
        return history
    own = resident_bytes + device_bytes - kv_bytes - compute_bytes - weights_bytes
    earlier = [each for each in history.lessons if (each.runtime, each.key) != (runtime, key)]
    lesson = Measurement(
        runtime,
        key,
        kv=_ratio(kv_bytes, estimated.kv_bytes, used.kv),
        compute=_ratio(compute_bytes, estimated.compute_bytes, used.compute),
        runtime_bytes=max(0, own),
        resident_bytes=resident_bytes,
        device_bytes=device_bytes,
    )
    return replace(history, lessons=(*earlier, lesson)[-_MAX_LESSONS:])


def learn_served(history: LoadHistory, runtime: str, key: str, today: str) -> LoadHistory:
    """Record that the plan ``key`` has generated a token, so that its crashes do not count against the KV
    cache. ``today`` is an ISO date.
    """
    others = [each for each in history.served if (each.runtime, each.key) != (runtime, key)]
    return replace(history, served=(*others, Served(runtime, key, today))[-_MAX_LESSONS:])


def has_served(history: LoadHistory, runtime: str, key: str, today: str) -> bool:
    """Whether the plan ``key`` has generated a token within ``MAX_DAYS``."""
    proofs = (each for each in history.served if (each.runtime, each.key) == (runtime, key))
    return any(_is_recent(each.date, today) for each in proofs)


def forget_crashes(history: LoadHistory, runtime: str, key: str) -> LoadHistory:
    """Remove the crashes of the plan ``key``, which has just started without one: they were not in a row."""
    kept = (
        each
        for each in history.setbacks
        if each.out_of_memory or each.runtime != runtime or key not in (each.asked, each.failed)
    )
    return replace(history, setbacks=tuple(kept))


def remember(history: LoadHistory, setback: FailedPlan) -> LoadHistory:
    """Add ``setback``, and increase its count if it was seen before."""
    same = (setback.runtime, setback.asked, setback.out_of_memory)
    others, seen = [], 0
    for each in history.setbacks:
        if (each.runtime, each.asked, each.out_of_memory) != same:
            others.append(each)
        elif each.bounds == setback.bounds and _is_recent(each.date, setback.date):
            seen = each.seen
    kept = replace(setback, seen=seen + 1)
    return replace(history, setbacks=(*others, kept)[-_MAX_LESSONS:])


def bounds_of(history: LoadHistory, runtime: str, asked: str, available_bytes: int, today: str) -> PlanLimits:
    """The first step of the ladder: the step that served last time, unless conditions have changed.

    ``today`` is an ISO date.
    """
    bounds, reasons = PlanLimits(), []
    for setback in history.setbacks:
        if (setback.runtime, setback.asked) != (runtime, asked) or not _is_recent(setback.date, today):
            continue
        if setback.out_of_memory:
            if available_bytes >= _MORE_ROOM * setback.available_bytes:
                continue
            happened = "a larger plan ran out of memory"
        else:
            failed = setback.failed or asked
            if setback.seen < _CRASHES_BELIEVED or has_served(history, runtime, failed, today):
                continue
            happened = f"a plan without this ended with {setback.cause}"
        reasons.append(f"{happened} on {setback.date}")
        bounds = _both(bounds, setback.bounds)
    return replace(bounds, why=" and ".join(reasons))


def _both(one: PlanLimits, other: PlanLimits) -> PlanLimits:
    # After a crash of a packed cache the plan uses f16.
    types = (one.kv_type, other.kv_type)
    return PlanLimits(
        parallel=_least(one.parallel, other.parallel),
        ctx_size=_least(one.ctx_size, other.ctx_size),
        kv_type="f16" if "f16" in types else one.kv_type or other.kv_type,
        flash_attn_off=one.flash_attn_off or other.flash_attn_off,
        gpu_layers=_least(one.gpu_layers, other.gpu_layers),
    )


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _is_recent(day: str, today: str) -> bool:
    try:
        days = (date.fromisoformat(today) - date.fromisoformat(day)).days
    except ValueError:  # a damaged file, or an entry of an older version
        return False
    return abs(days) <= MAX_DAYS  # a clock may have been set back


def _ratio(measured: int, estimated: int, used: float) -> float:
    return measured * used / estimated if estimated else used
