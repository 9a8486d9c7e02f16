"""The energy counters of the machine, from folders like those of Linux."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.features.usage import energy
from llamasup.features.usage.attribution import Counter


def zone(powercap: Path, name: str, kind: str, value: str, range_uj: str = "1000") -> None:
    folder = powercap / name
    folder.mkdir(parents=True)
    for file, content in (("name", kind), ("energy_uj", value), ("max_energy_range_uj", range_uj)):
        (folder / file).write_text(f"{content}\n")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    energies: dict[str, int] = {}
    monkeypatch.setattr(energy, "energy_by_gpu", lambda: energies)
    return energies


def test_packages_memory_and_gpus_are_read_once_each(tmp_path: Path, gpus: dict[str, int]) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", "500")
    zone(tmp_path, "intel-rapl:0:0", "core", "400")  # a part of the package
    zone(tmp_path, "intel-rapl:0:1", "dram", "70")
    zone(tmp_path, "intel-rapl:1", "psys", "900")  # the whole machine, the package included
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", "500")  # the same package again
    gpus["GPU-1"] = 30_000
    reading = energy.read_energy(tmp_path)
    assert reading is not None
    assert reading.counters == {
        "intel-rapl:0": Counter(500, 1000),
        "intel-rapl:0:1": Counter(70, 1000),
        "GPU-1": Counter(30_000),
    }


def test_counter_that_cannot_be_read_is_left_out(tmp_path: Path, gpus: dict[str, int]) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", "unknown")
    zone(tmp_path, "intel-rapl:1", "package-1", "7")
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert energy.read_energy(tmp_path) is None


def test_machine_without_counters_has_no_reading(tmp_path: Path, gpus: dict[str, int]) -> None:
    assert energy.read_energy(tmp_path / "missing") is None
