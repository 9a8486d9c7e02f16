"""What earlier loads of a model taught: what it really took, and which plan was too much.

Kept per model file in the state folder (:mod:`llamasup.effects.experience`); read and extended here, pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llamasup.core.bounds import Bounds
from llamasup.core.memory import ESTIMATED, Correction, MemoryEstimate

__all__ = ["Experience", "Lesson", "Setback", "bounds_of", "correction_of", "learn", "remember"]

_MOST_LESSONS = 16
# A plan that was too much is tried again once there is so much more free memory than there was then.
_MORE_ROOM = 1.5
_LEAST_RUNTIME_BYTES = (
    8 << 20
)  # below it, part of the weights was not resident and the difference says nothing


@dataclass(frozen=True, slots=True)
class Lesson:
    """One measured load. ``kv`` and ``compute`` are measured over estimated, before any correction."""

    runtime: str
    key: str  # of the plan: what decides its sizes
    kv: float
    compute: float
    runtime_bytes: int | None
    resident_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class Setback:
    """A plan that this machine could not carry, and what was tried instead."""

    runtime: str
    bounds: Bounds
    cause: str
    out_of_memory: bool
    date: str  # ISO, of the day
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Experience:
    """Of one model file; the newest lesson is the last."""

    lessons: tuple[Lesson, ...] = ()
    setback: Setback | None = None


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
    kv_bytes: int | None,
    compute_bytes: int | None,
    weights_bytes: int | None,
    resident_bytes: int,
    device_bytes: int = 0,
) -> Experience:
    """Add a load: sizes from llama-server's log (None where it did not tell), and of its process.

    ``used`` is the correction that ``estimated`` was made with.
    """
    own = None
    if kv_bytes is not None and compute_bytes is not None and weights_bytes is not None:
        own = resident_bytes + device_bytes - kv_bytes - compute_bytes - weights_bytes
    earlier = [each for each in experience.lessons if (each.runtime, each.key) != (runtime, key)]
    lesson = Lesson(
        runtime,
        key,
        kv=_ratio(kv_bytes, estimated.kv_bytes, used.kv),
        compute=_ratio(compute_bytes, estimated.compute_bytes, used.compute),
        runtime_bytes=own if own is not None and own >= _LEAST_RUNTIME_BYTES else used.runtime_bytes,
        resident_bytes=resident_bytes,
        device_bytes=device_bytes,
    )
    return replace(experience, lessons=(*earlier, lesson)[-_MOST_LESSONS:])


def remember(experience: Experience, setback: Setback) -> Experience:
    """The next start begins with the bounds of this setback."""
    return replace(experience, setback=setback)


def bounds_of(experience: Experience, runtime: str, available_bytes: int) -> Bounds:
    """Where the ladder begins: at the step that carried last time, unless things have changed since."""
    setback = experience.setback
    if setback is None or setback.runtime != runtime:
        return Bounds()
    if setback.out_of_memory and available_bytes >= _MORE_ROOM * setback.available_bytes:
        return Bounds()
    happened = "more than this ran out of memory" if setback.out_of_memory else f"{setback.cause} without it"
    return replace(setback.bounds, why=f"{happened} on {setback.date}")


def _ratio(measured: int | None, estimated: int, used: float) -> float:
    if measured is None or estimated == 0:
        return used
    return measured * used / estimated
