"""Decides whether a new build may serve, from its plans and from its observed answers (pure).

During the proof, the same requests go to the server of the new build and to the server of the running build.
``next_step`` says after each request what to do next, or gives the verdict with its reason. Afterwards,
``after_crashes`` says whether the new build may stay. ``flag_changes`` compares the plan of a model with each
build, and ``choose`` chooses the model for the proof.

- **Crashes.** One request that the new server does not answer is enough.
- **Text.** At temperature 0, two builds may differ in a near-tie of two tokens, and in all tokens after it.
  So what counts is the common beginning of the texts, as a share, in the mean of all pairs.
- **Speed.** Pairs of the same request count if the running server had no other request in that time: a busy
  one would make every build look fast. The bounds of the median ratio are those of
  ``planning/measured/paired.py``.
- **Memory.** The prompts repeat after the first requests. From then on, a server needs no more memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.planning.measured.paired import MIN_PAIRS, Interval, bounds
from llamasup.core.system.text import memory_text, printable
from llamasup.errors import BuildRefused, BuildUnproven, LlamasupError

REQUESTS = 100
"""That the new build must answer."""
MOST_REQUESTS = 300
"""If its speed is not decided by then, the median must be enough."""
PROMPTS = 8
_WARM = 3 * PROMPTS  # requests after which the memory must stay
_LEAST_PAIRS = 24
_MOST_BUSY = 30  # pairs without one that counts for the speed

# Choices of llamasup. The text of one build agrees with itself for 98 % with other threads, for 92 % with a
# K cache of q8_0, and for 42 % with q4_0 (b11434, CPU, a random model, whose tokens are close together).
# A 20 % slower build is well below the first one, and noise of one machine above it.
LEAST_SPEED = 0.9
LEAST_AGREEMENT = 0.8
MOST_GROWTH_BYTES = 32 << 20
_MOST_MEMORY, _SPARE_BYTES = 1.25, 128 << 20  # the running server has seen longer prompts, so it needs more

WATCH_S = 3600.0
"""How long crashes of the new build are counted, and those of the old one before."""
_FEWEST_CRASHES = 2  # one may be chance
_SHOWN = 500  # letters of an answer or of a line in messages


class Pair(Struct, frozen=True):
    """A request to both builds. ``alone``: the running server had no other request meanwhile."""

    old_text: str
    new_text: str
    old_s: float
    new_s: float
    alone: bool = True


class Trial(Struct, frozen=True):
    """The proof so far. ``memory_bytes``: of the new server after each request; None: not measured.
    ``broken``: how it failed a request, with its ``answer`` and the ``lines`` of its log. ``interrupted``:
    why no more can be learned.
    """

    pairs: tuple[Pair, ...] = ()
    memory_bytes: tuple[int | None, ...] = ()
    old_memory_bytes: int | None = None
    broken: str = ""
    answer: str = ""
    lines: tuple[str, ...] = ()
    interrupted: str = ""

    @property
    def answered(self) -> int:
        return len(self.memory_bytes)


class Refused(Struct, frozen=True):
    """A refusal. ``why`` is a clause about the build. ``judged`` is false if another try may have another
    result.

    ``answer``: the failed or different answer of the new build; ``expected``: that of the running one.
    ``lines``: of the log of the failed server.
    """

    why: str
    judged: bool = True
    answer: str = ""
    expected: str = ""
    lines: tuple[str, ...] = ()


class Accepted(Struct, frozen=True):
    why: str


Step = Literal["compare", "ask"] | Refused | Accepted


def next_step(trial: Trial) -> Step:
    """Send the next request to both builds, or to the new one, or end."""
    if trial.broken:
        why = f"its server {trial.broken} at request {trial.answered + 1} of {REQUESTS}"
        return Refused(why, answer=trial.answer, lines=trial.lines)
    if trial.interrupted:
        return Refused(trial.interrupted, judged=False)
    speed = speed_of(trial.pairs)
    if len(trial.pairs) >= _MOST_BUSY and not speed.pairs:
        return _too_busy()
    if (refused := _text(trial) or _slower(speed) or _grown(trial)) is not None:
        return refused
    is_fast = speed.lower >= LEAST_SPEED
    if trial.answered >= REQUESTS and (is_fast or trial.answered >= MOST_REQUESTS):
        return _large(trial) or _in_the_end(trial, speed)
    return "ask" if is_fast and len(trial.pairs) >= _LEAST_PAIRS else "compare"


def speed_of(pairs: Sequence[Pair]) -> Interval:
    """Return the speed of the new build as a ratio to the speed of the running build."""
    ratios = [math.log(max(pair.old_s, 1e-9) / max(pair.new_s, 1e-9)) for pair in pairs if pair.alone]
    return bounds(ratios)


def agreement(pairs: Sequence[Pair]) -> float:
    """Return the mean share of a text up to the first difference."""
    return fmean(_common_share(pair.old_text, pair.new_text) for pair in pairs)


def _common_share(one: str, other: str) -> float:
    longer = max(len(one), len(other))
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if same is None:  # one is the beginning of the other
        same = min(len(one), len(other))
    return same / longer if longer else 1.0


def _text(trial: Trial) -> Refused | None:
    """Compare the texts of complete rounds, so that it does not depend on which prompt has the other text."""
    pairs = trial.pairs[: len(trial.pairs) // PROMPTS * PROMPTS]
    if not pairs or (share := agreement(pairs)) >= LEAST_AGREEMENT:
        return None
    worst = min(pairs, key=lambda pair: _common_share(pair.old_text, pair.new_text))
    return Refused(
        f"at temperature 0 its text is that of the running build for {share:.0%} only; "
        f"{LEAST_AGREEMENT:.0%} are needed",
        answer=worst.new_text,
        expected=worst.old_text,
    )


def _slower(speed: Interval) -> Refused | None:
    return _too_slow(speed) if speed.upper < LEAST_SPEED else None


def _too_slow(speed: Interval) -> Refused:
    return Refused(f"it has {speed.gain:.0%} of the speed of the running build; {LEAST_SPEED:.0%} are needed")


def _grown(trial: Trial) -> Refused | None:
    if trial.answered <= _WARM:
        return None
    now, before = trial.memory_bytes[-1], trial.memory_bytes[_WARM - 1]
    if now is None or before is None or (grown := now - before) <= MOST_GROWTH_BYTES:
        return None
    return Refused(
        f"its memory has grown by {memory_text(grown)} in {trial.answered - _WARM} requests that repeat; "
        f"{memory_text(MOST_GROWTH_BYTES)} are allowed"
    )


def _large(trial: Trial) -> Refused | None:
    now, before = trial.memory_bytes[-1], trial.old_memory_bytes
    if now is None or before is None or None in trial.memory_bytes:
        return Refused("the memory of the servers could not be measured", judged=False)
    if now <= _MOST_MEMORY * before + _SPARE_BYTES:
        return None
    return Refused(
        f"its server needs {memory_text(now)}, and that of the running build {memory_text(before)}"
    )


def _too_busy() -> Refused:
    return Refused(
        "its speed could not be compared: the running server was never without other requests", judged=False
    )


def _in_the_end(trial: Trial, speed: Interval) -> Step:
    if speed.pairs < MIN_PAIRS:
        return _too_busy()
    if speed.gain < LEAST_SPEED:  # the bounds contain it, so another try may have another result
        return replace(_too_slow(speed), judged=False)
    return Accepted(
        f"it has answered {trial.answered} requests with {speed.gain:.0%} of the speed of the old build "
        f"and {agreement(trial.pairs):.0%} of its text"
    )


def after_crashes(old: int, new: int) -> str:
    """Return why llamasup returns to the old build; empty if the new one stays. ``old``: crashes in the last
    hour of the old build. ``new``: those of the new one since it serves.
    """
    if new < _FEWEST_CRASHES or new <= 2 * old:
        return ""
    return (
        f"its servers have crashed {new} times since it serves, and those of the old build {old} times before"
    )


# --- what users see -----------------------------------------------------------------------------------


def refusal(build: str, verdict: Refused) -> BuildRefused:
    """Return the error for this verdict. Its details show the answer. All text is short and printable."""
    shown = (("Its answer: ", verdict.answer), ("The answer of the running build: ", verdict.expected))
    details = tuple(f"{what}{_short(text)}" for what, text in shown if text)
    lines = tuple(map(_short, verdict.lines))
    if verdict.judged:
        why, remedy = (
            f"The build {build} is refused: {verdict.why}.",
            "Use another build; the old one serves.",
        )
        return BuildRefused(why, remedy=remedy, details=details, lines=lines)
    why = f"The build {build} is not proven: {verdict.why}."
    return BuildUnproven(why, remedy="Try again later.", details=details, lines=lines)


def shown_failure(verdict: Refused | None) -> Mapping[str, Any]:
    """Return the fields of the report for a failed answer (docs/upgrade.md)."""
    refused = verdict or Refused("")
    answer, expected = (_short(text) or None for text in (refused.answer, refused.expected))
    return {"answer": answer, "expected": expected, "lines": list(map(_short, refused.lines))}


def _short(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


# --- the plans ------------------------------------------------------------------------------------


class FlagChange(Struct, frozen=True):
    """A changed flag. ``before`` and ``after`` are its values: "" for a switch, None if it is not passed."""

    flag: str
    before: str | None
    after: str | None


class PlanChange(Struct, frozen=True):
    """The changes of one model. ``needs``: bytes by device with each build. ``problem``: why it has no plan
    with the new build, although it has one with the old one.
    """

    id: str
    generates: bool = False
    flags: tuple[FlagChange, ...] = ()
    needs_before: Mapping[str, int] = {}
    needs_after: Mapping[str, int] = {}
    problem: LlamasupError | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the object of docs/upgrade.md."""
        problem = self.problem
        return {
            "id": self.id,
            "flags": [{"flag": each.flag, "before": each.before, "after": each.after} for each in self.flags],
            "needs_before": dict(self.needs_before),
            "needs_after": dict(self.needs_after),
            "problem": None if problem is None else {"message": problem.message, "remedy": problem.remedy},
        }


def flag_changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[FlagChange, ...]:
    """Return the changed flags in the order of the command lines."""
    return tuple(
        FlagChange(flag, before.get(flag), after.get(flag))
        for flag in dict.fromkeys((*before, *after))
        if before.get(flag) != after.get(flag)
    )


class Candidate(Struct, frozen=True):
    """A model that a build can be proven with. ``free``: the free bytes of each device."""

    change: PlanChange
    serves: bool
    in_flight: int
    free: Mapping[str, int]
    has_workers: bool = False

    @property
    def fits(self) -> bool:
        needs = self.change.needs_after
        return all(self.free.get(device, 0) >= size for device, size in needs.items())


def choose(candidates: Iterable[Candidate]) -> str | None:
    """Choose a loaded model if possible, with few requests, and small: the proof takes its memory twice.

    None if no model that generates text fits twice. RPC workers serve one llama-server only.
    """
    able = [each for each in candidates if each.change.generates and each.fits and not each.has_workers]
    best = min(
        able,
        key=lambda each: (not each.serves, each.in_flight, sum(each.change.needs_after.values())),
        default=None,
    )
    return None if best is None else best.change.id
