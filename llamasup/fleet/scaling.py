"""How many replicas a model should have (pure): Serve calls it with the load that the replicas report.

Serve itself applies the bounds and the delays of the autoscaling config, and starts the first replica for a
request that waits at a handle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = ["LOAD", "TARGET", "desired_replicas", "replicas_for"]

LOAD: Final = "load"
"""The name of the reported metric: ``NodeLoad.part``."""
TARGET: Final = "target"
"""The name of the parameter: the part of its slots that a replica should have busy."""


def replicas_for(loads: Iterable[float], target: float) -> int:
    """0 only without any request, so that a replica with a long answer is not the last to go."""
    total = sum(loads)
    # A sum of floats must not ask for one replica more than the exact value.
    return math.ceil(round(total / target, 6)) if total > 0 else 0


def desired_replicas(context: Any, **parameters: float) -> tuple[int, dict[str, Any]]:
    """``context``: Serve's ``AutoscalingContext`` (2.60)."""
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    return replicas_for(metrics.get(LOAD, {}).values(), parameters[TARGET]), {}
