"""NVML's answers, in its own structures and with its own errors, and what becomes of a runtime's devices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml
import pytest

from llamasup.core.llama_server.inspect import Runtime, devices_now, find_runtime
from llamasup.core.system.hardware.devices import Device, NvmlGpu
from llamasup.core.system.hardware.nvml import NvmlAnswer, ask_nvml
from llamasup.errors import BrokenRuntime
from tests.kit.paths import FIXTURES

HELP = FIXTURES / "help" / "b11434.txt"
UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIB = 1 << 20
GIB = 1 << 30


@dataclass
class Driver:
    """Stands in for libnvidia-ml.so: GPUs by name with total and free memory, None where it has none."""

    gpus: list[tuple[str, tuple[int, int] | None]]
    fails: dict[str, Exception] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetPciInfo": self._pci,
            "nvmlDeviceGetUUID": lambda handle: UUID.replace("8932", f"893{handle}"),
            "nvmlDeviceGetName": lambda handle: self.gpus[handle][0],
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, self._recorded(name, answer))

    def _recorded(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.fails:
                raise self.fails[name]
            return answer(*arguments)

        return call

    def _memory(self, handle: int) -> Any:
        memory = self.gpus[handle][1]
        if memory is None:
            raise pynvml.NVMLError_NotSupported(pynvml.NVML_ERROR_NOT_SUPPORTED)
        total, free = memory
        return pynvml.c_nvmlMemory_t(total=total, free=free, used=total - free)

    def _pci(self, handle: int) -> Any:
        return pynvml.nvmlPciInfo_t(busId=f"00000000:0{handle + 1}:00.0".encode(), bus=handle + 1)


def test_every_gpu_is_reported_and_the_session_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([("NVIDIA H200", (141 * GIB, 140 * GIB)), ("NVIDIA GB10", None)])
    driver.install(monkeypatch)
    assert ask_nvml() == NvmlAnswer(
        (
            NvmlGpu(UUID.replace("8932", "8930"), "00000000:01:00.0", "NVIDIA H200", 141 * GIB, 140 * GIB),
            NvmlGpu(UUID.replace("8932", "8931"), "00000000:02:00.0", "NVIDIA GB10", None, None),
        )
    )
    assert driver.calls[0] == "nvmlInit"
    assert driver.calls[-1] == "nvmlShutdown"
    assert driver.calls.count("nvmlShutdown") == 1


def test_names_as_bytes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([("NVIDIA H200", (141 * GIB, 140 * GIB))])
    driver.install(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _: b"NVIDIA H200")
    assert ask_nvml().gpus[0].name == "NVIDIA H200"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "RM has detected an NVML/RM version mismatch"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"),
    ],
)
def test_failing_driver_is_reported(error: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = pynvml.NVMLError(error)
    Driver([], {"nvmlInit": failure}).install(monkeypatch)
    answer = ask_nvml()
    assert answer.gpus == ()
    assert answer.error == type(failure).__name__ != "NVMLError"
    assert message in answer.problem


def test_lost_gpu_is_an_error_and_closes_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    unknown = pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
    driver = Driver(
        [("NVIDIA H200", (141 * GIB, 140 * GIB))],
        {"nvmlDeviceGetHandleByIndex": lost, "nvmlShutdown": unknown},
    )
    driver.install(monkeypatch)
    assert ask_nvml().error == "NVMLError_GpuIsLost"
    assert driver.calls[-1] == "nvmlShutdown"


def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert ask_nvml().error == "not installed"


# --- a runtime's devices, now --------------------------------------------------------------------


@pytest.fixture
def cuda_runtime(tmp_path: Path) -> tuple[Runtime, Path]:
    """A runtime with one GPU; the file holds what it lists, and the other is how often it was asked."""
    return runtime_with(tmp_path, "CUDA0: NVIDIA H200 (143156 MiB, 142623 MiB free)")


def runtime_with(tmp_path: Path, line: str) -> tuple[Runtime, Path]:
    listed = tmp_path / "devices.txt"
    listed.write_text(f"Available devices:\n  {line}\n")
    program = tmp_path / "llama-server"
    program.write_text(
        f"#!/bin/sh\ncase $1 in --help) /bin/cat '{HELP}' ;; --version) echo 'version: 1 (a)' ;;\n"
        f"--list-devices) echo asked >> '{tmp_path}/asked'; /bin/cat '{listed}' ;; esac\n"
    )
    program.chmod(0o755)
    runtime = find_runtime(str(program), {})
    (tmp_path / "asked").unlink()
    return runtime, listed


def test_nvml_gives_free_memory_without_a_query(
    cuda_runtime: tuple[Runtime, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Driver([("NVIDIA H200", (143771 * MIB, 1000 * MIB))]).install(monkeypatch)
    (device,) = devices_now(cuda_runtime[0], {})
    assert device == Device("CUDA0", "NVIDIA H200", 143156 * MIB, 1000 * MIB)
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "MIG-GPU-8930f937/1/0"}])
def test_runtime_is_queried_if_nvml_does_not_help(
    environ: dict[str, str], cuda_runtime: tuple[Runtime, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, listed = cuda_runtime
    if environ:
        Driver([("NVIDIA H200", (143771 * MIB, 1000 * MIB))] * 2).install(monkeypatch)
    else:
        failure = pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        Driver([], {"nvmlInit": failure}).install(monkeypatch)
    listed.write_text(listed.read_text().replace("142623 MiB free", "77 MiB free"))
    assert [device.free_bytes for device in devices_now(runtime, environ)] == [77 * MIB]


@pytest.mark.parametrize(
    "line",
    ["Vulkan0: AMD Radeon RX 7900 XTX (24560 MiB, 9 MiB free)", "CUDA0: NVIDIA GB10 (9 MiB, 9 MiB free)"],
)
def test_nvml_is_not_used_for_other_devices(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver([("NVIDIA GB10", None)])
    driver.install(monkeypatch)
    runtime, _ = runtime_with(tmp_path, line)
    assert devices_now(runtime, {})[0].free_bytes == 9 * MIB
    assert driver.calls == []


def test_runtime_without_devices_is_not_queried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([])
    driver.install(monkeypatch)
    runtime, _ = runtime_with(tmp_path, "BLAS: OpenBLAS (0 MiB, 0 MiB free)")
    assert runtime.capabilities.devices == ()
    assert devices_now(runtime, {}) == ()
    assert driver.calls == []
    assert not (tmp_path / "asked").exists()


def test_missing_runtime_is_an_error_with_a_remedy(
    cuda_runtime: tuple[Runtime, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    Driver([]).install(monkeypatch)
    Path(cuda_runtime[0].path).unlink()
    with pytest.raises(BrokenRuntime) as caught:
        devices_now(cuda_runtime[0], {})
    assert caught.value.remedy
