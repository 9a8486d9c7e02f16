"""Collects the memory of this machine and of the loaded models, when the control API needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from llamasup.core.planning.facts import Launch
from llamasup.core.planning.memory.shares import RAM
from llamasup.core.pool.catalog.collect import info_of
from llamasup.core.pool.catalog.status import Measured, memory_view
from llamasup.core.pool.model import ManagedModel
from llamasup.core.system.hardware.devices import Device, with_nvml_memory
from llamasup.core.system.hardware.nvml import ask_nvml, vram_by_process
from llamasup.core.system.hardware.probe import hardware, load_usage

_UNKNOWN = -1


async def memory_of(managed_models: Iterable[ManagedModel], budget: Mapping[str, int]) -> Mapping[str, Any]:
    """The ``memory`` object of the control API (docs/control.md)."""
    known = tuple(managed_models)
    models = [info_of(managed) for managed in known if managed.holds_memory]
    pids = [each.pid for model in models for each in model.all_processes if each.pid is not None]
    # In a thread: the driver and /proc may be slow.
    devices, measured = await asyncio.to_thread(_measured, _launch_of(known), budget, pids)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "devices": memory_view(devices, budget, models, measured),
    }


def _launch_of(models: Sequence[ManagedModel]) -> Launch | None:
    """The launch of any model that was sized: all have the same runtime."""
    sized = (managed.sized for managed in models)
    return next((found.launch for found in sized if found is not None and found.launch is not None), None)


def _measured(
    launch: Launch | None, budget: Mapping[str, int], pids: Iterable[int]
) -> tuple[Sequence[Device], Measured]:
    used = {pid: usage.rss_bytes for pid in pids if (usage := load_usage(pid)) is not None}
    return devices_with_ram(launch, budget), Measured(used, vram_by_process())


def devices_with_ram(launch: Launch | None, budget: Mapping[str, int]) -> Sequence[Device]:
    """RAM as a device, then the devices with their own memory, with the memory that is free now.

    Only NVML is asked: the runtime would create a context on each device, which takes seconds and memory.
    """
    machine = hardware()
    ram = Device(RAM, "", machine.memory_total_bytes, machine.memory_available_bytes, True)
    if launch is None:  # no model was read yet: only the budget names the devices
        own = [Device(name, "", size, _UNKNOWN) for name, size in budget.items() if name != RAM]
        return (ram, *own)
    known = launch.runtime.capabilities.devices
    own = [device for device in known if not device.shares_host_memory]
    if not own:
        return (ram,)
    gpus = ask_nvml().gpus if all(device.is_cuda for device in known) else ()
    fresh = with_nvml_memory(known, gpus, launch.environ) if gpus else None
    if fresh is None:
        return (ram, *(replace(device, free_bytes=_UNKNOWN) for device in own))
    return (ram, *(device for device in fresh if not device.shares_host_memory))
