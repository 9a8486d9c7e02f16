"""Estimates the end of a load from the times of the stages of earlier loads (pure).

A load has four stages, in this order: llama-server *begins*, reads the *weights*, fills the *memory* of its
context, and makes its *warm-up*, up to the token that llamasup requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from msgspec import Struct

# A load after another differs by what is in the page cache, and by what else the machine does.
_MAX_OF_PLAN = 5
_MAX_RECORDS = 20
_LONGEST_S = 86_400.0
# Another file's load is comparable if neither file is more than so many times as large as the other.
_SIMILAR = 8.0
_SHORTEST_S = 0.01


class LoadTimes(Struct, frozen=True):
    """The times of the stages of one load of the plan ``key``.

    ``memory_bytes``: the growth of the process's anonymous memory while the context was allocated.
    ``warm_up_cpu_s``: 0.0 if it is not known. ``cpu_bytes``: the weights with which the CPU computed; older
    records have 0.
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
    cpu_bytes: int = 0

    @property
    def on_cpu(self) -> bool:
        return self.cpu_bytes > self.weights_bytes / 2

    @property
    def total_s(self) -> float:
        return self.begin_s + self.weights_s + self.memory_s + self.warm_up_s


class LoadFacts(Struct, frozen=True):
    """The facts that are known before a load. 0 and None: not known.

    ``cpu_bytes``: the weights with which the CPU computes. ``device_bytes``: the weights that are copied to
    the memory of devices. ``memory_bytes``: the estimated host memory of the context, which llama-server
    fills with zeros. ``earlier``: the expected times, from earlier loads. ``of_this_file``: whether they are
    from loads of this file.
    """

    weights_bytes: int = 0
    cpu_bytes: int = 0
    device_bytes: int = 0
    memory_bytes: int = 0
    earlier: LoadTimes | None = None
    of_this_file: bool = True

    @property
    def on_cpu(self) -> bool:
        return self.cpu_bytes > self.weights_bytes / 2


def add_times(records: Sequence[LoadTimes], times: LoadTimes) -> tuple[LoadTimes, ...]:
    """Add the times of one load, the newest last."""
    same = [record for record in records if _plan_of(record) == _plan_of(times)]
    dropped = same[: max(0, len(same) + 1 - _MAX_OF_PLAN)]
    kept = [record for record in records if not any(record is other for other in dropped)]
    return (*kept, times)[-_MAX_RECORDS:]


def times_for(records: Sequence[LoadTimes], runtime: str, key: str) -> LoadTimes | None:
    """Estimate the times of a load with the plan ``key``; None without a load by this ``runtime``.

    The estimate uses loads of the same plan, or else loads of other plans. The weights take as long as last
    time, because the last load has changed the page cache. The warm-up takes as long as the fastest one: it
    computes the same each time, and only other programs, or a file in small pages after a slow disk, make it
    slower. The other stages take the median.
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
        cpu_bytes=last.cpu_bytes,
    )


def times_of_others(records: Sequence[LoadTimes], runtime: str, facts: LoadFacts) -> LoadTimes | None:
    """Estimate the times of a file that was never loaded, from loads of other files on this machine.

    Returns None if this ``runtime`` has loaded no file of similar size. A stage takes the median time for
    each byte. The weights take as long as in the slowest load, because nothing is known about the page
    cache, and the remaining time should rather fall than grow.
    """
    size = facts.weights_bytes
    found = [
        record
        for record in records
        if record.runtime == runtime
        and record.on_cpu is facts.on_cpu
        and record.weights_bytes <= _SIMILAR * size
        and size <= _SIMILAR * record.weights_bytes
        and record.weights_bytes
    ]
    if not found:
        return None
    scales = [size / record.weights_bytes for record in found]

    def scaled(stage: str) -> list[float]:
        return [getattr(record, stage) * scale for record, scale in zip(found, scales, strict=True)]

    fills = [record.memory_bytes / record.memory_s for record in found if record.memory_s >= _SHORTEST_S]
    fill_bytes_s = median(fills) if fills and facts.on_cpu else 0.0  # weights are copied to a device
    return LoadTimes(
        runtime,
        "",
        begin_s=median(record.begin_s for record in found),
        weights_s=max(scaled("weights_s")),
        memory_s=facts.memory_bytes / fill_bytes_s if fill_bytes_s else median(scaled("memory_s")),
        warm_up_s=median(scaled("warm_up_s")),
        weights_bytes=size,
        warm_up_cpu_s=median(scaled("warm_up_cpu_s")),
        cpu_bytes=facts.cpu_bytes,
    )


def is_possible(times: LoadTimes) -> bool:
    """Whether the record is plausible: a file on disk can be damaged."""
    stages = (times.begin_s, times.weights_s, times.memory_s, times.warm_up_s, times.warm_up_cpu_s)
    are_times = all(math.isfinite(stage_s) and 0.0 <= stage_s <= _LONGEST_S for stage_s in stages)
    return are_times and min(times.weights_bytes, times.memory_bytes, times.cpu_bytes) >= 0


def _plan_of(times: LoadTimes) -> tuple[str, str]:
    return times.runtime, times.key
