"""The plans of all models with two builds, and which model a new build is proven with.

Reads model files and asks the builds (``estimate_model``), so it blocks; the rest is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from llamasup.errors import LlamasupError
from llamasup.gguf.facts import ModelClass
from llamasup.models.spec import ModelSpec
from llamasup.planning.attempts import Planner
from llamasup.pool.estimate import SizedModel, estimate_model, share_of
from llamasup.pool.starter import with_devices

__all__ = ["Candidate", "FlagChange", "PlanChange", "choose", "compare", "flag_changes"]

_NOWHERE = Path("/nonexistent")


class FlagChange(Struct, frozen=True):
    """``before`` and ``after``: its value; "" for a switch, None if it is not passed."""

    flag: str
    before: str | None
    after: str | None


class PlanChange(Struct, frozen=True):
    """One model. ``needs``: bytes by device with each build. ``problem``: why it has no plan with the new
    build, although it has one with the old one.
    """

    id: str
    generates: bool = False
    flags: tuple[FlagChange, ...] = ()
    needs_before: Mapping[str, int] = {}
    needs_after: Mapping[str, int] = {}
    problem: LlamasupError | None = None

    def as_json(self) -> dict[str, Any]:
        """docs/upgrade.md"""
        problem = self.problem
        return {
            "id": self.id,
            "flags": [{"flag": each.flag, "before": each.before, "after": each.after} for each in self.flags],
            "needs_before": dict(self.needs_before),
            "needs_after": dict(self.needs_after),
            "problem": None if problem is None else {"message": problem.message, "remedy": problem.remedy},
        }


def compare(
    specs: Iterable[ModelSpec], budget: Mapping[str, int], environ: Mapping[str, str], old: str, new: str
) -> tuple[PlanChange, ...]:
    """Of the models that have a file here, and a plan with the old build."""
    found = []
    for spec in specs:
        if not spec.source or spec.is_remote or spec.problem:
            continue
        try:
            before = estimate_model(spec, budget, old, environ)
        except LlamasupError:
            continue  # it cannot be loaded now, either
        generates = before.facts is not None and before.facts.model_class is ModelClass.DECODER
        try:
            after = estimate_model(spec, budget, new, environ)
            flags = flag_changes(_flags(before, budget), _flags(after, budget))
        except LlamasupError as error:
            found.append(PlanChange(spec.id, generates, needs_before=before.needs, problem=error))
        else:
            found.append(PlanChange(spec.id, generates, flags, before.needs, after.needs))
    return tuple(found)


def _flags(sized: SizedModel, budget: Mapping[str, int]) -> Mapping[str, str]:
    assert sized.launch is not None  # it is of a file
    share = share_of(sized.spec, budget, alone=True)
    planner = Planner(with_devices(sized.launch, sized.spec, 0), _NOWHERE, budget=lambda: share)
    reasons = planner.admission().plan.reasons
    return {reason.flag: reason.value or "" for reason in reasons if reason.passed}


def flag_changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[FlagChange, ...]:
    """In the order of the command lines."""
    return tuple(
        FlagChange(flag, before.get(flag), after.get(flag))
        for flag in dict.fromkeys((*before, *after))
        if before.get(flag) != after.get(flag)
    )


class Candidate(Struct, frozen=True):
    """A model that a build can be proven with. ``free``: bytes by device beside its running processes."""

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
    """A loaded model if possible, with few requests, and small: the proof takes its memory twice.

    None if no model that generates text fits twice. RPC workers serve one llama-server only.
    """
    able = [each for each in candidates if each.change.generates and each.fits and not each.has_workers]
    best = min(
        able,
        key=lambda each: (not each.serves, each.in_flight, sum(each.change.needs_after.values())),
        default=None,
    )
    return None if best is None else best.change.id
