"""Compares a candidate with the default on real servers: in pairs, and in rounds from fresh processes.

Owns the servers. The default stays alive while candidates are screened next to it, and only one of the two
computes at a time. If the memory does not hold both, they alternate. In a proof, each round starts both
again: two processes of the same configuration can differ for their whole life (placement of pages, of
threads), which pairs within one process would not average out.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

from llamasup.core.planning.drafting import no_drafts
from llamasup.core.planning.facts import Launch
from llamasup.core.planning.measured.tuned import NO_CHANGES, Changes
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.planning.planner import Planner
from llamasup.errors import LlamasupError, TuningFailed
from llamasup.features.tuning.candidates import Candidate, Purpose
from llamasup.features.tuning.search import is_hopeless
from llamasup.features.tuning.trial import Trial, TrialFailed, TrialTimedOut, spawn_trial
from llamasup.features.tuning.workload import (
    BOUND,
    Block,
    Distribution,
    Lengths,
    Measurement,
    Probe,
    block_for,
    clients_for,
    divergence,
    log_ratio,
    middle_of,
    probes,
)

T = TypeVar("T")

_FIRST_START_S = 600.0
_LEAST_WAIT_S = 30.0
# After the end of the time, what is running may take this long.
_GRACE_S = 20.0
# Of the lengths of the mix: where the calibration begins, and how it grows.
_FIRST_SCALE, _GROWTH, _LARGEST_SCALE = 0.05, 3.0, 16.0
_CALIBRATIONS = 3
_FIRST_MEASUREMENTS = 3
PAIRS_IN_ROUND = 2


class TooLossy(TrialFailed):
    """The candidate works, but alters answers too much."""


class TimeOver(Exception):
    """The time of the tuning ended before a server answered. It says nothing about the server."""


class Comparison:
    """Runs the measurements. ``folder`` is the run folder. ``left_s`` returns the time that is left for all
    measurements.

    ``starts_s``: the times of all starts. ``default_times``: those of the default's blocks.
    """

    def __init__(
        self,
        launch: Launch,
        folder: Path,
        purpose: Purpose,
        left_s: Callable[[], float],
        *,
        allow_lossy: bool,
    ) -> None:
        self.starts_s: list[float] = []
        self.default_times: list[float] = []
        self.measured: list[tuple[Measurement, Measurement]] = []
        """The measurements of the default and of the candidate of the last round, in all its rounds."""
        self._launch = launch
        self._folder = folder
        self._purpose = purpose
        self._left_s = left_s
        self._allow_lossy = allow_lossy
        self._number = 0
        self._alternates = False
        self._default: Trial | None = None
        self._tried: Trial | None = None
        self._starting: Trial | None = None
        self._ending: Trial | None = None
        self._references: dict[tuple[Probe, ...], list[Distribution]] = {}
        self._checked: set[str] = set()
        self._proven = ""  # the candidate of the last round

    @property
    def start_s(self) -> float:
        """The usual time of a start; 0 before the first one, which may read the model from the disk."""
        return median(self.starts_s or (0.0,))

    @property
    def block_s(self) -> float:
        """The usual time of a block: one can be a bad moment of the machine."""
        return median(self.default_times or (0.0,))

    def screening_s(self, pairs: int) -> float:
        """Return how long a screening takes."""
        block_s = self.block_s
        if self._alternates:
            return pairs * (2 * self.start_s + 4 * block_s)
        return self.start_s + (2 * pairs + 1) * block_s

    async def close(self) -> None:
        """End all servers."""
        await self._end_trials()

    def stop_now(self) -> None:
        """Free the CPUs at once. ``close`` is still necessary."""
        for trial in (self._default, self._tried, self._starting, self._ending):
            if trial is not None:
                trial.kill()

    # --- the default

    async def start_default(self) -> Trial:
        if self._default is None:
            self._default = await self._started_default(self._plan(NO_CHANGES)[0])
        return self._default

    async def calibrated(self, mix: Sequence[Lengths], target_s: float) -> Block:
        """Make the block of all measurements, which takes about ``target_s``. This also warms the
        default up.
        """
        default = await self.start_default()
        clients = clients_for(self._purpose, default.plan.parallel)
        ctx_size = default.plan.ctx_size_of_slot
        scale = _FIRST_SCALE
        while True:
            block = block_for(mix, scale, ctx_size=ctx_size, clients=clients)
            # The fastest one: a neighbour that works just now must not make the block too short.
            seconds = min([(await self._of_default(default, block)).seconds for _ in range(_CALIBRATIONS)])
            if seconds >= target_s / _GROWTH or scale >= _LARGEST_SCALE:
                break
            scale *= _GROWTH
        return block_for(mix, scale * target_s / seconds, ctx_size=ctx_size, clients=clients)

    async def measure_default(self, block: Block) -> Measurement:
        """Measure three times, and return the middle, from which the times of all steps are estimated at
        first.
        """
        default = await self.start_default()
        measured = [await self._of_default(default, block) for _ in range(_FIRST_MEASUREMENTS)]
        middle = middle_of(measured)
        assert middle is not None
        return middle

    # --- comparisons

    async def screen(self, candidate: Candidate, pairs: int, block: Block) -> list[float]:
        if self._launch.settings.rpc:  # an RPC worker serves one of the two
            await self._end_trials()
            await self._prepare_quality(candidate)
            self._alternates = True
            return await self._alternate(candidate, pairs, block)
        await self.start_default()
        await self._prepare_quality(candidate)
        plan, fits = self._plan(candidate.changes)
        self._alternates = not fits
        if not fits:
            return await self._alternate(candidate, pairs, block)
        default = await self.start_default()
        try:
            self._tried = trial = await self._start(plan)
            await self._check_quality(candidate, trial)
            await self._measure(trial, block)  # as the default has been
            ratios: list[float] = []
            while len(ratios) < pairs and not is_hopeless(ratios):
                ratios.append(await self._pair(default, trial, block))
            return ratios
        finally:
            await self._end_trials(default=False)

    async def _alternate(self, candidate: Candidate, pairs: int, block: Block) -> list[float]:
        """Measure one after the other: they do not fit into memory together, or need the same RPC worker."""
        await self._end_trials()
        if not self._plan(candidate.changes)[1]:
            raise TrialFailed("it does not fit in memory")
        try:
            return [await self._one_after_the_other(candidate, block, 1) for _ in range(pairs)]
        finally:
            await self._end_trials()

    async def round(self, candidate: Candidate, block: Block) -> float:
        """Measure one round of a proof, from fresh processes: the median of its pairs."""
        if self._proven != candidate.name:
            self.measured.clear()
            self._proven = candidate.name
        await self._prepare_quality(candidate)
        await self._end_trials()
        plans = [self._plan(changes)[0] for changes in (NO_CHANGES, candidate.changes)]
        free = plans[0].memory.free
        try:
            if sum(plan.memory.host_bytes for plan in plans) < free.host_bytes and not free.names:
                return await self._next_to_each_other(candidate, plans, block)
            return await self._one_after_the_other(candidate, block, PAIRS_IN_ROUND)
        finally:
            await self._end_trials()

    async def _next_to_each_other(
        self, candidate: Candidate, plans: Sequence[LaunchPlan], block: Block
    ) -> float:
        """The median of the pairs of two new processes."""

        async def start_default() -> Trial:
            self._default = await self._started_default(plans[0])
            return self._default

        async def start_tried() -> Trial:
            self._tried = await self._start(plans[1])
            return self._tried

        default, trial = await _in_random_order(start_default, start_tried)
        await self._check_quality(candidate, trial)
        await self._both(default, trial, block)  # the first requests touch memory first
        return median([await self._pair(default, trial, block) for _ in range(PAIRS_IN_ROUND)])

    async def _one_after_the_other(self, candidate: Candidate, block: Block, count: int) -> float:
        """A pair in which each of the two is started, measured ``count`` times, and ended."""
        of_default, of_trial = await _in_random_order(
            partial(self._alone, None, block, count), partial(self._alone, candidate, block, count)
        )
        self._note(of_default, of_trial)
        return log_ratio(self._purpose, of_default, of_trial)

    async def _alone(self, candidate: Candidate | None, block: Block, count: int) -> Measurement:
        """The median of ``count`` blocks on a server started for them; None: the default."""
        if candidate is None:
            default = await self.start_default()
            measured = [await self._of_default(default, block) for _ in range(count + 1)]
        else:
            trial = self._tried = await self._start(self._plan(candidate.changes)[0])
            await self._check_quality(candidate, trial)
            measured = [await self._measure(trial, block) for _ in range(count + 1)]
        await self._end_trials()
        middle = middle_of(measured[1:])
        assert middle is not None
        return middle

    async def _pair(self, default: Trial, trial: Trial, block: Block) -> float:
        measured = await self._both(default, trial, block)
        self._note(*measured)
        return log_ratio(self._purpose, *measured)

    async def _both(self, default: Trial, trial: Trial, block: Block) -> tuple[Measurement, Measurement]:
        """Measure one block on each of the two."""
        return await _in_random_order(
            partial(self._next_to, default, block), partial(self._measure, trial, block)
        )

    async def _next_to(self, default: Trial, block: Block) -> Measurement:
        """The default while a candidate runs: if it ends now, the candidate is to blame."""
        try:
            return await self._measure(default, block)
        except TrialFailed as error:
            raise TrialFailed(f"the default failed while both ran: {error}") from None

    def _note(self, default: Measurement, tuned: Measurement) -> None:
        self.default_times.append(default.seconds)
        self.measured.append((default, tuned))

    async def _of_default(self, default: Trial, block: Block) -> Measurement:
        try:
            return await self._measure(default, block)
        except TrialFailed as error:
            raise TuningFailed(
                f"the server with the default plan failed: {error}",
                remedy="Nothing was changed. `llamasup run` shows more about the failure.",
            ) from None

    # --- servers

    def _plan(self, changes: Changes) -> tuple[LaunchPlan, bool]:
        """The plan with these changes, and whether it fits into the free memory without being reduced.

        Raises TrialFailed if it is not possible; for the default, what planning raises; and TuningFailed if
        an RPC worker is missing.
        """
        self._number += 1
        planner = Planner(self._launch, self._folder, f"{self._number}-", trial=changes)
        generation = 2 if self._launch.runtime.capabilities.devices else 1
        try:
            admission = planner.admission(generation)
        except LlamasupError as error:
            if changes == NO_CHANGES:
                raise
            raise TrialFailed(error.message) from None
        made = admission.plan
        # Without its workers, the model would be measured in another state than it is used.
        if planner.missing_workers:
            raise TuningFailed(
                f"the plan needs the RPC worker {', '.join(planner.missing_workers)}, which does not answer.",
                remedy="Start it (llamasup rpc-worker), and tune again. Nothing was changed.",
            )
        return made, made.memory.fits and len(admission.considered) == 1

    async def _started_default(self, plan: LaunchPlan) -> Trial:
        try:
            return await self._start(plan)
        except TrialFailed as error:
            if self._tried is not None:
                raise TrialFailed(f"the default did not start next to it: {error}") from None
            raise TuningFailed(
                f"the server with the default plan did not start: {error}",
                remedy="Start it with `llamasup run`, which shows more, and tune it when it works.",
            ) from None

    async def _start(self, plan: LaunchPlan) -> Trial:
        longest_s = max(self.starts_s, default=_FIRST_START_S)
        self._starting = trial = spawn_trial(plan, self._folder)
        try:
            await self._within(trial.become_ready, max(_LEAST_WAIT_S, 10 * longest_s))
        except BaseException:
            await trial.end()
            raise
        finally:
            self._starting = None
        self.starts_s.append(trial.start_s)
        return trial

    async def _end_trials(self, *, default: bool = True) -> None:
        self._ending, self._tried = self._tried, None
        if self._ending is not None:
            await self._ending.end()
        if default:
            self._ending, self._default = self._default, None
            if self._ending is not None:
                await self._ending.end()
        self._ending = None

    # --- the quality guard

    async def _prepare_quality(self, candidate: Candidate) -> None:
        """Request from the reference what ``_check_quality`` compares. Called while no candidate runs."""
        if not self._must_check(candidate):
            return
        asked = _probes(self._plan(candidate.changes)[0])
        if asked in self._references:
            return
        reference = await self.start_default()
        try:
            if changes := self._reference_changes(reference.plan):
                await self._end_trials()
                self._tried = reference = await self._start(self._plan(Changes(changes))[0])
            self._references[asked] = await self._distributions(reference, asked)
        finally:
            await self._end_trials(default=False)

    def _reference_changes(self, plan: LaunchPlan) -> tuple[tuple[str, str], ...]:
        """Return the changes that make the default the reference: an f16 KV cache, and no drafts."""
        changes: tuple[tuple[str, str], ...] = ()
        if plan.kv_type != "f16":
            changes += (("--cache-type-k", "f16"), ("--cache-type-v", "f16"))
        if _drafts(plan) and (off := no_drafts(self._launch.runtime.capabilities)) is not None:
            changes += (off,)
        return changes

    async def _check_quality(self, candidate: Candidate, trial: Trial) -> None:
        """Raises TrialFailed for a candidate whose answers differ too much."""
        if not self._must_check(candidate):
            return
        asked = _probes(trial.plan)
        seen = divergence(self._references[asked], await self._distributions(trial, asked))
        if seen is None:
            raise TooLossy("this build does not list probabilities, so its answers cannot be compared")
        if seen > BOUND:
            raise TooLossy(
                f"its answers differ: {seen:.3f} nats a token, and {BOUND:g} are allowed (--allow-lossy)"
            )
        self._checked.add(candidate.name)

    def _must_check(self, candidate: Candidate) -> bool:
        return candidate.lossy and not self._allow_lossy and candidate.name not in self._checked

    # --- limits

    async def _measure(self, trial: Trial, block: Block) -> Measurement:
        """Measure one block. A server that takes much longer than the default counts as hanging."""
        slowest_s = max(self.default_times, default=0.0)
        limit_s = max(_LEAST_WAIT_S, 20 * slowest_s) if slowest_s else _FIRST_START_S
        return await self._within(partial(trial.measure, block), limit_s)

    async def _distributions(self, trial: Trial, asked: Sequence[Probe]) -> list[Distribution]:
        return await self._within(partial(trial.distributions, asked), _FIRST_START_S)

    async def _within(self, work: Callable[[float], Awaitable[T]], limit_s: float) -> T:
        """The result of ``work``, which gets its limit. Raises TimeOver if the tuning ends before it."""
        left_s = max(0.0, self._left_s()) + _GRACE_S
        try:
            return await work(min(limit_s, left_s))
        except TrialTimedOut:
            if left_s < limit_s:
                raise TimeOver from None
            raise


async def _in_random_order(one: Callable[[], Awaitable[T]], other: Callable[[], Awaitable[T]]) -> tuple[T, T]:
    if secrets.randbits(1):
        first = await one()
        return first, await other()
    second = await other()
    return await one(), second


def _probes(plan: LaunchPlan) -> tuple[Probe, ...]:
    return probes(plan.ctx_size_of_slot, drafts=_drafts(plan))


def _drafts(plan: LaunchPlan) -> bool:
    """Whether a server of this plan drafts tokens."""
    words = plan.argv
    if "--spec-type" in words[:-1]:
        return words[words.index("--spec-type") + 1] != "none"
    return any(flag in words for flag in ("--spec-draft-model", "--model-draft", "-md"))
