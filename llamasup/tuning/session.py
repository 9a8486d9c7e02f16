"""One ``llamasup tune``: carries out the steps of the search on real servers, until done or out of time.

Owns the servers, the time and the saved state. :mod:`llamasup.tuning.search` decides what is measured.

The default stays alive while candidates are screened next to it, and only one of the two computes at a time.
If the memory does not hold both, they alternate. In a proof, each round starts both again: two processes of
the same configuration can differ for their whole life (placement of pages, of threads), which pairs within
one process would not average out.
"""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from llamasup.errors import LlamasupError, TuningFailed
from llamasup.llama_server.argv_builder import read_extra
from llamasup.llama_server.inspect import find_runtime
from llamasup.planning.attempts import Planner
from llamasup.planning.facts import Launch
from llamasup.planning.load_history import runtime_id
from llamasup.planning.plan import LaunchPlan
from llamasup.planning.tuned import NO_CHANGES, Changes, Kept, asked_key, machine_key
from llamasup.planning.tuned_store import cpu_name
from llamasup.system.hardware.probe import hardware
from llamasup.system.storage.fact_cache import FileIdentity
from llamasup.tuning.candidates import Candidate, Purpose, Setup, candidates
from llamasup.tuning.quality import BOUND, LENGTHS, Distribution, divergence
from llamasup.tuning.report import SessionResult
from llamasup.tuning.search import (
    Done,
    EntryState,
    ProofRound,
    Screen,
    Search,
    begin,
    failed,
    hurry,
    next_step,
    observed,
    proven,
    result,
    trials,
)
from llamasup.tuning.sequential import FEWEST
from llamasup.tuning.trial import Trial, TrialFailed, start_trial
from llamasup.tuning.workload import (
    STATED_MIX,
    Block,
    Lengths,
    Measurement,
    block_for,
    clients_for,
    log_ratio,
)

__all__ = ["Options", "Progress", "SavedSearch", "Session"]

_FIRST_START_S = 600.0
_LEAST_WAIT_S = 30.0
# Of the time of the tuning: the block of a measurement. About 100 pairs and 20 rounds fit in the rest.
_BLOCK_SHARE = 1 / 300
_SHORTEST_BLOCK_S, _LONGEST_BLOCK_S = 0.05, 10.0
# Of the lengths of the mix: where the calibration begins, and how it goes on.
_FIRST_SCALE, _GROWTH, _LARGEST_SCALE = 0.05, 3.0, 16.0
_PAIRS_IN_ROUND = 2
# A proof needs some rounds more than the fewest.
_RESERVED_ROUNDS = FEWEST + 3
_SUSPENDED_S = 0.5
_MOST_DISCARDED = 20
_DRIFT = 1.10

Progress = Callable[[str], None]


class Options(Struct, frozen=True):
    """``runtime``: as ``--runtime``. ``mix``: the lengths of requests; empty: the stated mix."""

    purpose: Purpose
    minutes: float
    runtime: str | None = None
    allow_lossy: bool = False
    mix: tuple[Lengths, ...] = ()


class SavedSearch(Struct, frozen=True):
    """An unfinished search, with all that a later call needs to go on with it."""

    runtime: str
    machine: str
    asked: str
    purpose: Purpose
    allow_lossy: bool
    mix: tuple[Lengths, ...]
    block: Block
    search: Search
    minutes: float
    default: Measurement


class Session:
    """``folder`` is the run folder. ``save`` stores the search after each step, None when it is over."""

    def __init__(
        self,
        launch: Launch,
        options: Options,
        folder: Path,
        *,
        saved: SavedSearch | None,
        save: Callable[[SavedSearch | None], None],
        say: Progress,
    ) -> None:
        self._launch = launch
        self._options = options
        self._folder = folder
        self._save = save
        self._say = say
        self._began_s = time.monotonic()
        self._number = 0
        self._default: Trial | None = None
        self._beside: Trial | None = None
        self._reference: list[Distribution] | None = None
        self._checked: set[str] = set()
        self._default_times: list[float] = []
        self._round_s = 0.0
        self._start_s = 0.0
        self._last_tuned: Measurement | None = None
        self._identity = FileIdentity.of(launch.model_path)
        self._runtime = runtime_id(launch.runtime.command, launch.runtime.capabilities)
        devices = launch.runtime.capabilities.devices
        self._machine = machine_key(hardware(), devices, cpu=cpu_name())
        self._asked = asked_key(launch.settings, launch.environ)
        self._saved = saved if saved is not None and self._fits(saved) else None
        self._earlier_minutes = 0.0 if self._saved is None else self._saved.minutes

    @property
    def resumed(self) -> bool:
        """Whether it goes on with an unfinished search."""
        return self._saved is not None

    async def run(self) -> SessionResult:
        """Raises TuningFailed, or what planning and starting the default raise."""
        try:
            return await self._run()
        finally:
            await self._end_trials()

    # --- the steps

    async def _run(self) -> SessionResult:
        mix = self._options.mix or STATED_MIX
        default = await self._start_default()
        clients = clients_for(self._options.purpose, default.plan.parallel)
        if self._saved is not None:
            block, search, measured = self._saved.block, self._saved.search, self._saved.default
        else:
            block = await self._calibrated(default, mix, clients)
            measured = await self._measure_default(block)
            search = begin(candidates(self._setup(default.plan)))
        discarded = 0
        while self._left_s > 0:
            if search.phase in ("screen", "combine") and self._left_s < self._reserve_s(block, measured):
                search = hurry(search)
            step = next_step(search)
            if isinstance(step, Done) or self._left_s < self._step_s(step, measured):
                break
            self._refuse_changed_files()
            before_s = _suspended_s()
            try:
                ratios = await self._carry_out(step, block)
            except TrialFailed as error:
                search = failed(search, step.candidate, str(error), _state_of(error))
                self._say(f"{step.candidate.name}: {error}")
            else:
                if _suspended_s() - before_s > _SUSPENDED_S:
                    self._say("the machine was suspended: this measurement is thrown away")
                    discarded += 1
                    if discarded > _MOST_DISCARDED:
                        break
                    continue
                search = observed(search, step.candidate, ratios)
                self._say_observed(step, search, ratios)
            self._store(block, search, measured, mix)
        finished = isinstance(next_step(search), Done)
        if trials(search) == 0 and not (finished and search.entries == ()):
            raise TuningFailed(
                f"{self._options.minutes:g} min are too short for one comparison: a start takes "
                f"{self._start_s:.1f} s, and one measurement {measured.seconds:.1f} s.",
                remedy="Give more time with --minutes. Nothing was changed.",
            )
        if finished:
            self._save(None)
        return SessionResult(
            search,
            finished,
            self._kept(search) if finished else None,
            measured,
            self._last_tuned,
            self._minutes,
            self._drift(),
        )

    async def _carry_out(self, step: Screen | ProofRound, block: Block) -> list[float]:
        """The log-ratios of this step. Raises TrialFailed if the candidate fails."""
        match step:
            case Screen(candidate, pairs):
                return await self._screen(candidate, pairs, block)
            case ProofRound(candidate):
                return [await self._round(candidate, block)]

    async def _screen(self, candidate: Candidate, pairs: int, block: Block) -> list[float]:
        default = await self._start_default()
        await self._prepare_quality(candidate)
        plan, fits = self._plan(candidate.changes)
        if not fits:
            return await self._alternate(candidate, pairs, block)
        default = await self._start_default()
        self._beside = trial = await self._start(plan)
        try:
            await self._check_quality(candidate, trial)
            await trial.measure(block, self._limit_s(block))  # the first requests touch memory first
            return [await self._pair(default, trial, block, record=candidate.name) for _ in range(pairs)]
        finally:
            await self._end_trials(default=False)

    async def _alternate(self, candidate: Candidate, pairs: int, block: Block) -> list[float]:
        """Both one after the other, as they do not fit into memory together."""
        await self._end_trials()
        if not self._plan(candidate.changes)[1]:
            raise TrialFailed("it does not fit in memory")
        return [await self._one_after_the_other(candidate, block, 1) for _ in range(pairs)]

    async def _round(self, candidate: Candidate, block: Block) -> float:
        """One round of a proof, from fresh processes: the median of its pairs."""
        began_s = time.monotonic()
        await self._prepare_quality(candidate)
        await self._end_trials()
        plans = [self._plan(changes)[0] for changes in (NO_CHANGES, candidate.changes)]
        free = plans[0].memory.free
        if sum(plan.memory.host_bytes for plan in plans) < free.host_bytes and not free.names:
            first, second = (0, 1) if secrets.randbits(1) else (1, 0)
            started: dict[int, Trial] = {}
            for which in (first, second):
                started[which] = await self._start(plans[which])
                if which == 0:
                    self._default = started[0]
                else:
                    self._beside = started[1]
            await self._check_quality(candidate, started[1])
            for which in (first, second):
                await started[which].measure(block, self._limit_s(block))
            ratios = [
                await self._pair(started[0], started[1], block, record=candidate.name)
                for _ in range(_PAIRS_IN_ROUND)
            ]
            ratio = median(ratios)
        else:
            ratio = await self._one_after_the_other(candidate, block, _PAIRS_IN_ROUND)
        await self._end_trials()
        self._round_s = time.monotonic() - began_s
        return ratio

    async def _one_after_the_other(self, candidate: Candidate, block: Block, count: int) -> float:
        """A pair in which each of the two is started, measured ``count`` times, and ended."""
        seconds: dict[bool, Measurement] = {}
        order = [True, False] if secrets.randbits(1) else [False, True]
        for is_candidate in order:
            trial = await self._start(self._plan(candidate.changes if is_candidate else NO_CHANGES)[0])
            self._beside = trial
            if is_candidate:
                await self._check_quality(candidate, trial)
            await trial.measure(block, self._limit_s(block))
            measured = [await trial.measure(block, self._limit_s(block)) for _ in range(count)]
            seconds[is_candidate] = sorted(measured, key=lambda one: one.seconds)[count // 2]
            await self._end_trials()
        self._note(seconds[False], seconds[True])
        return log_ratio(self._options.purpose, seconds[False], seconds[True])

    async def _pair(self, default: Trial, trial: Trial, block: Block, *, record: str) -> float:
        """One block on each of the two, in an order drawn at random."""
        limit_s = self._limit_s(block)
        if secrets.randbits(1):
            of_default = await self._of_default(default, block)
            of_trial = await trial.measure(block, limit_s)
        else:
            of_trial = await trial.measure(block, limit_s)
            of_default = await self._of_default(default, block)
        self._note(of_default, of_trial)
        return log_ratio(self._options.purpose, of_default, of_trial)

    def _note(self, default: Measurement, tuned: Measurement) -> None:
        self._default_times.append(default.seconds)
        self._last_tuned = tuned

    async def _of_default(self, default: Trial, block: Block) -> Measurement:
        try:
            return await default.measure(block, self._limit_s(block))
        except TrialFailed as error:
            raise TuningFailed(
                f"the server with the default plan failed: {error}",
                remedy="Nothing was changed. `llamasup run` shows more about the failure.",
            ) from None

    # --- the default

    async def _start_default(self) -> Trial:
        if self._default is None:
            try:
                self._default = await self._start(self._plan(NO_CHANGES)[0])
            except TrialFailed as error:
                raise TuningFailed(
                    f"the server with the default plan did not start: {error}",
                    remedy="Start it with `llamasup run`, which shows more, and tune it when it works.",
                ) from None
        return self._default

    async def _calibrated(self, default: Trial, mix: Sequence[Lengths], clients: int) -> Block:
        """The block of all measurements, from the time of the whole mix, which warms up the server."""
        ctx_size = default.plan.ctx_size_of_slot
        share_s = self._options.minutes * 60 * _BLOCK_SHARE
        target_s = min(max(share_s, _SHORTEST_BLOCK_S), _LONGEST_BLOCK_S)
        scale = _FIRST_SCALE
        while True:
            block = block_for(mix, scale, ctx_size=ctx_size, clients=clients)
            seconds = (await self._of_default(default, block)).seconds
            if seconds >= target_s / _GROWTH or scale >= _LARGEST_SCALE:
                break
            scale *= _GROWTH
        return block_for(mix, scale * target_s / seconds, ctx_size=ctx_size, clients=clients)

    async def _measure_default(self, block: Block) -> Measurement:
        assert self._default is not None
        measured = await self._of_default(self._default, block)
        self._say(
            f"default: {measured.first_token_s * 1e3:.1f} ms to the first token, "
            f"{measured.tokens_per_s:.1f} tokens/s with {block.clients} at a time, "
            f"{measured.memory_bytes / 2**20:.0f} MiB"
        )
        return measured

    # --- servers

    def _plan(self, changes: Changes) -> tuple[LaunchPlan, bool]:
        """The plan with these changes, and whether it fits into the free memory without being reduced.

        Raises TrialFailed if it is not possible; for the default, what planning raises.
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
        return admission.plan, admission.plan.memory.fits and len(admission.considered) == 1

    async def _start(self, plan: LaunchPlan) -> Trial:
        limit_s = max(_LEAST_WAIT_S, 10 * self._start_s) if self._start_s else _FIRST_START_S
        trial = await start_trial(plan, self._folder, limit_s)
        self._start_s = max(self._start_s, trial.start_s)
        return trial

    async def _end_trials(self, *, default: bool = True) -> None:
        beside, self._beside = self._beside, None
        if beside is not None:
            await beside.end()
        if default and self._default is not None:
            ending, self._default = self._default, None
            await ending.end()

    def _setup(self, plan: LaunchPlan) -> Setup:
        launch = self._launch
        return Setup(
            self._options.purpose,
            launch.runtime.capabilities,
            plan,
            launch.model,
            hardware(),
            launch.settings,
            read_extra(launch.runtime.capabilities, launch.settings.extra),
            launch.environ,
        )

    # --- the quality guard

    async def _prepare_quality(self, candidate: Candidate) -> None:
        """Ask the reference: the default, with an f16 KV cache. Called while no candidate runs."""
        if not self._must_check(candidate) or self._reference is not None:
            return
        default = await self._start_default()
        if default.plan.kv_type != "f16":
            await self._end_trials()
            f16 = Changes((("--cache-type-k", "f16"), ("--cache-type-v", "f16")))
            self._beside = default = await self._start(self._plan(f16)[0])
        self._reference = await default.distributions(_lengths(default.plan), _FIRST_START_S)
        await self._end_trials(default=False)

    async def _check_quality(self, candidate: Candidate, trial: Trial) -> None:
        """Raises TrialFailed for a candidate whose answers differ too much."""
        if not self._must_check(candidate):
            return
        assert self._reference is not None
        seen = divergence(self._reference, await trial.distributions(_lengths(trial.plan), _FIRST_START_S))
        if seen is None:
            raise _TooLossy("this build does not list probabilities, so its answers cannot be compared")
        if seen > BOUND:
            raise _TooLossy(
                f"its answers differ: {seen:.3f} nats a token, and {BOUND:g} are allowed (--allow-lossy)"
            )
        self._checked.add(candidate.name)

    def _must_check(self, candidate: Candidate) -> bool:
        return candidate.lossy and not self._options.allow_lossy and candidate.name not in self._checked

    # --- time

    @property
    def _left_s(self) -> float:
        return self._options.minutes * 60 - (time.monotonic() - self._began_s)

    @property
    def _minutes(self) -> float:
        return self._earlier_minutes + (time.monotonic() - self._began_s) / 60

    def _limit_s(self, block: Block) -> float:
        """A candidate that takes longer for a block counts as hanging."""
        slowest_s = max(self._default_times, default=0.0)
        return max(_LEAST_WAIT_S, 20 * slowest_s) if slowest_s else _FIRST_START_S

    def _reserve_s(self, block: Block, measured: Measurement) -> float:
        return _RESERVED_ROUNDS * self._round_estimate_s(measured)

    def _round_estimate_s(self, measured: Measurement) -> float:
        blocks = 2 * (_PAIRS_IN_ROUND + 1)
        return self._round_s or 2 * self._start_s + blocks * measured.seconds

    def _step_s(self, step: Screen | ProofRound, measured: Measurement) -> float:
        if isinstance(step, ProofRound):
            return self._round_estimate_s(measured)
        return self._start_s + 2 * step.pairs * measured.seconds

    def _drift(self) -> float | None:
        times = self._default_times
        part = len(times) // 3
        if part < 2:
            return None
        drift = median(times[-part:]) / median(times[:part])
        return drift if max(drift, 1 / drift) > _DRIFT else None

    # --- what is kept

    def _fits(self, saved: SavedSearch) -> bool:
        options = self._options
        return (saved.runtime, saved.machine, saved.asked, saved.purpose, saved.allow_lossy, saved.mix) == (
            *(self._runtime, self._machine, self._asked, options.purpose, options.allow_lossy),
            options.mix or STATED_MIX,
        )

    def _store(self, block: Block, search: Search, measured: Measurement, mix: tuple[Lengths, ...]) -> None:
        options = self._options
        self._save(
            SavedSearch(
                *(self._runtime, self._machine, self._asked, options.purpose, options.allow_lossy),
                *(mix, block, search, self._minutes, measured),
            )
        )

    def _kept(self, search: Search) -> Kept:
        proof = result(search)
        settings, options = self._launch.settings, self._options
        kept = Kept(
            *(self._runtime, self._machine, self._asked, options.purpose, settings.profile, NO_CHANGES),
            *(1.0, 1.0, 1.0, datetime.now(UTC).date().isoformat(), trials(search), round(self._minutes, 1)),
        )
        if proof is None:
            return kept
        seen = proven(proof)
        return replace(
            kept,
            changes=proof.candidate.changes,
            gain=seen.gain,
            lower=seen.lower,
            upper=seen.upper,
            lossy=proof.candidate.lossy,
        )

    def _refuse_changed_files(self) -> None:
        """Raises TuningFailed if the build or the model is no longer the one that is measured."""
        try:
            same_model = FileIdentity.of(self._launch.model_path) == self._identity
            now = find_runtime(self._options.runtime, self._launch.environ)
        except (OSError, LlamasupError):
            same_model, now = False, None
        if now is None or runtime_id(now.command, now.capabilities) != self._runtime or not same_model:
            what = "the model file" if not same_model and now is not None else "llama-server"
            raise TuningFailed(
                f"{what} was changed or replaced while it was being measured.",
                remedy="Nothing was changed. Tune again.",
            )

    def _say_observed(self, step: Screen | ProofRound, search: Search, ratios: Sequence[float]) -> None:
        left = f"{max(0.0, self._left_s) / 60:.1f} min left"
        if isinstance(step, Screen):
            middle, low, high = (math.exp(of(ratios)) for of in (median, min, max))
            shown = f"{middle:.2f} × ({low:.2f} to {high:.2f})"
            self._say(f"{step.candidate.name}: {shown} in {len(ratios)} pairs; {left}")
        else:
            of_proof = next(one for one in search.proofs if one.candidate == step.candidate)
            seen = proven(of_proof)
            lower = f"at least {seen.lower:.2f} ×" if seen.lower > 0 else "no bound yet"
            name = step.candidate.name
            self._say(f"proof of {name}, round {step.number}: {seen.gain:.2f} ×, {lower}; {left}")


class _TooLossy(TrialFailed):
    """The candidate works, but alters answers too much."""


def _state_of(error: TrialFailed) -> EntryState:
    return "lossy" if isinstance(error, _TooLossy) else "failed"


def _lengths(plan: LaunchPlan) -> list[int]:
    return [min(length, plan.ctx_size_of_slot - 16) for length in LENGTHS]


def _suspended_s() -> float:
    """How long this machine has been suspended since its start."""
    if sys.platform != "linux":
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
