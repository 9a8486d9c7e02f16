"""Decides how the plan of a model changes with a build, and which model a new build is proven with (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from llamasup.errors import LlamasupError


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
