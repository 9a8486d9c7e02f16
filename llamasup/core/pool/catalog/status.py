"""The objects of the control API about models: ``status`` (docs/design.md) and ``memory`` (docs/control.md),
and the gauges (pure).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from msgspec import Struct

from llamasup.core.observability.counters import InstanceGauges
from llamasup.core.planning.memory.estimate import MemoryEstimate
from llamasup.core.planning.memory.shares import RAM
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.pool.model_info import ModelInfo, ProcessInfo
from llamasup.core.system.hardware.devices import Device

_NONE = ProcessInfo()


def model_status(info: ModelInfo, now: datetime, rss_bytes_of: Callable[[int], int | None]) -> dict[str, Any]:
    """The model in ``status``. ``rss_bytes_of`` returns the memory of a process.

    The caller fills in ``vram_bytes``, because the driver is slow.
    """
    spec, processes, plan = info.spec, info.processes, info.plan
    first = processes[0] if processes else _NONE
    pids = (each.pid for each in processes if each.pid is not None)
    rss = [size for size in map(rss_bytes_of, pids) if size is not None]
    model_class = plan.model_class if plan is not None else info.facts.model_class if info.facts else None
    until = None if info.unload_in_s is None else now + timedelta(seconds=info.unload_in_s)
    engine = spec.engine
    status = {
        **({} if engine is None else {"kind": engine.kind}),
        "id": spec.id,
        "aliases": list(spec.aliases),
        "state": info.state.value,
        "generation": first.generation,
        "pid": first.pid,
        "restarts": sum(each.restarts for each in processes),
        "in_flight": sum(each.in_flight for each in processes),
        "queued": info.queued,
        "slots": info.slots,
        "slots_busy": sum(each.busy for each in processes),
        "ctx_size": None if plan is None else plan.ctx_size,
        "load": None if info.load is None else info.load.as_json(),
        "memory": {"ram_bytes": sum(rss) if rss else None, "vram_bytes": None},
        "size_bytes": None if info.facts is None else info.facts.file_bytes,
        "class": None if model_class is None or engine is not None else model_class.value,
        "device": None if plan is None or first.pid is None else plan.device,
        "until": None if until is None else until.isoformat(timespec="seconds"),
        "pinned": spec.stay.pin,
        "last_exit": None if first.diagnosis is None else _last_exit(first),
        "events": [record.as_json() for record in first.events],
    }
    if len(processes) > 1:
        status["replicas"] = [
            {
                "state": each.state.value,
                "generation": each.generation,
                "pid": each.pid,
                "restarts": each.restarts,
                "in_flight": each.in_flight,
                "device": None if each.plan is None else each.plan.device,
            }
            for each in processes
        ]
    return status | {
        "needs_bytes": dict(info.sized_needs) or None,
        "problem": info.problem or None,
        "remedy": info.remedy or None,
    }


def _last_exit(process: ProcessInfo) -> Mapping[str, Any]:
    assert process.diagnosis is not None
    return {
        "code": process.exit.code if process.exit else None,
        "signal": process.exit.signal if process.exit else None,
        "cause": process.diagnosis.cause,
        "remedy": process.diagnosis.remedy,
    }


def gauges_of(info: ModelInfo) -> Iterator[InstanceGauges]:
    """One for each process; replicas share a queue."""
    for each in info.processes:
        yield InstanceGauges(info.id, each.state, each.in_flight, queued=info.queued)


def held_bytes_of(info: ModelInfo) -> int:
    """The memory that the plans of its processes predict, without the prompt cache, which begins empty."""
    plans = [each.plan for each in info.all_processes if each.pid is not None]
    return sum(plan.memory.without_prompt_cache.total_bytes for plan in plans if isinstance(plan, LaunchPlan))


_KINDS: Final = {
    "weights": "weights_bytes",
    "kv": "kv_bytes",
    "compute": "compute_bytes",
    "runtime": "compute_bytes",  # llama-server's own memory
    "checkpoints": "cache_bytes",
    "prompt cache": "cache_bytes",
}


class Measured(Struct, frozen=True):
    """The measured memory of processes by their ID. ``vram_bytes``: on all devices together."""

    rss_bytes: Mapping[int, int] = {}
    vram_bytes: Mapping[int, int] = {}


def memory_view(
    devices: Sequence[Device], budget: Mapping[str, int], models: Sequence[ModelInfo], measured: Measured
) -> list[Mapping[str, Any]]:
    """The memory of each device and of the models on it.

    ``devices``: RAM first, under the name ``ram``, then those with their own memory. ``free_bytes`` is
    negative for a device whose free memory is unknown.
    """
    own = [device for device in devices if device.name != RAM]
    return [
        {
            "name": device.name,
            "total_bytes": device.total_bytes,
            "free_bytes": device.free_bytes if device.free_bytes >= 0 else None,
            "budget_bytes": budget.get(device.name),
            "models": [each for model in models if (each := _model_on(device.name, model, own, measured))],
        }
        for device in devices
    ]


def _model_on(
    name: str, model: ModelInfo, own: Sequence[Device], measured: Measured
) -> Mapping[str, Any] | None:
    """The part of a model on one device; None if it uses nothing of the device."""
    processes = {each.pid: _estimate(each) for each in model.all_processes if each.pid is not None}
    estimates = [estimate for estimate in processes.values() if estimate is not None]
    parts: Counter[str] = Counter(dict.fromkeys(_KINDS.values(), 0))
    for estimate in estimates:
        parts.update(predicted_on(name, estimate, own))
    # Without an estimate, its processes have no plan yet.
    total_bytes = parts.total() if estimates else model.needs.get(name, 0)
    sizes = [_measured_on(name, pid, estimate, own, measured) for pid, estimate in processes.items()]
    known = [size for size in sizes if size is not None]
    if not (total_bytes or sum(known)):
        return None
    return {
        "id": model.id,
        "state": model.state.value,
        "predicted": {**parts, "total_bytes": total_bytes},
        "measured_bytes": sum(known) if known else None,
    }


def _estimate(process: ProcessInfo) -> MemoryEstimate | None:
    return process.plan.memory if isinstance(process.plan, LaunchPlan) else None


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


def _measured_on(
    name: str, pid: int, estimate: MemoryEstimate | None, own: Sequence[Device], measured: Measured
) -> int | None:
    """The driver reports a process's memory on all GPUs together, so that on one of several is unknown."""
    if name == RAM:
        return measured.rss_bytes.get(pid)
    if estimate is None or [device.name for device in devices_used(estimate, own)] != [name]:
        return None
    return measured.vram_bytes.get(pid)
