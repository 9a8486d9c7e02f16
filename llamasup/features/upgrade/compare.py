"""Compares the plans of all models with two builds. Reads model files and starts the builds, so it blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.planner import Planner
from llamasup.core.pool.estimate import SizedModel, estimate_model, share_of, with_devices
from llamasup.errors import LlamasupError
from llamasup.features.upgrade.verdict import PlanChange, flag_changes

_MEASURES = "--verbosity"  # the first start of each build measures its memory
_NOWHERE = Path("/nonexistent")


def compare(
    specs: Iterable[ModelSpec], budget: Mapping[str, int], environ: Mapping[str, str], old: str, new: str
) -> tuple[PlanChange, ...]:
    """Compare the plans of the models that have a file here, and a plan with the old build."""
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
    return {
        reason.flag: reason.value or "" for reason in reasons if reason.passed and reason.flag != _MEASURES
    }
