"""What one process of one of several models may take of a machine that others use as well."""

from __future__ import annotations

import pytest

from llamasup.core.planning.memory.estimate import FreeMemory, MemoryEstimate, Part
from llamasup.core.planning.memory.shares import RAM, MemoryBudget, budget_of, needs_of, remaining
from llamasup.core.system.hardware.devices import Device
from tests.core.planning.plans import machine

GIB = 1 << 30


def device(name: str, free_bytes: int = 8 * GIB, total_bytes: int = 24 * GIB) -> Device:
    return Device(name, name, total_bytes=total_bytes, free_bytes=free_bytes)


INTEGRATED = Device("Vulkan0", "the processor's own", 16 * GIB, 16 * GIB, shares_host_memory=True)


@pytest.mark.parametrize(
    ("share", "ram_gib", "vram_gib"),
    [
        (MemoryBudget({RAM: 10 * GIB, "CUDA0": 20 * GIB}), 10, 8),  # of the device no more than what is free
        (MemoryBudget({RAM: 10 * GIB, "CUDA0": 20 * GIB}, alone=True), 10, 20),
        (MemoryBudget({}), 32, 8),
        (MemoryBudget({RAM: 10 * GIB, "CUDA0": 6 * GIB}, replicas=2), 5, 3),
        (MemoryBudget({RAM: 10 * GIB, "CUDA0": 20 * GIB}, alone=True, replicas=2), 5, 10),
        # each on a device of its own; of three on two devices two share one
        (MemoryBudget({RAM: 10 * GIB, "CUDA0": 6 * GIB}, replicas=2, devices=("CUDA0", "CUDA1")), 5, 6),
        (MemoryBudget({RAM: 9 * GIB, "CUDA0": 6 * GIB}, replicas=3, devices=("CUDA0", "CUDA1")), 3, 3),
        (MemoryBudget({RAM: 9 * GIB, "CUDA0": 6 * GIB}, replicas=3, devices=("CUDA1", "CUDA0")), 3, 6),
        (MemoryBudget({RAM: 8 * GIB, "CUDA0": 6 * GIB}, replicas=2, devices=("CUDA0", "CUDA0")), 4, 3),
    ],
)
def test_budget_of_one_process(share: MemoryBudget, ram_gib: int, vram_gib: int) -> None:
    host = share.of_host(machine(memory_available_bytes=32 * GIB))
    (gpu,) = share.of_devices([device("CUDA0", 8 * GIB)])
    assert (host.memory_available_bytes, gpu.free_bytes) == (ram_gib * GIB, vram_gib * GIB)
    assert host.cpu_sharers == share.replicas


def test_budget_is_the_free_memory_or_the_configured_part() -> None:
    host = machine(memory_total_bytes=64 * GIB, memory_available_bytes=32 * GIB)
    devices = [device("CUDA0"), INTEGRATED]
    assert budget_of(host, devices) == {RAM: 32 * GIB, "CUDA0": 8 * GIB}
    half = budget_of(host, devices, ram=lambda total: total // 2, vram=lambda total: total // 3)
    assert half == {RAM: 32 * GIB, "CUDA0": 8 * GIB}
    assert budget_of(host, devices, ram=lambda _: GIB)[RAM] == GIB


def estimate(host_gib: int, device_gib: int, *used: str) -> MemoryEstimate:
    part = Part("weights", "weights", host_gib * GIB, device_gib * GIB)
    return MemoryEstimate((part,), FreeMemory(0, names=used))


@pytest.mark.parametrize(
    ("memory", "devices", "needs_gib"),
    [
        (
            estimate(2, 9, "CUDA0", "CUDA1"),
            [device("CUDA0"), device("CUDA1", total_bytes=12 * GIB)],
            (2, 6, 3),
        ),
        (estimate(2, 9, "CUDA1"), [device("CUDA0"), device("CUDA1")], (2, None, 9)),
        (estimate(2, 0), [device("CUDA0")], (2, None, None)),
        (estimate(2, 9, INTEGRATED.name), [INTEGRATED], (11, None, None)),  # its memory is the host's
    ],
)
def test_needs_of_a_plan_per_memory(
    memory: MemoryEstimate, devices: list[Device], needs_gib: tuple[int | None, ...]
) -> None:
    places = (RAM, "CUDA0", "CUDA1")
    wanted = {place: gib * GIB for place, gib in zip(places, needs_gib, strict=True) if gib is not None}
    assert needs_of(memory, devices) == wanted


def test_remainder_is_never_negative() -> None:
    budget = {RAM: 10, "CUDA0": 5}
    assert remaining(budget, [{RAM: 4}, {RAM: 3, "CUDA0": 9}, {"CUDA1": 1}]) == {
        RAM: 3,
        "CUDA0": 0,
        "CUDA1": 0,
    }
    assert budget == {RAM: 10, "CUDA0": 5}
