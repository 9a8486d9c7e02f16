"""What earlier loads of a model taught: what it really took, and which plan was too much.

Kept per model file in the state folder (:mod:`llamasup.effects.experience`); read and extended here, pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llamasup.core.bounds import LEAST_CTX_SIZE, Bounds
from llamasup.core.capabilities import Capabilities
from llamasup.core.memory import ESTIMATED, Correction, MemoryEstimate

__all__ = [
    "Experience",
    "Lesson",
    "Setback",
    "bounds_of",
    "correction_of",
    "learn",
    "remember",
    "runtime_id",
    "sound",
]

# Plans of one model that people use in turn: a few profiles and contexts.
_MOST_LESSONS = 16
# Estimates are never so wrong: such a factor is a damaged file, or a log that was misread.
_MOST_FACTOR = 100.0
# A plan that was too much is tried again once there is so much more free memory than there was then.
_MORE_ROOM = 1.5


@dataclass(frozen=True, slots=True)
class Lesson:
    """One measured load. ``kv`` and ``compute`` are measured over estimated, before any correction."""

    runtime: str
    key: str  # of the plan: what decides its sizes
    kv: float
    compute: float
    runtime_bytes: int
    resident_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class Setback:
    """A plan that this machine could not carry, and the bounds of the one that it could."""

    runtime: str
    asked: str  # the key of the plan without bounds: another wish says nothing about this one
    bounds: Bounds
    cause: str
    out_of_memory: bool
    date: str  # ISO, of the day
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Experience:
    """Of one model file; the newest is the last."""

    lessons: tuple[Lesson, ...] = ()
    setbacks: tuple[Setback, ...] = ()


def sound(experience: Experience) -> Experience:
    """Without what no load can have taught: a file on disk may say anything."""
    return Experience(
        tuple(lesson for lesson in experience.lessons if _is_possible(lesson)),
        tuple(setback for setback in experience.setbacks if _can_be_planned(setback.bounds)),
    )


def _is_possible(lesson: Lesson) -> bool:
    factors = all(0 <= factor <= _MOST_FACTOR for factor in (lesson.kv, lesson.compute))
    # A process takes no more by itself than all that was seen of it.
    return factors and 0 <= lesson.runtime_bytes <= lesson.resident_bytes + lesson.device_bytes


def _can_be_planned(bounds: Bounds) -> bool:
    parallel, ctx_size, layers = bounds.parallel, bounds.ctx_size, bounds.gpu_layers
    if (parallel is not None and parallel < 1) or (layers is not None and layers < 0):
        return False
    return (ctx_size is None or ctx_size >= LEAST_CTX_SIZE) and bounds.kv_type in (None, "f16", "q8_0")


def runtime_id(command: Sequence[str], capabilities: Capabilities) -> str:
    """Which build a lesson was learnt with."""
    return f"{' '.join(command)} {capabilities.version}"


def correction_of(experience: Experience, runtime: str, key: str) -> Correction:
    """How to correct the estimate of the plan ``key``.

    The very plan was measured: its numbers stand. Another plan of this model was: what it showed to be
    estimated too low is raised, but nothing is lowered, since the ratio differs from shape to shape.
    """
    of_runtime = [lesson for lesson in experience.lessons if lesson.runtime == runtime]
    same = [lesson for lesson in of_runtime if lesson.key == key]
    if same:
        last = same[-1]
        return Correction(last.kv, last.compute, last.runtime_bytes, measured=True)
    if of_runtime:
        last = of_runtime[-1]
        return Correction(max(1.0, last.kv), max(1.0, last.compute), last.runtime_bytes)
    return ESTIMATED


def learn(
    experience: Experience,
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
) -> Experience:
    """Add a load: sizes from llama-server's log, and of its process.

    ``used`` is the correction that ``estimated`` was made with. What the process takes besides the logged
    sizes is its own; less than nothing where a part was not resident, or is on a device that was not asked.
    A log that tells no size of a KV cache that there must be is one that we cannot read, and teaches nothing.
    """
    if estimated.kv_bytes and not kv_bytes:
        return experience
    own = resident_bytes + device_bytes - kv_bytes - compute_bytes - weights_bytes
    earlier = [each for each in experience.lessons if (each.runtime, each.key) != (runtime, key)]
    lesson = Lesson(
        runtime,
        key,
        kv=_ratio(kv_bytes, estimated.kv_bytes, used.kv),
        compute=_ratio(compute_bytes, estimated.compute_bytes, used.compute),
        runtime_bytes=max(0, own),
        resident_bytes=resident_bytes,
        device_bytes=device_bytes,
    )
    return replace(experience, lessons=(*earlier, lesson)[-_MOST_LESSONS:])


def remember(experience: Experience, setback: Setback) -> Experience:
    """The next start of the same wish begins with the bounds of this setback."""
    asked = (setback.runtime, setback.asked)
    earlier = [each for each in experience.setbacks if (each.runtime, each.asked) != asked]
    return replace(experience, setbacks=(*earlier, setback)[-_MOST_LESSONS:])


def bounds_of(experience: Experience, runtime: str, asked: str, available_bytes: int) -> Bounds:
    """Where the ladder begins: at the step that carried last time, unless things have changed since."""
    for setback in experience.setbacks:
        if (setback.runtime, setback.asked) != (runtime, asked):
            continue
        if setback.out_of_memory and available_bytes >= _MORE_ROOM * setback.available_bytes:
            break
        happened = "more than this ran out of memory"
        if not setback.out_of_memory:
            happened = f"it ended with {setback.cause} otherwise"
        return replace(setback.bounds, why=f"{happened} on {setback.date}")
    return Bounds()


def _ratio(measured: int, estimated: int, used: float) -> float:
    return measured * used / estimated if estimated else used
