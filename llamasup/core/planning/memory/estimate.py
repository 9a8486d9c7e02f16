"""Estimates the memory of a plan on host and devices, and decides whether it fits.

Estimates are upper bounds until a load of this model was measured. Then they start from the measured sizes
(:mod:`llamasup.core.planning.measured.load_history`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.planning.memory.kv_cache import ContextShape, compute_bytes, kv_bytes_per_layer
from llamasup.core.system.text import memory_text

# What --fit leaves free on each device (--fit-target, b11434).
_DEVICE_MARGIN_BYTES = 1 << 30

Kind = Literal["weights", "kv", "compute", "runtime", "checkpoints", "prompt cache"]


class FreeMemory(Struct, frozen=True):
    """The memory that is available now without swapping."""

    host_bytes: int
    device_bytes: int = 0  # of all used devices with their own memory
    devices: int = 0
    known: bool = True  # False: the system does not report it
    # The user moved tensors (--n-cpu-moe and the like), so only the sum of host and device is known.
    user_placed: bool = False
    names: tuple[str, ...] = ()  # of all used devices, also those that share the host's memory
    driver_bytes: int = 0  # what a process takes on these devices before it allocates anything


class Load(Struct, frozen=True):
    """One model with its context."""

    model: ModelFacts
    shape: ContextShape
    gpu_layers: int | None = None  # None: as many as fit; the output counts as one, as in --gpu-layers


class Correction(Struct, frozen=True):
    """Corrections from earlier loads: factors on the estimates, and the process's own memory."""

    kv: float = 1.0
    compute: float = 1.0
    runtime_bytes: int = 0  # only raises the estimate, because not every page is resident at once
    measured: bool = False  # with this plan


ESTIMATED = Correction()


class Part(Struct, frozen=True):
    """One line of the memory table."""

    name: str
    kind: Kind
    host_bytes: int
    device_bytes: int = 0
    drafts: bool = False  # of the draft model or the model's own MTP layers

    @property
    def total_bytes(self) -> int:
        return self.host_bytes + self.device_bytes


class MemoryEstimate(Struct, frozen=True):
    parts: tuple[Part, ...]
    free: FreeMemory
    measured: bool = False  # corrected by the sizes of an earlier load
    gpu_layers: int | None = None  # on devices with their own memory; None without such devices

    def _of(self, kind: Kind) -> int:
        return sum(part.total_bytes for part in self.parts if part.kind == kind)

    @property
    def weights_bytes(self) -> int:
        """The weights of the model, its draft model and its projector."""
        return self._of("weights")

    @property
    def kv_bytes(self) -> int:
        return self._of("kv")

    @property
    def compute_bytes(self) -> int:
        return self._of("compute")

    @property
    def prompt_cache_bytes(self) -> int:
        return self._of("prompt cache")

    @property
    def host_bytes(self) -> int:
        return sum(part.host_bytes for part in self.parts)

    @property
    def device_bytes(self) -> int:
        return sum(part.device_bytes for part in self.parts)

    @property
    def total_bytes(self) -> int:
        return self.host_bytes + self.device_bytes

    @property
    def draft_bytes(self) -> int:
        """The memory of the draft."""
        return sum(part.total_bytes for part in self.parts if part.drafts)

    @property
    def context_bytes(self) -> int:
        """The memory that smaller settings reduce: KV caches, and the larger side of each compute buffer.

        Both sides together do not compare: some plans split layers between host and device, others do not.
        """
        compute = (part for part in self.parts if part.kind == "compute")
        return self.kv_bytes + sum(max(part.host_bytes, part.device_bytes) for part in compute)

    @property
    def available_bytes(self) -> int:
        return self.free.host_bytes + self.free.device_bytes

    @property
    def spare_host_bytes(self) -> int:
        taken = self.total_bytes if self.free.user_placed else self.host_bytes
        return max(0, self.free.host_bytes - taken)

    @property
    def fits(self) -> bool:
        """Whether the plan fits. It is true if the free memory is unknown."""
        return not self.free.known or not (self.lacks_host or self.lacks_device)

    @property
    def lacks_host(self) -> bool:
        if self.free.user_placed:
            return self.total_bytes > self.available_bytes
        return self.host_bytes > self.free.host_bytes

    @property
    def lacks_device(self) -> bool:
        return not self.free.user_placed and self.device_bytes > self.free.device_bytes

    @property
    def without_prompt_cache(self) -> MemoryEstimate:
        return replace(self, parts=tuple(part for part in self.parts if part.kind != "prompt cache"))

    def with_checkpoints(self, size_bytes: int) -> MemoryEstimate:
        if not size_bytes:
            return self
        return replace(self, parts=(*self.parts, Part("context checkpoints", "checkpoints", size_bytes)))

    def with_prompt_cache(self, size_bytes: int) -> MemoryEstimate:
        """Add a prompt cache of this size.

        A negative size is llama-server's "no limit", which is not counted.
        """
        if size_bytes <= 0:
            return self
        return replace(self, parts=(*self.parts, Part("prompt cache", "prompt cache", size_bytes)))


def memory_rows(memory: MemoryEstimate) -> tuple[tuple[str, str], ...]:
    """The memory table: every part, the sum, and the free memory."""
    split = memory.free.devices > 0
    rows = [(part.name, part.host_bytes, part.device_bytes) for part in memory.parts]
    rows.append(("needed", memory.host_bytes, memory.device_bytes))
    rows.append(("free", memory.free.host_bytes, memory.free.device_bytes))
    return tuple((name, _sum(host, device, split=split)) for name, host, device in rows)


def _sum(host_bytes: int, device_bytes: int, *, split: bool) -> str:
    if not split:
        return memory_text(host_bytes + device_bytes)
    return f"{memory_text(host_bytes)} host, {memory_text(device_bytes)} device"


def estimate(
    target: Load,
    free: FreeMemory,
    *,
    runtime_bytes: int,
    draft: Load | None = None,
    projector_bytes: int = 0,
    projector_on_device: bool = True,
    correction: Correction = ESTIMATED,
) -> MemoryEstimate:
    """Estimate the memory that ``target`` takes on host and devices, with its draft model and projector.

    ``runtime_bytes`` is the memory of the process without a model.
    """
    loads = [(target, False)] if draft is None else [(target, False), (draft, True)]
    parts: list[Part] = []
    if projector_bytes:
        on_device = projector_on_device and free.devices > 0
        sides = (0, projector_bytes) if on_device else (projector_bytes, 0)
        parts.append(Part("projector", "weights", *sides))
    on_devices: list[int] = []
    for load, drafts in loads:
        device_left = (
            free.device_bytes
            - free.driver_bytes
            - free.devices * _DEVICE_MARGIN_BYTES
            - sum(p.device_bytes for p in parts)
        )
        layers, more = _parts(load, device_left if free.devices else None, correction, drafts=drafts)
        parts += more
        on_devices.append(layers)
    own = max(runtime_bytes, correction.runtime_bytes)
    own_on_device = free.driver_bytes if any(part.device_bytes for part in parts) else 0
    parts.append(Part("llama-server itself", "runtime", own, own_on_device))
    gpu_layers = on_devices[0] if free.devices else None
    return MemoryEstimate(tuple(parts), free, correction.measured, gpu_layers)


def _parts(
    load: Load, device_left: int | None, correction: Correction, *, drafts: bool
) -> tuple[int, list[Part]]:
    """The layers on devices, and the parts of the memory. ``device_left`` None: only the host has memory."""
    model, kv = load.model, kv_bytes_per_layer(load.model, load.shape)
    kv = tuple(round(size * correction.kv) for size in kv)
    compute = round(compute_bytes(model, load.shape) * correction.compute)
    if device_left is None:
        layers = 0
    elif load.gpu_layers is None:
        layers = _most_layers(model, kv, compute, device_left)
    else:
        layers = min(load.gpu_layers, model.layers + 1)
    on_device = _on_device(model, kv, layers)
    # Split layers need compute buffers on both sides; without layers on the host, its own are small.
    compute_on_host = compute if layers <= model.layers else 0
    weights_on_host = max(0, model.weights_bytes - on_device.weights)
    prefix = "draft model: " if drafts else ""
    return layers, [
        Part(f"{prefix}weights", "weights", weights_on_host, on_device.weights + on_device.copied, drafts),
        Part(f"{prefix}KV cache", "kv", sum(kv) - on_device.kv, on_device.kv, drafts),
        Part(f"{prefix}compute buffers", "compute", compute_on_host, compute if layers else 0, drafts),
    ]


class _OnDevice(NamedTuple):
    weights: int
    copied: int  # weights that the host also holds
    kv: int


def _on_device(model: ModelFacts, kv: tuple[int, ...], layers: int) -> _OnDevice:
    """Bytes on the devices: the first of ``layers`` is the output, the others are the last blocks (b11434).

    Builds before December 2025 place the output last, which makes a difference of one layer.
    """
    if layers == 0:
        return _OnDevice(0, 0, 0)
    first = model.layers + 1 - layers
    weights = sum(model.layer_bytes[first:]) + model.output_bytes
    # A tied output is a second copy of the token embeddings; the first one stays on the host.
    return _OnDevice(weights, model.input_bytes if model.tied_output else 0, sum(kv[first:]))


def _most_layers(model: ModelFacts, kv: tuple[int, ...], compute: int, device_left: int) -> int:
    """Count the layers that the devices hold, as --fit chooses them."""
    for layers in range(model.layers + 1, 0, -1):
        if sum(_on_device(model, kv, layers)) + compute <= device_left:
            return layers
    return 0
