"""Reads the NVIDIA driver's GPUs through NVML (package nvidia-ml-py, the ``gpu`` extra).

Each call opens and closes NVML: no session is kept, nothing is polled (P7).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from llamasup.core.system.hardware.devices import NvmlGpu

K = TypeVar("K")

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
        with _session(pynvml) as handles:
            return NvmlAnswer(tuple(_gpu(pynvml, handle) for handle in handles))
    except pynvml.NVMLError as error:
        return NvmlAnswer(error=type(error).__name__, problem=str(error))


def vram_by_process() -> Mapping[int, int]:
    """Return the bytes of each process on all GPUs together. Empty if unknown; never raises."""
    return _measured(_vram)


def energy_by_gpu() -> Mapping[str, int]:
    """Return the energy of each GPU since its driver was loaded, in microjoules, by UUID. Empty if unknown
    (older than Volta); never raises.
    """
    return _measured(_energy)


def _measured(measure: Callable[[Any, Iterable[Any]], dict[K, int]]) -> dict[K, int]:
    if not _DRIVER.exists():
        return {}
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        with _session(pynvml) as handles:
            return measure(pynvml, handles)
    except pynvml.NVMLError:
        return {}


@contextlib.contextmanager
def _session(pynvml: Any) -> Iterator[Iterator[Any]]:
    """Yield the handles of the GPUs. Raises NVMLError."""
    pynvml.nvmlInit()
    try:
        yield map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _vram(pynvml: Any, handles: Iterable[Any]) -> dict[int, int]:
    used: Counter[int] = Counter()
    for handle in handles:
        used.update(_on_gpu(pynvml, handle))
    return dict(used)


def _energy(pynvml: Any, handles: Iterable[Any]) -> dict[str, int]:
    used_uj: dict[str, int] = {}
    for handle in handles:
        with contextlib.suppress(pynvml.NVMLError):
            millijoules = int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
            used_uj[_text(pynvml.nvmlDeviceGetUUID(handle))] = 1000 * millijoules
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


def _gpu(pynvml: Any, handle: Any) -> NvmlGpu:
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
