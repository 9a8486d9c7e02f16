"""Samples the load of one child: its memory, the bytes that it has read, and the stage that its log shows.

An effect: reads /proc. ``load_progress.py`` makes an estimate of the samples. ``probes.watch_progress`` calls
``sample`` while the child starts; between two samples nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from llamasup.core.planning.measured.load_times import LoadFacts, LoadTimes
from llamasup.core.supervision.load_progress import LoadEstimate, LoadProgress, Sample, Stage
from llamasup.core.system.hardware.usage import LoadUsage, load_usage

_STAGES = {"weights": Stage.WEIGHTS, "warm_up": Stage.WARM_UP}


class LoadWatch:
    """The load of the process ``pid``, which has just been started. ``clock``: monotonic, in seconds."""

    def __init__(
        self,
        facts: LoadFacts,
        pid: int,
        clock: Callable[[], float],
        usage: Callable[[int], LoadUsage | None] = load_usage,
    ) -> None:
        self._estimate = LoadEstimate(facts)
        self._pid = pid
        self._clock = clock
        self._usage = usage
        self._began_s = clock()
        self._stage = Stage.BEGIN
        self._times: LoadTimes | None = None

    def __repr__(self) -> str:
        return f"<LoadWatch of process {self._pid}: {self.progress}>"

    def stage_began(self, stage: Literal["weights", "warm_up"]) -> None:
        """The log shows that ``stage`` begins."""
        if _STAGES[stage] > self._stage and self._times is None:
            self._stage = _STAGES[stage]
            self.sample()

    def sample(self) -> LoadUsage | None:
        """Look at the process; None if it has ended."""
        seen = self._usage(self._pid)
        if seen is not None and self._times is None:
            sample = Sample(
                self._clock() - self._began_s,
                seen.file_bytes,
                seen.anonymous_bytes,
                seen.read_bytes,
                seen.disk_bytes,
                seen.cpu_s,
                self._stage,
            )
            self._estimate = self._estimate.after(sample)
        return seen

    @property
    def progress(self) -> LoadProgress:
        """The progress at the last sample."""
        return self._estimate.progress(self._clock() - self._began_s)

    @property
    def times(self) -> LoadTimes | None:
        """The times of its stages, once it has ended."""
        return self._times

    def end(self) -> None:
        """The child serves."""
        if self._times is None:
            self._times = self._estimate.times("", "", self._clock() - self._began_s)
