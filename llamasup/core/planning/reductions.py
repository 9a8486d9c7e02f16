"""The settings of a plan that are smaller than llamasup prefers, or than the user asked for (pure)."""

from __future__ import annotations

from llamasup.core.llama_server.plan_limits import Change, Reduction
from llamasup.core.planning.ladder import changes
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.settings.model import Settings


def reductions(preferred: LaunchPlan, made: LaunchPlan, settings: Settings) -> tuple[Reduction, ...]:
    """List the settings that are smaller than in ``preferred``, the plan without limits.

    llamasup never reduces a setting of the user, but llama-server limits the context of a request to that of
    the model.
    """
    reduced = [Reduction(change, made.bounds.why) for change in changes(preferred, made)]
    asked = settings.ctx_size
    if asked is not None and made.ctx_size < asked:
        why = f"the model was trained for {made.ctx_size:,} tokens, and this build gives no request more"
        reduced.append(Reduction(Change("--ctx-size", str(asked), str(made.ctx_size)), why, fixed=True))
    return tuple(reduced)
