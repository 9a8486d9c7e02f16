"""How long the stages of earlier loads of a model file took, to estimate the end of the next one (pure).

A load has four stages, in this order: llama-server *begins*, reads the *weights*, fills the *memory* of its
context, and makes its *warm-up*, up to the token that llamasup asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from msgspec import Struct

__all__ = ["LoadFacts", "LoadTimes", "add_times", "is_possible", "times_for"]

# A load after another differs by what is in the page cache, and by what else the machine does.
_MAX_OF_PLAN = 5
_MAX_RECORDS = 20
_LONGEST_S = 86_400.0


class LoadTimes(Struct, frozen=True):
    """The stages of one load. ``key``: of the plan. ``memory_bytes``: by how much the anonymous memory of the
    process grew while the context was allocated. ``warm_up_cpu_s``: 0.0: not known.
    """

    runtime: str
    key: str
    begin_s: float
    weights_s: float
    memory_s: float
    warm_up_s: float
    weights_bytes: int = 0
    memory_bytes: int = 0
    warm_up_cpu_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.begin_s + self.weights_s + self.memory_s + self.warm_up_s


class LoadFacts(Struct, frozen=True):
    """What is known before a load. 0 and None: not known.

    ``cpu_bytes``: the weights with which the CPU computes. ``device_bytes``: the weights that are copied to
    the memory of devices. ``memory_bytes``: the estimated host memory of the context, which llama-server
    fills with zeros. ``earlier``: the expected times, from earlier loads.
    """

    weights_bytes: int = 0
    cpu_bytes: int = 0
    device_bytes: int = 0
    memory_bytes: int = 0
    earlier: LoadTimes | None = None


def add_times(records: Sequence[LoadTimes], times: LoadTimes) -> tuple[LoadTimes, ...]:
    """Add the times of one load, the newest last."""
    same = [record for record in records if _plan_of(record) == _plan_of(times)]
    dropped = same[: max(0, len(same) + 1 - _MAX_OF_PLAN)]
    kept = [record for record in records if not any(record is other for other in dropped)]
    return (*kept, times)[-_MAX_RECORDS:]


def times_for(records: Sequence[LoadTimes], runtime: str, key: str) -> LoadTimes | None:
    """The expected times of a load with the plan ``key``; None without a load by this ``runtime``.

    Loads of the same plan count, or else those of other plans. The weights take as long as last time, because
    the last load has changed the page cache. The warm-up takes as long as the fastest one: it computes the
    same each time, and only other programs, or a file in small pages after a slow disk, make it slower. The
    other stages take the median.
    """
    of_runtime = [record for record in records if record.runtime == runtime]
    found = [record for record in of_runtime if record.key == key] or of_runtime
    if not found:
        return None
    last = found[-1]
    is_same = last.key == key
    fastest = min(found, key=lambda record: record.warm_up_s)
    return LoadTimes(
        runtime,
        key,
        begin_s=median(record.begin_s for record in found),
        weights_s=last.weights_s,
        memory_s=median(record.memory_s for record in found),
        warm_up_s=fastest.warm_up_s,
        warm_up_cpu_s=fastest.warm_up_cpu_s,
        weights_bytes=last.weights_bytes,
        memory_bytes=last.memory_bytes if is_same else 0,  # another context has another size
    )


def is_possible(times: LoadTimes) -> bool:
    """False for a record from a damaged file."""
    stages = (times.begin_s, times.weights_s, times.memory_s, times.warm_up_s, times.warm_up_cpu_s)
    are_times = all(math.isfinite(stage_s) and 0.0 <= stage_s <= _LONGEST_S for stage_s in stages)
    return are_times and times.weights_bytes >= 0 and times.memory_bytes >= 0


def _plan_of(times: LoadTimes) -> tuple[str, str]:
    return times.runtime, times.key
