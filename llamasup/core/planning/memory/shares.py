"""Memory that several models share: the budget of all, the needs of one, and the remainder for another.

All amounts are bytes per memory: ``ram``, and each device with its own memory by llama-server's name for it
(``CUDA0``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.planning.memory.estimate import MemoryEstimate
from llamasup.core.system.hardware.devices import Device
from llamasup.core.system.hardware.facts import Hardware

RAM = "ram"


class MemoryBudget(Struct, frozen=True):
    """The memory that one process of a model may take.

    ``alone`` is the memory if no other model were loaded, which shows what the model needs. ``replicas`` is
    the number of processes of the model. If ``devices`` are named, each process runs on one of them in turn.
    """

    limits: Mapping[str, int]
    alone: bool = False
    replicas: int = 1
    devices: Sequence[str] = ()

    def of_host(self, machine: Hardware) -> Hardware:
        """Return ``machine`` with the free memory that this process may use."""
        available_bytes = self._allowed(RAM, machine.memory_available_bytes)
        return replace(machine, memory_available_bytes=available_bytes, cpu_sharers=self.replicas)

    def of_devices(self, devices: Iterable[Device]) -> tuple[Device, ...]:
        return tuple(
            replace(device, free_bytes=self._allowed(device.name, device.free_bytes)) for device in devices
        )

    def _allowed(self, memory: str, free_bytes: int) -> int:
        allowed_bytes = self.limits.get(memory, free_bytes) // self._processes_on(memory)
        return allowed_bytes if self.alone else min(allowed_bytes, free_bytes)

    def _processes_on(self, memory: str) -> int:
        if memory == RAM or not self.devices:
            return self.replicas
        turns = (self.devices[number % len(self.devices)] for number in range(self.replicas))
        return max(1, sum(device == memory for device in turns))


def budget_of(
    machine: Hardware,
    devices: Iterable[Device],
    *,
    ram: Callable[[int], int] | None = None,
    vram: Callable[[int], int] | None = None,
) -> dict[str, int]:
    """Compute the memory for all models. ``ram`` and ``vram`` take it from a total; None: the free memory."""
    own = {
        device.name: device.free_bytes if vram is None else vram(device.total_bytes)
        for device in devices
        if not device.shares_host_memory
    }
    host = machine.memory_available_bytes if ram is None else ram(machine.memory_total_bytes)
    return {RAM: host, **own}


def needs_of(memory: MemoryEstimate, devices: Sequence[Device]) -> dict[str, int]:
    """The bytes of each memory that a plan takes.

    llama.cpp distributes its layers in proportion to the free memory of the devices that it uses. Without
    other models, that is in proportion to their sizes. The part on RPC workers is no memory of this machine.
    """
    used = [
        device for device in devices if not device.shares_host_memory and device.name in memory.free.names
    ]
    total_bytes = sum(device.total_bytes for device in used)
    needs = {RAM: memory.host_bytes + (0 if used else memory.device_bytes)}
    if memory.device_bytes and used:
        needs |= {
            device.name: -(-memory.device_bytes * device.total_bytes // total_bytes)
            for device in used
            if not device.remote
        }
    return needs


def remaining(budget: Mapping[str, int], taken: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the rest of ``budget`` after the needs in ``taken``, at least 0 for each memory."""
    rest = dict(budget)
    for needs in taken:
        for memory, size_bytes in needs.items():
            rest[memory] = rest.get(memory, 0) - size_bytes
    return {memory: max(0, size_bytes) for memory, size_bytes in rest.items()}
