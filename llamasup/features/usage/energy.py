"""Reads the energy counters of the machine: RAPL of the processors and NVML of NVIDIA's GPUs.

Linux shows RAPL's counters to root only, unless the administrator allows more (CVE-2020-8694). A counter that
cannot be read is left out.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from llamasup.core.system.hardware.nvml import energy_by_gpu
from llamasup.features.usage.attribution import Counter, Reading

_POWERCAP = Path("/sys/class/powercap")


def read_energy(powercap: Path = _POWERCAP) -> Reading | None:
    """Read the energy counters. None if the machine has none that this user may read. Takes milliseconds with
    a GPU.
    """
    counters = {**_rapl(powercap), **{gpu: Counter(uj) for gpu, uj in energy_by_gpu().items()}}
    return Reading(monotonic(), counters) if counters else None


def _rapl(powercap: Path) -> dict[str, Counter]:
    """The packages, and their memory, which a package does not include. ``intel-rapl-mmio`` is the same
    package again, ``core`` and ``uncore`` are parts of it, and ``psys`` includes all.
    """
    counters: dict[str, Counter] = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text("ascii").strip()
            if name.startswith("package") or name == "dram":
                value_uj = int((zone / "energy_uj").read_text("ascii"))
                range_uj = int((zone / "max_energy_range_uj").read_text("ascii"))
                counters[zone.name] = Counter(value_uj, range_uj)
        except (OSError, ValueError):
            continue
    return counters
