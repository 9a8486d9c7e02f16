"""Decides how many replicas a model should have, by the load that the replicas report (pure).

Serve itself applies the bounds and the delays of the autoscaling config, and starts the first replica for a
request that waits at a handle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

LOAD: Final = "load"
"""The name of the reported metric: ``NodeLoad.demand``."""
MAKES_ROOM: Final = "makes_room"
"""The name of a metric of a sleeping replica: above 0 if it should end, because Ray needs its room."""
ABSENT_S: Final = 30.0
"""A model that should have replicas, and has none, is given up after this time, unless the directory asks for
it: it does while a start is under way. Long enough for a directory that is started again.
"""
_USED: Final = "used_s"
_ABSENT: Final = "absent_s"
_FROM_ZERO: Final = "from_zero"  # no replica has run since the model should have none


def replicas_for(loads: Iterable[float], target: float) -> int:
    """Return how many replicas the load needs. ``target``: the share of its slots that a replica should have
    busy. The result is 0 only without any request: the last replica stays while it writes a long answer.
    """
    total = sum(loads)
    # A sum of floats must not ask for one replica more than the exact value.
    return math.ceil(round(total / target, 6)) if total > 0 else 0


class ScaleByLoad:
    """Serve's autoscaling policy for a deployment (its ``policy_kwargs`` are those of the constructor).

    It applies ``idle_after_s`` itself, because a start that has failed should not wait as long: Serve (2.60)
    gives up a deployment whose replicas failed to start three times, until it has had 0 replicas. With
    ``sleeps``, the last replica stays, asleep, until it makes room.
    """

    def __init__(self, target: float, idle_after_s: float, *, sleeps: bool = False) -> None:
        self._target = target
        self._idle_after_s = idle_after_s
        self._sleeps = sleeps

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Decide. ``context``: Serve's ``AutoscalingContext`` (2.60). The second value is ``policy_state`` of
        the next call. Serve does not call this while a call to the deployment waits for the first replica.
        """
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        desired = replicas_for(metrics.get(LOAD, {}).values(), self._target)
        now_s, state = context.current_time, context.policy_state
        if not context.target_num_replicas:
            return desired, {_FROM_ZERO: True}
        if desired:
            return desired, {_USED: now_s}
        used_s = state.get(_USED, now_s)
        if context.current_num_replicas:
            stays = not _makes_room(context) if self._sleeps else now_s < used_s + self._idle_after_s
            return int(stays), {_USED: used_s}
        absent_s = state.get(_ABSENT, now_s)
        until_s = absent_s + ABSENT_S
        if self._sleeps and _FROM_ZERO not in state:  # a sleeping replica is replaced
            until_s = max(until_s, absent_s + self._idle_after_s)
        elif _USED in state:  # an update of a model that has served lately
            until_s = max(until_s, used_s + self._idle_after_s)
        return (context.target_num_replicas if now_s < until_s else 0), {**state, _ABSENT: absent_s}


def _makes_room(context: Any) -> bool:
    """Tell whether the sleeping replica should end, by the latest values: a mean stays above 0 too long."""
    metrics: Mapping[str, Mapping[Any, Sequence[Any]]] = context.raw_metrics or {}
    return any(series[-1].value for series in metrics.get(MAKES_ROOM, {}).values() if series)
