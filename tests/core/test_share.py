"""What one process of one of several models may take of a machine that others use as well."""

from __future__ import annotations

import pytest

from llamasup.core.devices import Device
from llamasup.core.share import RAM, Share
from tests.core.planning import machine

GIB = 1 << 30


def device(name: str, free_bytes: int) -> Device:
    return Device(name, name, total_bytes=24 * GIB, free_bytes=free_bytes)


@pytest.mark.parametrize(
    ("share", "ram_gib", "vram_gib"),
    [
        (Share({RAM: 10 * GIB, "CUDA0": 20 * GIB}), 10, 8),  # of the device no more than what is free
        (Share({RAM: 10 * GIB, "CUDA0": 20 * GIB}, alone=True), 10, 20),
        (Share({}), 32, 8),
        (Share({RAM: 10 * GIB, "CUDA0": 6 * GIB}, replicas=2), 5, 3),
        (Share({RAM: 10 * GIB, "CUDA0": 20 * GIB}, alone=True, replicas=2), 5, 10),
        # each on a device of its own; of three on two devices two share one
        (Share({RAM: 10 * GIB, "CUDA0": 6 * GIB}, replicas=2, devices=("CUDA0", "CUDA1")), 5, 6),
        (Share({RAM: 9 * GIB, "CUDA0": 6 * GIB}, replicas=3, devices=("CUDA0", "CUDA1")), 3, 3),
    ],
)
def test_the_share(share: Share, ram_gib: int, vram_gib: int) -> None:
    host = share.of_host(machine(memory_available_bytes=32 * GIB))
    (gpu,) = share.of_devices([device("CUDA0", 8 * GIB)])
    assert (host.memory_available_bytes, gpu.free_bytes) == (ram_gib * GIB, vram_gib * GIB)
    assert host.cpu_sharers == share.replicas
