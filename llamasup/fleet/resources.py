"""Decides what Ray reserves for a replica: by the plan, unless the config says it (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.settings.sections import Fleet, FleetModel
from llamasup.errors import ConfigInvalid


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
    """Return the settings of this model, completed by those of all models."""
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
