"""Reads the NVIDIA driver's GPUs through NVML (package nvidia-ml-py, the ``gpu`` extra).

Each call opens and closes NVML: no session is kept, nothing is polled (P7).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from llamasup.core.system.hardware.devices import NvmlGpu

_DRIVER = Path("/dev/nvidiactl")


class NvmlAnswer(Struct, frozen=True):
    """The GPUs, or NVML's error: ``problem`` is its message, ``error`` its name.

    ``error`` is for example "NVMLError_LibRmVersionMismatch", or "not installed" without the package.
    """

    gpus: tuple[NvmlGpu, ...] = ()
    error: str = ""
    problem: str = ""


def ask_nvml() -> NvmlAnswer:
    """Return every GPU that the driver shows to this process. Never raises."""
    try:
        import pynvml  # 35 ms: only with an NVIDIA device
    except ImportError:
        return NvmlAnswer(error="not installed", problem="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
        try:
            count = pynvml.nvmlDeviceGetCount()
            return NvmlAnswer(tuple(_gpu(pynvml, index) for index in range(count)))
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return NvmlAnswer(error=type(error).__name__, problem=str(error))


def vram_by_process() -> Mapping[int, int]:
    """Return the bytes of each process on all GPUs together. Empty if unknown; never raises."""
    if not _DRIVER.exists():
        return {}
    try:
        import pynvml
    except ImportError:
        return {}
    used: dict[int, int] = {}
    try:
        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                for pid, size in _on_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)).items():
                    used[pid] = used.get(pid, 0) + size
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return {}
    return used


def energy_by_gpu() -> Mapping[str, int]:
    """Return the energy of each GPU since its driver was loaded, in microjoules, by UUID. Empty if unknown
    (older than Volta); never raises.
    """
    if not _DRIVER.exists():
        return {}
    try:
        import pynvml
    except ImportError:
        return {}
    used_uj: dict[str, int] = {}
    try:
        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                with contextlib.suppress(pynvml.NVMLError):
                    millijoules = int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
                    used_uj[_text(pynvml.nvmlDeviceGetUUID(handle))] = 1000 * millijoules
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return {}
    return used_uj


def _on_gpu(pynvml: Any, handle: Any) -> Mapping[int, int]:
    """A process that computes and draws (Vulkan) is listed twice with the same size."""
    used: dict[int, int] = {}
    for query in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        with contextlib.suppress(pynvml.NVMLError):
            for process in query(handle):
                if process.usedGpuMemory is not None:  # None under WDDM, and for MIG without rights
                    used[process.pid] = max(used.get(process.pid, 0), process.usedGpuMemory)
    return used


def _gpu(pynvml: Any, index: int) -> NvmlGpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError_NotSupported:  # GB10 and Jetson use the host's memory
        memory = None
    return NvmlGpu(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        bus_id=_text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=None if memory is None else int(memory.total),
        free_bytes=None if memory is None else int(memory.free),
    )


def _text(value: str | bytes) -> str:
    """The package answered in bytes until version 11.500."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
