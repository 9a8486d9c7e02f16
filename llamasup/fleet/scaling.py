"""How many replicas a model should have (pure): Serve calls it with the load that the replicas report.

Serve itself applies the bounds and the delays of the autoscaling config, and starts the first replica for a
request that waits at a handle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = ["LOAD", "ScaleByLoad", "replicas_for"]

LOAD: Final = "load"
"""The name of the reported metric: ``NodeLoad.demand``."""


def replicas_for(loads: Iterable[float], target: float) -> int:
    """``target``: the share of its slots that a replica should have busy. 0 only without any request, so that
    the last replica does not go while it writes a long answer.
    """
    total = sum(loads)
    # A sum of floats must not ask for one replica more than the exact value.
    return math.ceil(round(total / target, 6)) if total > 0 else 0


class ScaleByLoad:
    """Serve's autoscaling policy for a deployment (its ``policy_kwargs`` are those of the constructor)."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """``context``: Serve's ``AutoscalingContext`` (2.60). The second value, a state, is always empty.

        While the first replica starts, nothing reports a load. It may load for longer than its clients wait,
        and must not be stopped for that: else no start would ever end.
        """
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        loads = metrics.get(LOAD, {})
        if not loads and context.current_num_replicas < context.target_num_replicas:
            return context.target_num_replicas, {}
        return replicas_for(loads.values(), self._target), {}
