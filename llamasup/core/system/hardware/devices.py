"""Compute devices: parses llama-server's list, and adds the free memory that NVML reports.

``--list-devices`` prints name, description, total and free memory; the backends log more about the devices at
the same time. Pure: llama_server/inspect.py and nvml.py collect the inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace


class Device(Struct, frozen=True):
    """A compute device as llama-server lists it; ``free_bytes`` at that time."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int
    shares_host_memory: bool = False  # its memory is the host's, so do not count it twice
    remote: bool = False  # of an RPC worker: no memory of this machine

    @property
    def is_cuda(self) -> bool:
        return _CUDA.fullmatch(self.name) is not None


class NvmlGpu(Struct, frozen=True):
    """A GPU as the NVIDIA driver reports it. Without memory sizes it uses the host's (GB10, Jetson)."""

    uuid: str  # "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    bus_id: str  # "00000000:01:00.0": PCI_BUS_ID order is that of these
    name: str  # as in CUDA, "NVIDIA GeForce RTX 4090"
    total_bytes: int | None
    free_bytes: int | None


def parse_devices(listed: str, log: str = "") -> tuple[Device, ...]:
    """Return the devices of ``--list-devices`` that have memory; empty if the build finds no accelerator.

    ``log`` is stderr of the same run. A device without memory, "BLAS: Accelerate (0 MiB, 0 MiB free)", only
    computes and never holds a layer.
    """
    found = (_DEVICE.fullmatch(line.strip()) for line in listed.splitlines())
    return tuple(
        Device(
            name,
            description,
            int(total) * _MIB,
            int(free) * _MIB,
            shares_host_memory=_shares_host_memory(name, description, log),
        )
        for name, description, total, free in (match.groups() for match in found if match)
        if int(total) > 0
    )


_ERROR_LINE = re.compile(
    r"fail|error|cannot|could not|unable|denied|insufficient|not supported", re.IGNORECASE
)
_LOG_PREFIX = re.compile(r"^[\d.]+ [DIWE] ")  # "0.00.012.345 E ", in builds since 2026
_LONGEST_PROBLEM = 200


def problem_in(log: str) -> str:
    """Return the last line in which a backend explains why there is no device; empty if there is none.

    "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected", or a library that
    ``load_backend`` could not load.
    """
    errors = [line for line in log.splitlines() if _ERROR_LINE.search(line)]
    return _LOG_PREFIX.sub("", errors[-1].strip())[:_LONGEST_PROBLEM] if errors else ""


# --- shared or dedicated memory ------------------------------------------------------------------

_MIB = 1024 * 1024
_DEVICE = re.compile(r"(\S+): (.*) \((\d{1,12}) MiB, (\d{1,12}) MiB free\)")
_CUDA = re.compile(r"CUDA\d+")
_METAL = re.compile(r"Metal|MTL\d+")  # MTL0 since virtual devices (January 2026, #18919)
_NUMBERED = re.compile(r"(Vulkan|ROCm)(\d+)")
# "ggml_vulkan: 0 = NAME (driver) | uma: 1 | …" since 2025, "Vulkan0: NAME (driver) | uma: 1 | …" before.
_VULKAN_UMA = r"^.*(?:ggml_vulkan: {0} = |Vulkan{0}: ).*\| uma: ([01])\b"
# "  Device 0: AMD Radeon Graphics, gfx1151 (0x1151), VMM: no, …"
_ROCM_CHIP = r"^.*\bDevice {0}: .*?, (gfx\w+)"
_AMD_APUS = frozenset(
    {"gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1037"}
    | {"gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"}
)
# The names of processors' own graphics, for builds that log nothing about them.
_INTEGRATED = re.compile(
    r"\b(?:GB10|Orin|Xavier|Thor|Tegra)\b"
    # Not "Arc(TM) A770 Graphics", which is a card.
    r"|Intel\(R\) (?:UHD|HD|Iris)|Intel\(R\) Arc\(TM\)(?: \d{3}[A-Z])? (?:Graphics|GPU)"
    # Not "AMD Radeon Graphics" from ROCm, its name for cards if amdgpu.ids is missing.
    r"|Radeon(?:\(TM\))? (?:Vega \d+ |\d{3,4}[MS] )Graphics|Radeon(?:\(TM\))? Graphics \(RADV"
    r"|^Apple M\d|Adreno|Mali-|llvmpipe",
    re.IGNORECASE,
)


def _shares_host_memory(name: str, description: str, log: str) -> bool:
    """Decide by the backend's log, or else by the name."""
    if _METAL.fullmatch(name):
        # Only Macs with an Intel processor have cards; they log "has unified memory    = false".
        return re.search(r"has ?unified ?memory\s*= false", log, re.IGNORECASE) is None
    if numbered := _NUMBERED.fullmatch(name):
        backend, number = numbered.groups()
        if backend == "Vulkan" and (uma := re.search(_VULKAN_UMA.format(number), log, re.MULTILINE)):
            return uma[1] == "1"
        if backend == "ROCm" and (chip := re.search(_ROCM_CHIP.format(number), log, re.MULTILINE)):
            return chip[1] in _AMD_APUS
    return _INTEGRATED.search(description) is not None


def is_amd_card(properties: str) -> bool:
    """Return whether a node of the kernel's KFD topology is a discrete GPU.

    ROCm's gfx90c is ``gfx_target_version 90012`` there, and a processor 0. Ryzen laptops have /dev/kfd too,
    so it is not a fault if their CPU computes.
    """
    found = re.search(r"^gfx_target_version (\d{5,6})$", properties, re.MULTILINE)
    if found is None:
        return False
    major, rest = divmod(int(found[1]), 10_000)
    return f"gfx{major}{rest // 100:x}{rest % 100:x}" not in _AMD_APUS


_HIDING_VARIABLES = {
    "NVIDIA": ("CUDA_VISIBLE_DEVICES",),
    "AMD": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
}


def visible_gpus(drivers: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """Return the vendors whose GPUs no variable hides from llama-server, sorted."""
    return [
        vendor
        for vendor in sorted(drivers)
        if not any(environ.get(name) in ("", "-1") for name in _HIDING_VARIABLES[vendor])
    ]


# --- NVML ----------------------------------------------------------------------------------------

# CUDA's total is a little less than NVML's, which includes the driver's memory: 24080 of 24564 MiB.
_TOTALS_DIFFER_BY = 0.1


def with_nvml_memory(
    devices: Sequence[Device], gpus: Sequence[NvmlGpu], environ: Mapping[str, str]
) -> tuple[Device, ...] | None:
    """Return the devices with the free memory that NVML reports; None if devices and GPUs cannot be matched.

    NVML takes a few milliseconds and no GPU memory; ``--list-devices`` creates a CUDA context of some hundred
    MiB on each GPU. ``environ`` is the child's.
    """
    if not all(device.is_cuda for device in devices):
        return None
    order = _as_cuda_numbers_them(devices, gpus, environ)
    if order is None or len(order) != len(devices):
        return None
    fresh = tuple(map(_with_memory, devices, order))
    return None if None in fresh else tuple(device for device in fresh if device is not None)


def _with_memory(device: Device, gpu: NvmlGpu) -> Device | None:
    if device.description != gpu.name or gpu.total_bytes is None or gpu.free_bytes is None:
        return None
    if abs(device.total_bytes - gpu.total_bytes) > _TOTALS_DIFFER_BY * gpu.total_bytes:
        return None  # a slice of it (MIG), or another GPU of the same name
    return replace(device, free_bytes=min(gpu.free_bytes, device.total_bytes))


def _as_cuda_numbers_them(
    devices: Sequence[Device], gpus: Sequence[NvmlGpu], environ: Mapping[str, str]
) -> list[NvmlGpu] | None:
    """The GPUs in the order of CUDA0, CUDA1, …; None if it is unknown.

    By default CUDA's order is its own estimate of the speed, fastest first; equal GPUs are in bus order.
    """
    by_bus = sorted(gpus, key=lambda gpu: gpu.bus_id)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    entries = [] if visible is None else [entry.strip() for entry in visible.split(",")]
    if entries and all(entry.startswith("GPU-") for entry in entries):
        return list(_until_unknown(_by_uuid(by_bus, entry) for entry in entries))
    ordered = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    if ordered and all(re.fullmatch(r"-?\d+", entry) for entry in entries):
        numbered = dict(enumerate(by_bus))
        found = _until_unknown(numbered.get(int(entry)) for entry in entries)
        return by_bus if visible is None else list(found)
    return _by_name(devices, by_bus)


def _by_uuid(gpus: Sequence[NvmlGpu], prefix: str) -> NvmlGpu | None:
    matching = [gpu for gpu in gpus if gpu.uuid.startswith(prefix)]
    return matching[0] if len(matching) == 1 else None


def _until_unknown(found: Iterator[NvmlGpu | None]) -> Iterator[NvmlGpu]:
    """CUDA ignores the entries after one that names no GPU (``0,-1,1`` is 0)."""
    for gpu in found:
        if gpu is None:
            return
        yield gpu


def _by_name(devices: Sequence[Device], by_bus: Sequence[NvmlGpu]) -> list[NvmlGpu] | None:
    """Match by name, if there are equally many devices and GPUs of each name."""
    names = [device.description for device in devices]
    by_name = {name: [gpu for gpu in by_bus if gpu.name == name] for name in names}
    if any(names.count(name) != len(same) for name, same in by_name.items()):
        return None
    return [by_name[name].pop(0) for name in names]
