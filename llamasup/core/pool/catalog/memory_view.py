"""The memory of each device by model, predicted and measured, for ``GET memory`` (docs/control.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, field

from llamasup.core.planning.memory.estimate import MemoryEstimate
from llamasup.core.planning.memory.shares import RAM
from llamasup.core.system.hardware.devices import Device

_KINDS: Final = {
    "weights": "weights_bytes",
    "kv": "kv_bytes",
    "compute": "compute_bytes",
    "runtime": "compute_bytes",  # llama-server's own memory
    "checkpoints": "cache_bytes",
    "prompt cache": "cache_bytes",
}


class HeldByProcess(Struct, frozen=True):
    """The memory of one process. ``memory``: the estimate of its plan; None if it has none. ``vram_bytes``:
    on all devices together.
    """

    memory: MemoryEstimate | None
    rss_bytes: int | None = None
    vram_bytes: int | None = None


class HeldByModel(Struct, frozen=True):
    """The memory of one model. ``needs``: what the pool charges for it, by device."""

    id: str
    state: str
    needs: Mapping[str, int] = field(default_factory=dict[str, int])
    processes: tuple[HeldByProcess, ...] = ()


def memory_view(
    devices: Sequence[Device], budget: Mapping[str, int], models: Iterable[HeldByModel]
) -> list[Mapping[str, Any]]:
    """The memory of each device and of the models on it.

    ``devices``: RAM first, under the name ``ram``, then those with their own memory. ``free_bytes`` is
    negative for a device whose free memory is unknown.
    """
    held = tuple(models)
    own = [device for device in devices if device.name != RAM]
    return [
        {
            "name": device.name,
            "total_bytes": device.total_bytes,
            "free_bytes": device.free_bytes if device.free_bytes >= 0 else None,
            "budget_bytes": budget.get(device.name),
            "models": [shown for model in held if (shown := _model_on(device.name, model, own)) is not None],
        }
        for device in devices
    ]


def _model_on(name: str, model: HeldByModel, own: Sequence[Device]) -> Mapping[str, Any] | None:
    """The part of a model on one device; None if it uses nothing of the device."""
    parts = dict.fromkeys(_KINDS.values(), 0)
    for process in model.processes:
        if process.memory is not None:
            for kind, size_bytes in predicted_on(name, process.memory, own).items():
                parts[kind] += size_bytes
    total_bytes = sum(parts.values())
    if not any(process.memory is not None for process in model.processes):
        total_bytes = model.needs.get(name, 0)  # its processes have no plan yet
    measured_bytes = _measured_on(name, model, own)
    if not (total_bytes or measured_bytes):
        return None
    return {
        "id": model.id,
        "state": model.state,
        "predicted": {**parts, "total_bytes": total_bytes},
        "measured_bytes": measured_bytes,
    }


def predicted_on(name: str, memory: MemoryEstimate, own: Sequence[Device]) -> Mapping[str, int]:
    """The bytes of a plan on one device by kind. llama.cpp distributes layers in proportion to the sizes."""
    used = devices_used(memory, own)
    total_bytes = sum(device.total_bytes for device in used)
    size_bytes = next((device.total_bytes for device in used if device.name == name), 0)
    parts = dict.fromkeys(_KINDS.values(), 0)
    for part in memory.parts:
        if name == RAM:
            parts[_KINDS[part.kind]] += part.host_bytes + (0 if used else part.device_bytes)
        elif size_bytes:
            parts[_KINDS[part.kind]] += part.device_bytes * size_bytes // total_bytes
    return parts


def devices_used(memory: MemoryEstimate, own: Sequence[Device]) -> Sequence[Device]:
    """The devices with their own memory that a plan uses."""
    return [device for device in own if device.name in memory.free.names]


def _measured_on(name: str, model: HeldByModel, own: Sequence[Device]) -> int | None:
    """The driver reports a process's memory on all GPUs together, so that on one of several is unknown."""
    seen: list[int] = []
    for process in model.processes:
        if name == RAM:
            measured = process.rss_bytes
        elif process.memory is None or [d.name for d in devices_used(process.memory, own)] != [name]:
            measured = None
        else:
            measured = process.vram_bytes
        if measured is not None:
            seen.append(measured)
    return sum(seen) if seen else None
