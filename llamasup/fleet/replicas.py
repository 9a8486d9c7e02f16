"""Decides how many replicas a model should have, and what Ray reserves for each (pure).

Serve calls ``ScaleByLoad`` with the load that the replicas report. It applies the bounds and the delays of
the autoscaling config itself, and starts the first replica for a request that waits at a handle. What Ray
reserves is computed from the plan, unless the config says it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from llamasup.errors import ConfigInvalid
from llamasup.fleet.settings import Fleet, FleetModel

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
    # A sum of floats must not request one replica more than the exact value.
    return math.ceil(round(total / target, 6)) if total > 0 else 0


class ScaleByLoad:
    """Serve's autoscaling policy for a deployment (its ``policy_kwargs`` are the arguments of the
    constructor).

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


# --- what Ray reserves ---------------------------------------------------------------------------------


class PlannedNeeds(Struct, frozen=True):
    """The needs of one process of the model, by the plan of this machine. ``devices``: the number of GPUs
    with their own memory that the plan uses. ``threads``: the number of computing threads. ``wants_gpu`` is
    False if the config keeps the model off GPUs.
    """

    host_bytes: int
    devices: int
    threads: int
    wants_gpu: bool = True


def given_for(model: str, fleet: Fleet) -> FleetModel:
    """Return the settings of this model, completed by the settings of all models."""
    own = fleet.models.get(model, FleetModel())
    return replace(
        own,
        min_replicas=fleet.min_replicas if own.min_replicas is None else own.min_replicas,
        max_replicas=fleet.max_replicas if own.max_replicas is None else own.max_replicas,
        gpus=fleet.gpus if own.gpus is None else own.gpus,
        when_idle=own.when_idle or fleet.when_idle,
    )


def are_given(given: FleetModel) -> bool:
    """Tell whether the config says everything, so that no plan is needed."""
    return given.cpus is not None and given.gpus is not None and given.memory is not None


def actor_options(model: str, needs: PlannedNeeds | None, given: FleetModel) -> Mapping[str, Any]:
    """Return Serve's ``ray_actor_options``. ``needs`` is None only if ``are_given``.

    A plan for GPUs computes there, so one CPU is enough for llama-server's own work and llamasup. Raises
    ConfigInvalid if the plan is that of a machine without a GPU: Ray would put several replicas on one GPU of
    another machine, without a reservation.
    """
    if needs is None:
        needs = PlannedNeeds(0, 0, 0)
    elif given.gpus is None and not needs.devices and needs.wants_gpu:
        raise ConfigInvalid(
            f"How many GPUs Ray should reserve for {model!r} is not known: this machine has none, and other "
            "machines of the cluster may have some.",
            remedy="Set `gpus` under `fleet:`; 0 if no machine of the cluster has a GPU.",
        )
    cpus = given.cpus if given.cpus is not None else 1 if needs.devices else max(needs.threads, 1)
    gpus = given.gpus if given.gpus is not None else needs.devices
    memory_bytes = needs.host_bytes if given.memory is None else given.memory.bytes or 0
    return {"num_cpus": cpus, "num_gpus": gpus, "memory": memory_bytes}
