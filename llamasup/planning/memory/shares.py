"""Memory that several models share: the budget of all, what one takes of it, and what is left for another.

Bytes by place: ``ram``, and each device with memory of its own by llama-server's name for it (``CUDA0``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from llamasup.planning.memory.estimate import MemoryEstimate
from llamasup.system.hardware.devices import Device
from llamasup.system.hardware.facts import Hardware

__all__ = ["RAM", "MemoryBudget", "budget_of", "needs_of", "remaining"]

RAM = "ram"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What one process of one of several models may take. ``alone``: as if no other model were loaded, to see
    what it needs. ``replicas``: how many processes of the model there are; each is kept to one of ``devices``
    in turn, if any are named.
    """

    places: Mapping[str, int]
    alone: bool = False
    replicas: int = 1
    devices: Sequence[str] = ()

    def of_host(self, machine: Hardware) -> Hardware:
        """``machine`` as this process may see it."""
        available_bytes = self._of(RAM, machine.memory_available_bytes)
        return replace(machine, memory_available_bytes=available_bytes, cpu_sharers=self.replicas)

    def of_devices(self, devices: Iterable[Device]) -> tuple[Device, ...]:
        return tuple(replace(each, free_bytes=self._of(each.name, each.free_bytes)) for each in devices)

    def _of(self, place: str, free_bytes: int) -> int:
        allowed = self.places.get(place, free_bytes) // self._processes_on(place)
        return allowed if self.alone else min(allowed, free_bytes)

    def _processes_on(self, place: str) -> int:
        if place == RAM or not self.devices:
            return self.replicas
        turns = (self.devices[number % len(self.devices)] for number in range(self.replicas))
        return max(1, sum(device == place for device in turns))


def budget_of(
    machine: Hardware,
    devices: Iterable[Device],
    *,
    ram: Callable[[int], int] | None = None,
    vram: Callable[[int], int] | None = None,
) -> dict[str, int]:
    """What all models together may take. ``ram`` and ``vram`` say how much of a total; None: what is free."""
    own = {
        each.name: each.free_bytes if vram is None else vram(each.total_bytes)
        for each in devices
        if not each.shares_host_memory
    }
    host = machine.memory_available_bytes if ram is None else ram(machine.memory_total_bytes)
    return {RAM: host, **own}


def needs_of(memory: MemoryEstimate, devices: Sequence[Device]) -> dict[str, int]:
    """What a plan takes, by place.

    llama.cpp deals its layers out in proportion to what is free on each device that it uses; on devices of
    which nothing else is known that is in proportion to their sizes.
    """
    used = [each for each in devices if not each.shares_host_memory and each.name in memory.room.names]
    total_bytes = sum(each.total_bytes for each in used)
    needs = {RAM: memory.host_bytes + (0 if used else memory.device_bytes)}
    if memory.device_bytes and used:
        needs |= {each.name: -(-memory.device_bytes * each.total_bytes // total_bytes) for each in used}
    return needs


def remaining(budget: Mapping[str, int], taken: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """What is left of ``budget``; never less than nothing."""
    left = dict(budget)
    for needs in taken:
        for place, size_bytes in needs.items():
            left[place] = left.get(place, 0) - size_bytes
    return {place: max(0, size_bytes) for place, size_bytes in left.items()}
