"""NVML's answers about processes, with a fake of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamasup.core.system.hardware import nvml

Processes = Sequence[tuple[int, int | None]]


class NVMLError(Exception):
    pass


def driver(
    compute: Mapping[int, Processes], graphics: Mapping[int, Processes], **changes: Any
) -> SimpleNamespace:
    """The module, for as many GPUs as ``compute`` has."""

    def told(listed: Mapping[int, Processes], gpu: int) -> list[SimpleNamespace]:
        if gpu not in listed:
            raise NVMLError("Not Supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in listed[gpu]]

    return SimpleNamespace(
        **{
            "NVMLError": NVMLError,
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(compute),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: told(compute, gpu),
            "nvmlDeviceGetGraphicsRunningProcesses": lambda gpu: told(graphics, gpu),
            **changes,
        }
    )


@pytest.fixture(autouse=True)
def with_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvml, "_DRIVER", tmp_path)


def test_vram_of_a_process_is_summed_over_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    told = driver({0: [(7, 100), (8, 5)], 1: [(7, 20), (9, None)]}, {0: [(7, 100), (6, 1)]})
    monkeypatch.setitem(sys.modules, "pynvml", told)
    assert nvml.vram_by_process() == {7: 120, 8: 5, 6: 1}


def energies(**by_gpu: int | None) -> SimpleNamespace:
    """The module, for GPUs with these UUIDs and millijoules; None: the GPU has no counter."""
    names = list(by_gpu)

    def used(gpu: int) -> int:
        millijoules = by_gpu[names[gpu]]
        if millijoules is None:
            raise NVMLError("Not Supported")
        return millijoules

    return driver(
        {number: [] for number in range(len(names))},
        {},
        nvmlDeviceGetTotalEnergyConsumption=used,
        nvmlDeviceGetUUID=lambda gpu: names[gpu].encode() if gpu else names[gpu],  # bytes in old versions
    )


def test_energy_is_that_of_each_gpu_with_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", energies(first=5, old=None, third=7))
    assert nvml.energy_by_gpu() == {"first": 5_000, "third": 7_000}


def test_missing_driver_answer_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails() -> None:
        raise NVMLError("Driver/library version mismatch")

    monkeypatch.setitem(sys.modules, "pynvml", driver({}, {}, nvmlInit=fails))
    assert nvml.vram_by_process() == {}
    assert nvml.energy_by_gpu() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert nvml.vram_by_process() == {}
    assert nvml.energy_by_gpu() == {}
    monkeypatch.setitem(sys.modules, "pynvml", energies(first=5))
    monkeypatch.setattr(nvml, "_DRIVER", tmp_path / "none")
    assert nvml.vram_by_process() == {}
    assert nvml.energy_by_gpu() == {}
