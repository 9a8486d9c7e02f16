"""What Ray reserves for a replica (pure): computed from the plan, unless the config says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from llamasup.settings.sections import FleetModel

__all__ = ["PlannedNeeds", "actor_options", "are_given"]


class PlannedNeeds(Struct, frozen=True):
    """What one process of the model needs by the plan of this machine. ``devices``: GPUs with their own
    memory that the plan uses. ``threads``: those that compute.
    """

    host_bytes: int
    devices: int
    threads: int


def are_given(given: FleetModel) -> bool:
    """Whether the config says everything, so that no plan is needed."""
    return given.cpus is not None and given.gpus is not None and given.memory is not None


def actor_options(needs: PlannedNeeds | None, given: FleetModel) -> Mapping[str, Any]:
    """Serve's ``ray_actor_options``. ``needs``: None only if ``are_given``.

    A plan for GPUs computes there, so one CPU is enough for llama-server's own work and llamasup.
    """
    if needs is None:
        needs = PlannedNeeds(0, 0, 0)
    cpus = given.cpus if given.cpus is not None else 1 if needs.devices else max(needs.threads, 1)
    gpus = given.gpus if given.gpus is not None else needs.devices
    memory_bytes = needs.host_bytes if given.memory is None else given.memory.bytes or 0
    return {"num_cpus": cpus, "num_gpus": gpus, "memory": memory_bytes}
