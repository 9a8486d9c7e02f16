"""Runs one ``llamasup tune``: carries out the steps of the search until it is done or out of time.

Owns the time and the saved state. :mod:`llamasup.features.tuning.search` decides what is measured, and
:mod:`llamasup.features.tuning.comparison` measures it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import astuple, replace

from llamasup.core.llama_server.argv_builder import read_extra
from llamasup.core.llama_server.inspect import find_runtime
from llamasup.core.planning.facts import Launch, attachments
from llamasup.core.planning.measured.load_history import runtime_id
from llamasup.core.planning.measured.paired import MIN_PAIRS
from llamasup.core.planning.measured.tuned import NO_CHANGES, Conditions, Kept, files_key
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.planning.planner import Planner
from llamasup.core.system.hardware.probe import hardware
from llamasup.core.system.native import native
from llamasup.core.system.storage.fact_cache import FileIdentity
from llamasup.errors import LlamasupError, TuningFailed
from llamasup.features.tuning.candidates import Purpose, Setup, candidates
from llamasup.features.tuning.comparison import PAIRS_IN_ROUND, Comparison, TimeOver, TooLossy
from llamasup.features.tuning.neighbours import POLL_S, Neighbours
from llamasup.features.tuning.report import SessionResult
from llamasup.features.tuning.search import (
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
    reopened,
    result,
    trials,
    worth_proving,
)
from llamasup.features.tuning.trial import TrialFailed
from llamasup.features.tuning.workload import STATED_MIX, Block, Lengths, Measurement, middle_of

# Of the time of the tuning: the block of a measurement. About 100 pairs and 20 rounds fit in the rest.
_BLOCK_SHARE = 1 / 300
_SHORTEST_BLOCK_S, _LONGEST_BLOCK_S = 0.05, 10.0
# A proof needs some rounds more than the fewest.
_RESERVED_ROUNDS = MIN_PAIRS + 3
_SUSPENDED_S = 0.5
_MOST_DISCARDED = 20
_DRIFT = 1.10

# How long other llama-servers have to be idle before the measurements continue.
_IDLE_S = 1.0

T = TypeVar("T")
Progress = Callable[[str], None]


def new_search(setup: Setup) -> Search:
    """Begin a search among all candidates of this build, machine and model."""
    return begin(candidates(setup))


class Options(Struct, frozen=True):
    """The options of a tuning. ``runtime``: as ``--runtime``. ``mix``: the lengths of requests; empty: the
    stated mix.
    """

    purpose: Purpose
    minutes: float
    runtime: str | None = None
    allow_lossy: bool = False
    mix: tuple[Lengths, ...] = ()


class SavedSearch(Struct, frozen=True):
    """An unfinished search, with all that a later call needs to continue it."""

    conditions: Conditions
    purpose: Purpose
    allow_lossy: bool
    mix: tuple[Lengths, ...]
    block: Block
    search: Search
    minutes: float
    default: Measurement


class Session:
    """One tuning. ``model`` is the file as it was before the first measurement, and ``folder`` the run
    folder. ``save`` stores the search after each step. ``search_of`` makes a new search. ``clock``, in
    seconds, decides when the time has run out.
    """

    def __init__(
        self,
        launch: Launch,
        options: Options,
        model: FileIdentity,
        folder: Path,
        *,
        saved: SavedSearch | None,
        save: Callable[[SavedSearch], None],
        say: Progress,
        search_of: Callable[[Setup], Search] = new_search,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launch = launch
        self._options = options
        self._mix = options.mix or STATED_MIX
        self._save = save
        self._say = say
        self._search_of = search_of
        self._clock = clock
        self._began_s = clock()
        self._compare = Comparison(
            launch, folder, options.purpose, lambda: self._left_s, allow_lossy=options.allow_lossy
        )
        self._neighbours = Neighbours(folder)
        self._gave_way = False
        self._rounds_s: list[float] = []
        self._stopped = ""  # why it ended early, if the time was not over
        self._identity = model
        self._conditions = Planner(launch, folder, trial=NO_CHANGES).conditions()
        self._saved = saved if saved is not None and self._fits(saved) else None
        self._earlier_minutes = 0.0 if self._saved is None else self._saved.minutes

    @property
    def resumed(self) -> bool:
        """Whether it continues an unfinished search."""
        return self._saved is not None

    def stop_now(self) -> None:
        """Kill all servers, including servers that are exiting. The cancelled ``run`` then ends at once."""
        self._compare.stop_now()

    async def run(self) -> SessionResult:
        """Raises TuningFailed, or what planning and starting the default raise."""
        try:
            return await self._run()
        finally:
            await self._compare.close()

    # --- the steps

    async def _run(self) -> SessionResult:
        if self._saved is not None:
            block, search, measured = self._saved.block, reopened(self._saved.search), self._saved.default
        else:
            try:
                first = await self._undisturbed(self._first_measurement)
            except TimeOver:
                raise TuningFailed(
                    f"{self._options.minutes:g} min are too short for one comparison: the server with the "
                    "default plan did not answer in this time.",
                    remedy="Give more time with --minutes. Nothing was changed.",
                ) from None
            if first is None:
                raise TuningFailed(
                    f"Other llama-servers worked for the whole {self._options.minutes:g} min.",
                    remedy="Tune when they are idle, or give more time with --minutes. Nothing was changed.",
                )
            block, search, measured = first
        self._compare.default_times.append(measured.seconds)
        self._say(
            f"default: {measured.first_token_s * 1e3:.1f} ms to the first token, "
            f"{measured.tokens_per_s:.1f} tokens/s with {block.clients} at a time, "
            f"{measured.memory_bytes / 2**20:.0f} MiB"
        )
        search = await self._searched(search, block, measured)
        finished = isinstance(next_step(search), Done)
        if trials(search) == 0 and not finished and self._stopped:
            raise TuningFailed(f"{self._stopped}.", remedy="Nothing was changed. Tune again.")
        if trials(search) == 0 and not finished:
            raise TuningFailed(
                f"{self._options.minutes:g} min are too short for one comparison: a start takes "
                f"{self._compare.start_s:.1f} s, and one measurement {self._compare.block_s:.1f} s.",
                remedy="Give more time with --minutes. Nothing was changed.",
            )
        if finished:
            self._refuse_changed_files()
        pairs = self._compare.measured
        return SessionResult(
            search,
            finished,
            self._kept(search) if finished else None,
            middle_of([one for one, _ in pairs]) or measured,
            middle_of([other for _, other in pairs]),
            self._minutes,
            self._drift(),
            self._stopped,
        )

    async def _first_measurement(self) -> tuple[Block, Search, Measurement]:
        default = await self._compare.start_default()
        share_s = self._options.minutes * 60 * _BLOCK_SHARE
        target_s = min(max(share_s, _SHORTEST_BLOCK_S), _LONGEST_BLOCK_S)
        block = await self._compare.calibrated(self._mix, target_s)
        measured = await self._compare.measure_default(block)
        return block, self._search_of(self._setup(default.plan)), measured

    async def _searched(self, search: Search, block: Block, measured: Measurement) -> Search:
        """The search after as many steps as the time allows. Each step is saved."""
        discarded = 0
        while True:
            step = next_step(search)
            if isinstance(step, Screen) and worth_proving(search) and self._must_prove_now(step):
                search = hurry(search)
                step = next_step(search)
            if isinstance(step, Done) or self._left_s < self._step_s(step):
                break
            self._refuse_changed_files()
            before_s = _suspended_s()
            ratios: list[float] | None = []
            failure: TrialFailed | None = None
            try:
                ratios = await self._undisturbed(partial(self._carry_out, step, block))
            except TrialFailed as error:
                failure = error
            except TimeOver:
                break
            if ratios is None:
                break
            if _suspended_s() - before_s > _SUSPENDED_S:
                self._say("the machine was suspended: this measurement is thrown away")
                discarded += 1
                if discarded < _MOST_DISCARDED:
                    continue
                self._stopped = f"The machine was suspended during {discarded} measurements"
                break
            if failure is not None:
                state: EntryState = "lossy" if isinstance(failure, TooLossy) else "failed"
                search = failed(search, step.candidate, str(failure), state)
                self._say(f"{step.candidate.name}: {failure}")
            else:
                search = observed(search, step.candidate, ratios)
                self._say_observed(step, search, ratios)
            self._store(block, search, measured)
        return search

    async def _carry_out(self, step: Screen | ProofRound, block: Block) -> list[float]:
        """The log-ratios of this step. Raises TrialFailed if the candidate fails."""
        match step:
            case Screen(candidate, pairs):
                return await self._compare.screen(candidate, pairs, block)
            case ProofRound(candidate):
                began_s = time.monotonic()
                ratio = await self._compare.round(candidate, block)
                self._rounds_s.append(time.monotonic() - began_s)
                return [ratio]

    # --- yielding to other llama-servers

    async def _undisturbed(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """The result of ``work``, which begins again whenever another llama-server needs the machine.

        None if the time runs out before the machine is idle.
        """
        while await self._until_idle():
            async with asyncio.TaskGroup() as group:
                working = group.create_task(_settled(work))
                watching = group.create_task(self._until_busy())
                await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
                if not working.done():
                    self._compare.stop_now()
                    working.cancel()
                watching.cancel()
            if not working.cancelled():
                value, error = working.result()
                if error is not None:
                    raise error
                return value
            self._gave_way = True
            await self._compare.close()
            self._say("another llama-server works: giving way, and measuring this again later")
        return None

    async def _until_idle(self) -> bool:
        """Whether the other llama-servers become idle before the time runs out."""
        if not self._neighbours.are_busy() and not self._gave_way:
            return True
        busy_s = time.monotonic()
        while time.monotonic() - busy_s < _IDLE_S:
            if self._left_s <= 0:
                return False
            await asyncio.sleep(POLL_S)
            if self._neighbours.are_busy():
                busy_s = time.monotonic()
        self._gave_way = False
        return True

    async def _until_busy(self) -> None:
        while not self._neighbours.are_busy():  # noqa: ASYNC110 - /proc has no events
            await asyncio.sleep(POLL_S)

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

    # --- time

    @property
    def _left_s(self) -> float:
        return self._options.minutes * 60 - (self._clock() - self._began_s)

    @property
    def _minutes(self) -> float:
        return self._earlier_minutes + (self._clock() - self._began_s) / 60

    def _round_estimate_s(self) -> float:
        blocks = 2 * (PAIRS_IN_ROUND + 1)
        if self._rounds_s:
            return median(self._rounds_s)
        return 2 * self._compare.start_s + blocks * self._compare.block_s

    def _must_prove_now(self, step: Screen) -> bool:
        """Whether the rest of the time is needed for the proof. If it is too short even for that, the
        screening continues, and a later call makes the proof.
        """
        round_s = self._round_estimate_s()
        reserve_s = _RESERVED_ROUNDS * round_s + self._step_s(step)
        return MIN_PAIRS * round_s <= self._left_s < reserve_s

    def _step_s(self, step: Screen | ProofRound) -> float:
        if isinstance(step, ProofRound):
            return self._round_estimate_s()
        return self._compare.screening_s(step.pairs)

    def _drift(self) -> float | None:
        times = self._compare.default_times
        part = len(times) // 3
        if part < 2:
            return None
        drift = median(times[-part:]) / median(times[:part])
        return drift if max(drift, 1 / drift) > _DRIFT else None

    # --- what is kept

    def _fits(self, saved: SavedSearch) -> bool:
        return saved == replace(
            saved,
            conditions=self._conditions,
            purpose=self._options.purpose,
            allow_lossy=self._options.allow_lossy,
            mix=self._mix,
        )

    def _store(self, block: Block, search: Search, measured: Measurement) -> None:
        options = self._options
        self._save(
            SavedSearch(
                self._conditions,
                options.purpose,
                options.allow_lossy,
                self._mix,
                block,
                search,
                self._minutes,
                measured,
            )
        )

    def _kept(self, search: Search) -> Kept:
        proof = result(search)
        settings, options = self._launch.settings, self._options
        today, minutes = datetime.now(UTC).date().isoformat(), round(self._minutes, 1)
        kept = Kept(
            self._conditions,
            options.purpose,
            settings.profile,
            NO_CHANGES,
            *(1.0, 1.0, 1.0, today, trials(search), minutes),
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
            unchecked=proof.candidate.lossy and options.allow_lossy,
        )

    def _refuse_changed_files(self) -> None:
        """Raises TuningFailed if the build or a file is no longer the one that is measured."""
        if files_key(map(astuple, attachments(self._launch))) != self._conditions.files:
            raise TuningFailed(
                "a draft, projector or adapter file was changed or deleted while it was being measured.",
                remedy="Nothing was changed. Tune again.",
            )
        try:
            is_same_model = FileIdentity.of(self._launch.model_path) == self._identity
        except OSError:
            is_same_model = False
        try:
            now = find_runtime(self._options.runtime, self._launch.environ)
            is_same_build = runtime_id(now.command, now.capabilities) == self._conditions.runtime
        except LlamasupError:
            is_same_build = False
        if not is_same_model or not is_same_build:
            what = "llama-server" if is_same_model else "the model file"
            raise TuningFailed(
                f"{what} was changed, replaced or deleted while it was being measured.",
                remedy="Nothing was changed. Tune again.",
            )

    def _say_observed(self, step: Screen | ProofRound, search: Search, ratios: Sequence[float]) -> None:
        left = f"{max(0.0, self._left_s) / 60:.1f} min left"
        if isinstance(step, Screen):
            middle, low, high = (math.exp(of(ratios)) for of in (median, min, max))
            shown = f"{middle:.2f} × ({low:.2f} to {high:.2f})"
            pairs = "1 pair" if len(ratios) == 1 else f"{len(ratios)} pairs"
            self._say(f"{step.candidate.name}: {shown} in {pairs}; {left}")
        else:
            of_proof = next(one for one in search.proofs if one.candidate == step.candidate)
            seen = proven(of_proof)
            lower = f"at least {seen.lower:.2f} ×" if seen.lower > 0 else "no bound yet"
            name = step.candidate.name
            self._say(f"proof of {name}, round {step.number}: {seen.gain:.2f} ×, {lower}; {left}")


async def _settled(work: Callable[[], Awaitable[T]]) -> tuple[T | None, Exception | None]:
    """The result, or the exception: in a group of tasks it would cancel the others."""
    try:
        return await work(), None
    except Exception as error:
        return None, error


def _suspended_s() -> float:
    """Return how long this machine has been suspended since its start."""
    return native.awake_and_asleep_s() - time.monotonic()
