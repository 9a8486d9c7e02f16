"""What a plan has smaller than preferred."""

from __future__ import annotations

from llamasup.core.llama_server.plan_limits import Change, PlanLimits, Reduction
from llamasup.core.planning.reductions import reductions
from llamasup.core.settings.model import Settings
from tests.core.planning.plans import ladder, planned


def test_plan_without_limits_has_nothing_smaller() -> None:
    made = planned()
    assert reductions(made, made, Settings()) == ()


def test_limited_plan_names_what_is_smaller_and_why() -> None:
    candidate = ladder()
    preferred, made = candidate(PlanLimits()), candidate(PlanLimits(parallel=1, why="memory is short"))
    change = Change("--parallel", str(preferred.parallel), "1")
    assert reductions(preferred, made, Settings()) == (Reduction(change, "memory is short"),)


def test_context_above_that_of_the_model_is_named() -> None:
    settings = Settings(ctx_size=1 << 20, parallel=1)
    made = planned(settings=settings)
    (found,) = reductions(made, made, settings)
    assert found.change == Change("--ctx-size", str(1 << 20), str(made.ctx_size))
    assert found.fixed
    assert f"trained for {made.ctx_size:,} tokens" in found.why
