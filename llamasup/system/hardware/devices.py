"""Compute devices: what a llama-server lists, whose memory it is, and what NVML says is free of it.

``--list-devices`` prints name, description, total and free memory, and the backends log more about them while
it does. Pure: the texts and NVML's answers are collected by :mod:`llamasup.effects`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

__all__ = ["Device", "NvmlGpu", "is_amd_card", "parse_devices", "problem_in", "with_nvml_memory"]


@dataclass(frozen=True, slots=True)
class Device:
    """A compute device as the binary sees it; ``free_bytes`` is what was free when it was asked."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int
    shares_host_memory: bool = False  # its memory is the host's: not to be counted a second time

    @property
    def is_cuda(self) -> bool:
        return _CUDA.fullmatch(self.name) is not None


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """A GPU as the NVIDIA driver knows it. No memory: it has none of its own (GB10, Jetson)."""

    uuid: str  # "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    bus_id: str  # "00000000:01:00.0": PCI_BUS_ID order is that of these
    name: str  # as CUDA says it, "NVIDIA GeForce RTX 4090"
    total_bytes: int | None
    free_bytes: int | None


def parse_devices(listed: str, log: str = "") -> tuple[Device, ...]:
    """The devices of ``--list-devices`` that have memory; none for a build that finds no accelerator.

    ``log`` is what the backends said meanwhile (stderr). A device without memory, "BLAS: Accelerate (0 MiB,
    0 MiB free)", only computes: no layer is ever put on it.
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


_TROUBLE = re.compile(r"fail|error|cannot|could not|unable|denied|insufficient|not supported", re.IGNORECASE)
_LOG_PREFIX = re.compile(r"^[\d.]+ [DIWE] ")  # "0.00.012.345 E ", of builds since 2026
_LONGEST_PROBLEM = 200


def problem_in(log: str) -> str:
    """The last line in which a backend says why there is no device, empty if none does.

    "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected", or a library that
    ``load_backend`` could not load. What is said last is what it ended with.
    """
    told = [line for line in log.splitlines() if _TROUBLE.search(line)]
    return _LOG_PREFIX.sub("", told[-1].strip())[:_LONGEST_PROBLEM] if told else ""


# --- whose memory it is --------------------------------------------------------------------------

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
    # Not "AMD Radeon Graphics" from ROCm, which calls cards so where amdgpu.ids is missing.
    r"|Radeon(?:\(TM\))? (?:Vega \d+ |\d{3,4}[MS] )Graphics|Radeon(?:\(TM\))? Graphics \(RADV"
    r"|^Apple M\d|Adreno|Mali-|llvmpipe",
    re.IGNORECASE,
)


def _shares_host_memory(name: str, description: str, log: str) -> bool:
    """What the backend logged, or else what the name says."""
    if _METAL.fullmatch(name):
        # Only Macs with an Intel processor have cards; those say "has unified memory    = false".
        return re.search(r"has ?unified ?memory\s*= false", log, re.IGNORECASE) is None
    if numbered := _NUMBERED.fullmatch(name):
        backend, number = numbered.groups()
        if backend == "Vulkan" and (told := re.search(_VULKAN_UMA.format(number), log, re.MULTILINE)):
            return told[1] == "1"
        if backend == "ROCm" and (chip := re.search(_ROCM_CHIP.format(number), log, re.MULTILINE)):
            return chip[1] in _AMD_APUS
    return _INTEGRATED.search(description) is not None


def is_amd_card(properties: str) -> bool:
    """Whether a node of the kernel's KFD topology is a GPU that is no part of a processor.

    It numbers what ROCm calls gfx90c as ``gfx_target_version 90012``, and processors as 0. Ryzen laptops have
    /dev/kfd, too: that the CPU computes there is usual, and no fault.
    """
    found = re.search(r"^gfx_target_version (\d{5,6})$", properties, re.MULTILINE)
    if found is None:
        return False
    major, rest = divmod(int(found[1]), 10_000)
    return f"gfx{major}{rest // 100:x}{rest % 100:x}" not in _AMD_APUS


# --- NVML ----------------------------------------------------------------------------------------

# CUDA's total is a little less than NVML's, which counts what the driver keeps: 24080 of 24564 MiB.
_TOTALS_DIFFER_BY = 0.1


def with_nvml_memory(
    devices: Sequence[Device], gpus: Sequence[NvmlGpu], environ: Mapping[str, str]
) -> tuple[Device, ...] | None:
    """The devices with what NVML says is free now; None where it cannot be told which GPU is which.

    NVML takes a few milliseconds and no GPU memory; ``--list-devices`` makes a CUDA context of some hundred
    MiB on each GPU. ``environ`` is the one that the child gets.
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
        return None  # a slice of it (MIG), or another one of the name
    return replace(device, free_bytes=min(gpu.free_bytes, device.total_bytes))


def _as_cuda_numbers_them(
    devices: Sequence[Device], gpus: Sequence[NvmlGpu], environ: Mapping[str, str]
) -> list[NvmlGpu] | None:
    """The GPUs as CUDA0, CUDA1, …; None if that cannot be known.

    By default CUDA puts the fastest first, by a rule of its own; equal ones are in the order of the bus.
    """
    by_bus = sorted(gpus, key=lambda gpu: gpu.bus_id)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    words = [] if visible is None else [word.strip() for word in visible.split(",")]
    if words and all(word.startswith("GPU-") for word in words):
        return list(_until_unknown(_by_uuid(by_bus, word) for word in words))
    ordered = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    if ordered and all(re.fullmatch(r"-?\d+", word) for word in words):
        return by_bus if visible is None else list(_until_unknown(_by_number(by_bus, word) for word in words))
    return _by_name(devices, by_bus)


def _by_uuid(gpus: Sequence[NvmlGpu], prefix: str) -> NvmlGpu | None:
    matching = [gpu for gpu in gpus if gpu.uuid.startswith(prefix)]
    return matching[0] if len(matching) == 1 else None


def _by_number(gpus: Sequence[NvmlGpu], word: str) -> NvmlGpu | None:
    return gpus[int(word)] if 0 <= int(word) < len(gpus) else None


def _until_unknown(found: Iterator[NvmlGpu | None]) -> Iterator[NvmlGpu]:
    """CUDA hides what comes after an entry that names no GPU (``0,-1,1`` is 0)."""
    for gpu in found:
        if gpu is None:
            return
        yield gpu


def _by_name(devices: Sequence[Device], by_bus: Sequence[NvmlGpu]) -> list[NvmlGpu] | None:
    """Each device with the GPU of its name, where there are as many of that name on both sides."""
    left = {
        device.description: [gpu for gpu in by_bus if gpu.name == device.description] for device in devices
    }
    names = [device.description for device in devices]
    if any(names.count(name) != len(same) for name, same in left.items()):
        return None
    return [left[name].pop(0) for name in names]
