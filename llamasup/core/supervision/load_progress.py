"""Estimates the progress of a load: samples of the process in, percent and remaining time out (pure).

``LoadWatch`` in ``generation.py`` takes the samples. A load has four stages
(``planning/measured/load_times.py``):

- *begin*: until the log says that the model is loaded, or until weights arrive.
- *weights*: their bytes arrive by a memory map (resident file pages), by system calls (bytes read), or from
  the disk without both (a device that gets them directly). The largest of these three counts.
- *memory*: llama-server fills the memory of the context with zeros, so its anonymous memory grows. If a
  device has its own memory, mapped weights are copied there in this stage, without any measure but time.
- *warm-up*: its own empty run, then the first token of llamasup. If the CPU computes, its measure is the CPU
  time, which other programs do not change. On a GPU, there is only the time.

The log shows where a stage begins (b11434: "loading model", "llama threadpool init"); without these lines the
bytes show it. The rest of a stage comes from its present speed, the later ones from earlier loads of this
file, or else of other files. The remaining time grows only if the estimate was clearly wrong, and then there
is a ``reason``.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from llamasup.core.planning.measured.load_times import LoadFacts, LoadTimes
from llamasup.core.system.text import memory_text


class Stage(IntEnum):
    BEGIN = 0
    WEIGHTS = 1
    MEMORY = 2
    WARM_UP = 3


_NOISE_BYTES: Final = 32 << 20
"""Less is not measured: the libraries of a Python process alone have more bytes."""
_COMPLETE: Final = 0.98
_NEARLY_COMPLETE: Final = 0.85  # and no more bytes come: some were read before the first sample
_IDLE_S: Final = 0.5
_STALL_S: Final = 2.0
"""Without bytes for so long, the disk stalls; a slow one has pauses of some 100 ms."""
_MIN_RATE_S: Final = 0.4
_SHORTEST_S: Final = 0.01
_SURE_S: Final = 2.0
_SURE_BYTES: Final = 256 << 20
"""A speed is computed after so long a time, or after so many bytes, or after some of both."""
_BURST: Final = 0.2
"""The first part of a stage does not count for its speed: a limited disk begins with a burst."""
_RECENT: Final = 1 / 3
_RECENT_S: Final = 1.5
_STEADY: Final = 0.25
"""If the speed of the last third differs more from that of the stage, the disk is slower or faster now."""
_MAX_EDGES: Final = 64

# Without an earlier load, on two cores of 2024: zeros are written at 2 to 4 GB/s. The warm-up computes with
# all weights of the CPU at 3 GB/s, in 0.9 s of CPU time for each GB.
_FILL_BYTES_S: Final = 2.5e9
_COPY_BYTES_S: Final = 6e9  # to a GPU: 4.5 to 6.9 GB/s (H100, PCIe 5, b11434; scripts/gpu)
_RUN_BYTES_S: Final = 3e9
_CPU_BYTES_S: Final = 1.1e9
_MIN_WARM_UP_S: Final = 0.2

_SLACK: Final = 0.15
_SLACK_S: Final = 0.5
"""By how much a new estimate may exceed the last one, and the remaining time just stays: noise."""
_MOST_PERCENT: Final = 99.0  # until it serves


class Sample(Struct, frozen=True):
    """One look at the process, ``at_s`` after its start. ``stage``: the last one that the log shows."""

    at_s: float
    file_bytes: int = 0  # resident pages of mapped files
    anonymous_bytes: int = 0  # other resident memory
    read_bytes: int = 0  # by system calls
    disk_bytes: int = 0  # fetched from a disk
    cpu_s: float = 0.0
    stage: Stage = Stage.BEGIN


class LoadProgress(Struct, frozen=True):
    """The ``load`` object of the contract. None: not known. ``reason``: why the remaining time has grown."""

    percent: float | None
    eta_s: float | None
    elapsed_s: float
    reason: str | None = None

    def as_json(self) -> dict[str, float | str | None]:
        return asdict(self) | {"elapsed_s": round(self.elapsed_s, 3)}


class _Meter(Struct, frozen=True):
    """The bytes of one stage. ``edges``: its begin and each time at which bytes came, with their sum."""

    edges: tuple[tuple[float, int], ...] = ((0.0, 0),)
    at_s: float = 0.0

    def after(self, at_s: float, done_bytes: int) -> _Meter:
        if done_bytes <= self.done_bytes:
            return replace(self, at_s=at_s)
        before = self.edges if self.edges[-1][0] < at_s else self.edges[:-1]
        edges = (*before, (at_s, done_bytes))
        if len(edges) > _MAX_EDGES:
            edges = (edges[0], *edges[1:-1:2], edges[-1])
        return _Meter(edges, at_s)

    @property
    def began_s(self) -> float:
        return self.edges[0][0]

    @property
    def done_bytes(self) -> int:
        return self.edges[-1][1]

    @property
    def grown_bytes(self) -> int:
        return self.done_bytes - self.edges[0][1]

    @property
    def idle_s(self) -> float:
        """Since bytes came last."""
        return self.at_s - self.edges[-1][0]

    @property
    def rate_bytes_s(self) -> float | None:
        """The speed to count on; None: not known yet."""
        elapsed_s = self.at_s - self.began_s
        is_sure = elapsed_s >= _SURE_S or self.grown_bytes >= _SURE_BYTES
        is_known = is_sure or (elapsed_s >= _MIN_RATE_S and self.grown_bytes >= _NOISE_BYTES)
        if not is_known or len(self.edges) < 2:
            return None
        whole = self._rate_since(self.began_s + _BURST * elapsed_s)
        recent = self._rate_since(self.at_s - max(_RECENT_S, _RECENT * elapsed_s))
        return whole if abs(recent - whole) <= _STEADY * whole else recent

    def _rate_since(self, from_s: float) -> float:
        """From the edge before ``from_s`` to the last one, as bytes come in blocks. In a stall, until now."""
        first = max((edge for edge in self.edges[:-1] if edge[0] <= from_s), default=self.edges[0])
        end_s = self.edges[-1][0] if self.idle_s < _STALL_S else self.at_s
        return (self.done_bytes - first[1]) / (end_s - first[0])


class LoadEstimate(Struct, frozen=True):
    """The estimate of one generation after some samples. ``marks``: when each stage began, so far."""

    facts: LoadFacts
    marks: tuple[float, ...] = (0.0,)
    percent: float | None = None
    eta_s: float | None = None
    reason: str | None = None
    last: Sample = Sample(0.0)
    base: Sample = Sample(0.0)
    """The last sample before the weights."""
    weights: _Meter = _Meter()
    memory: _Meter = _Meter()
    warm_up_from: Sample = Sample(0.0)
    """The first sample of the warm-up."""
    due_s: float | None = None
    """The end that was announced before the remaining time grew."""
    rate_bytes_s: float | None = None
    """The speed that the last estimate counted on."""

    @property
    def stage(self) -> Stage:
        return Stage(len(self.marks) - 1)

    def progress(self, elapsed_s: float) -> LoadProgress:
        return LoadProgress(self.percent, self.eta_s, elapsed_s, self.reason)

    # --- one sample

    def after(self, sample: Sample) -> LoadEstimate:
        """The estimate after one more sample."""
        changed = self._entered(sample)
        changed = changed._measured(sample)
        while (next_ := changed._completed(sample)) is not None:
            changed = next_
        return changed._estimated(sample.at_s)

    def _entered(self, sample: Sample) -> LoadEstimate:
        """Enter the stage that the log shows, or in which weights arrive."""
        changed = self
        stage = sample.stage
        weights_arrive = self._knows_weights and _arrived(sample, self.base) >= _NOISE_BYTES
        if changed.stage is Stage.BEGIN and stage is Stage.BEGIN and weights_arrive:
            stage = Stage.WEIGHTS
        while changed.stage < stage:
            changed = changed._next_stage(sample)
        return changed if changed.stage is not Stage.BEGIN else replace(changed, base=sample)

    def _next_stage(self, sample: Sample) -> LoadEstimate:
        at_s = sample.at_s
        changed = replace(self, marks=(*self.marks, at_s), reason=None, due_s=None, rate_bytes_s=None)
        if changed.stage is Stage.WEIGHTS:
            return replace(changed, weights=_Meter(((at_s, 0),), at_s))
        if changed.stage is Stage.MEMORY:
            return replace(changed, memory=_Meter(((at_s, sample.anonymous_bytes),), at_s))
        return replace(changed, warm_up_from=sample)

    @property
    def _knows_weights(self) -> bool:
        return self.facts.weights_bytes >= _NOISE_BYTES

    def _measured(self, sample: Sample) -> LoadEstimate:
        """Count the bytes of the current stage."""
        if self.stage is Stage.WEIGHTS:
            done_bytes = min(_arrived(sample, self.base), self.facts.weights_bytes)
            return replace(self, last=sample, weights=self.weights.after(sample.at_s, done_bytes))
        if self.stage is Stage.MEMORY:
            return replace(self, last=sample, memory=self.memory.after(sample.at_s, sample.anonymous_bytes))
        return replace(self, last=sample)

    def _completed(self, sample: Sample) -> LoadEstimate | None:
        """The next stage, if the bytes of this one are complete; None otherwise."""
        if self.stage is Stage.WEIGHTS and self._knows_weights:
            share = self.weights.done_bytes / self.facts.weights_bytes
            is_over = share >= _NEARLY_COMPLETE and self.weights.idle_s >= _IDLE_S
            return self._next_stage(sample) if share >= _COMPLETE or is_over else None
        if self.stage is Stage.MEMORY and self.facts.earlier is not None and not self._copies:
            target = self.facts.earlier.memory_bytes
            is_over = _NOISE_BYTES <= target * _COMPLETE <= self.memory.grown_bytes
            return self._next_stage(sample) if is_over else None
        return None

    # --- the estimate

    def _estimated(self, at_s: float) -> LoadEstimate:
        rest_s = self._rest_s(at_s)
        if rest_s is None:
            return self
        eta_s = round(rest_s, 1)
        changed = self
        if self.eta_s is not None and eta_s > self.eta_s:
            slack_s = max(_SLACK_S, _SLACK * self.eta_s)
            if eta_s <= self.eta_s + slack_s:
                eta_s = self.eta_s
            else:
                due_s = self.last.at_s + self.eta_s if self.due_s is None else self.due_s
                changed = replace(self, reason=self._reason(at_s), due_s=due_s)
        elif self.due_s is not None and at_s + eta_s <= self.due_s:
            changed = replace(self, reason=None, due_s=None)
        percent = min(_MOST_PERCENT, 100.0 * at_s / (at_s + rest_s)) if at_s + rest_s > 0.0 else 0.0
        return replace(
            changed,
            eta_s=eta_s,
            percent=round(max(percent, self.percent or 0.0), 1),
            rate_bytes_s=changed._rate_bytes_s,
        )

    @property
    def _rate_bytes_s(self) -> float | None:
        if self.stage is Stage.WEIGHTS:
            return self.weights.rate_bytes_s
        return self.memory.rate_bytes_s if self.stage is Stage.MEMORY else None

    def _rest_s(self, at_s: float) -> float | None:
        """The rest of this stage and of the later ones; None: not known."""
        in_stage_s, earlier = at_s - self.marks[-1], self.facts.earlier
        if not self._knows_weights and earlier is None:
            return None
        match self.stage:
            case Stage.BEGIN:
                if earlier is None:
                    return None
                begin_s = _rest_of_s(earlier.begin_s, in_stage_s)
                return begin_s + self._weights_s(earlier) + self._memory_s + self._warm_up_s
            case Stage.WEIGHTS:
                weights_s = self._rest_of_weights_s(in_stage_s)
                return None if weights_s is None else weights_s + self._memory_s + self._warm_up_s
            case Stage.MEMORY:
                return self._rest_of_memory_s(in_stage_s) + self._warm_up_s
            case _:
                return self._rest_of_warm_up_s(in_stage_s)

    def _weights_s(self, earlier: LoadTimes) -> float:
        """The time of the whole stage at the speed of the last load."""
        if not self._knows_weights or not earlier.weights_bytes:
            return earlier.weights_s
        return earlier.weights_s * self.facts.weights_bytes / earlier.weights_bytes

    def _rest_of_weights_s(self, in_stage_s: float) -> float | None:
        rate, earlier = self.weights.rate_bytes_s, self.facts.earlier
        if self._knows_weights and rate is not None:
            return (self.facts.weights_bytes - self.weights.done_bytes) / rate
        return None if earlier is None else _rest_of_s(self._weights_s(earlier), in_stage_s)

    @property
    def _target_bytes(self) -> int:
        """The bytes by which the anonymous memory will grow."""
        earlier = self.facts.earlier
        return (earlier.memory_bytes if earlier is not None else 0) or self.facts.memory_bytes

    @property
    def _memory_s(self) -> float:
        """The time of the whole stage."""
        earlier = self.facts.earlier
        if earlier is not None:
            return earlier.memory_s
        copied_bytes = self.facts.device_bytes if self._copies else 0
        return self.facts.memory_bytes / _FILL_BYTES_S + copied_bytes / _COPY_BYTES_S

    @property
    def _copies(self) -> bool:
        """Whether mapped weights are copied to a device. Weights that are read by system calls are copied at
        the same time.
        """
        is_mapped = self.last.file_bytes - self.base.file_bytes >= self.last.read_bytes - self.base.read_bytes
        return is_mapped and self.facts.device_bytes > self.facts.weights_bytes / 2

    def _rest_of_memory_s(self, in_stage_s: float) -> float:
        rate, target = self.memory.rate_bytes_s, self._target_bytes
        if self._copies or target < _NOISE_BYTES or rate is None or self.memory.idle_s >= _IDLE_S:
            return _rest_of_s(self._memory_s, in_stage_s)
        return max(0, target - self.memory.grown_bytes) / rate

    @property
    def _warm_up_s(self) -> float:
        """The time of the whole stage."""
        earlier = self.facts.earlier
        if earlier is not None:
            return earlier.warm_up_s
        return _MIN_WARM_UP_S + self.facts.cpu_bytes / _RUN_BYTES_S

    def _rest_of_warm_up_s(self, in_stage_s: float) -> float:
        earlier, used_s = self.facts.earlier, self._warm_up_cpu_s
        cpu_s = self.facts.cpu_bytes / _CPU_BYTES_S if earlier is None else earlier.warm_up_cpu_s
        if not self.facts.on_cpu or cpu_s <= 0.0 or used_s <= 0.0 or in_stage_s < _MIN_RATE_S:
            return _rest_of_s(self._warm_up_s, in_stage_s)
        return _rest_of_s(cpu_s, used_s) * in_stage_s / used_s

    @property
    def _warm_up_cpu_s(self) -> float:
        """So far."""
        return self.last.cpu_s - self.warm_up_from.cpu_s if self.stage is Stage.WARM_UP else 0.0

    # --- the reason

    def _reason(self, at_s: float) -> str:
        """The reason why the remaining time has just grown."""
        earlier = self.facts.earlier
        is_known = earlier is not None and self.facts.of_this_file
        than = "in the last load" if is_known else "expected"
        match self.stage:
            case Stage.BEGIN:
                return f"llama-server takes longer to start than {than}"
            case Stage.WEIGHTS:
                meter, subject = self.weights, "the weights are read"
                if self.weights.idle_s >= _STALL_S:
                    return f"no weights have been read for {self.weights.idle_s:.0f} s"
                known = _rate(earlier.weights_bytes, earlier.weights_s) if earlier and is_known else 0.0
            case Stage.MEMORY:
                meter, subject = self.memory, "the memory of the context is filled"
                if self._copies:
                    return f"the weights are copied to the device more slowly than {than}"
                known = _rate(earlier.memory_bytes, earlier.memory_s) if earlier and is_known else 0.0
            case _:
                return f"the warm-up takes longer than {than} ({self._warm_up_s:.1f} s)"
        rate = meter.rate_bytes_s
        if rate is not None and self.rate_bytes_s is not None and rate < self.rate_bytes_s:
            return f"{subject} at {_speed(rate)} now, {_speed(self.rate_bytes_s)} before"
        if rate is not None and rate < known:
            return f"{subject} at {_speed(rate)}, {_speed(known)} in the last load"
        stage_s = at_s - self.marks[-1]
        return f"{subject} more slowly than {than} (for {stage_s:.1f} s now)"

    # --- its end

    def times(self, runtime: str, key: str, ready_s: float) -> LoadTimes:
        """The times of this load, which has ended ``ready_s`` after its start."""
        marks = [*self.marks, *[ready_s] * (len(Stage) + 1 - len(self.marks))]
        begin_s, weights_s, memory_s, warm_up_s = (max(0.0, end - mark) for mark, end in pairwise(marks))
        return LoadTimes(
            runtime,
            key,
            begin_s=begin_s,
            weights_s=weights_s,
            memory_s=memory_s,
            warm_up_s=warm_up_s,
            weights_bytes=self.facts.weights_bytes,
            memory_bytes=self.memory.grown_bytes,
            warm_up_cpu_s=max(0.0, self._warm_up_cpu_s),
            cpu_bytes=self.facts.cpu_bytes,
        )


def _arrived(sample: Sample, base: Sample) -> int:
    return max(
        sample.file_bytes - base.file_bytes,
        sample.read_bytes - base.read_bytes,
        sample.disk_bytes - base.disk_bytes,
        0,
    )


def _rest_of_s(whole_s: float, elapsed_s: float) -> float:
    """The rest of a stage without a measure. One that takes longer than expected goes on for a part of that
    excess.
    """
    return max(whole_s - elapsed_s, 0.1 * whole_s + 0.25 * max(0.0, elapsed_s - whole_s))


def _rate(done_bytes: int, time_s: float) -> float:
    """0.0: the stage was too short to show a speed."""
    return done_bytes / time_s if time_s >= _SHORTEST_S else 0.0


def _speed(bytes_s: float) -> str:
    return f"{memory_text(round(bytes_s))}/s"
