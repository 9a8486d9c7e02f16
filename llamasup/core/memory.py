"""How much memory a plan takes, where, and whether there is that much.

Upper bounds, so that "fits" is not promised lightly, until a load of this model was measured: from then on
the estimate starts from what it really took (:mod:`llamasup.core.experience`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from llamasup.core.context_memory import ContextShape, compute_bytes, kv_bytes_per_layer
from llamasup.core.model_facts import ModelFacts

__all__ = ["ESTIMATED", "Correction", "Load", "MemoryEstimate", "Part", "Room", "estimate"]

# What --fit leaves free on each device (--fit-target, b11434).
_DEVICE_MARGIN_BYTES = 1 << 30

Kind = Literal["weights", "kv", "compute", "runtime", "prompt cache"]


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that can be had now, without swapping."""

    host_bytes: int
    device_bytes: int = 0  # over all devices that will be used
    devices: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """One model with its context."""

    model: ModelFacts
    shape: ContextShape
    gpu_layers: int | None = None  # None: as many as fit


@dataclass(frozen=True, slots=True)
class Correction:
    """What earlier loads taught: factors on our estimates, and what the process takes by itself."""

    kv: float = 1.0
    compute: float = 1.0
    runtime_bytes: int | None = None
    measured: bool = False


ESTIMATED = Correction()


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the memory table."""

    name: str
    kind: Kind
    host_bytes: int
    device_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.host_bytes + self.device_bytes


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    parts: tuple[Part, ...]
    room: Room
    measured: bool = False  # corrected by what an earlier load took

    def _of(self, kind: Kind) -> int:
        return sum(part.total_bytes for part in self.parts if part.kind == kind)

    @property
    def weights_bytes(self) -> int:
        """Of the model, its draft model and its projector."""
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
    def available_bytes(self) -> int:
        return self.room.host_bytes + self.room.device_bytes

    @property
    def spare_host_bytes(self) -> int:
        return max(0, self.room.host_bytes - self.host_bytes)

    @property
    def fits(self) -> bool:
        """Memory that is not known (0 bytes in all) refuses nothing."""
        if self.available_bytes == 0:
            return True
        return self.host_bytes <= self.room.host_bytes and self.device_bytes <= self.room.device_bytes

    def with_prompt_cache(self, size_bytes: int) -> MemoryEstimate:
        if size_bytes == 0:
            return self
        return replace(self, parts=(*self.parts, Part("prompt cache", "prompt cache", size_bytes)))


def estimate(
    target: Load,
    room: Room,
    *,
    runtime_bytes: int,
    draft: Load | None = None,
    projector_bytes: int = 0,
    correction: Correction = ESTIMATED,
) -> MemoryEstimate:
    """What loading ``target`` takes, with its draft model and projector, and where it will be.

    ``runtime_bytes`` is what the process takes without any model.
    """
    loads = [("", target)] if draft is None else [("", target), ("draft model: ", draft)]
    parts: list[Part] = []
    if projector_bytes:
        on_device = room.devices > 0 and target.gpu_layers != 0
        place = (0, projector_bytes) if on_device else (projector_bytes, 0)
        parts.append(Part("projector", "weights", *place))
    for prefix, load in loads:
        left = room.device_bytes - room.devices * _DEVICE_MARGIN_BYTES - sum(p.device_bytes for p in parts)
        parts += _parts(prefix, load, left if room.devices else 0, correction)
    own = runtime_bytes if correction.runtime_bytes is None else correction.runtime_bytes
    parts.append(Part("llama-server itself", "runtime", own))
    return MemoryEstimate(tuple(parts), room, correction.measured)


def _parts(prefix: str, load: Load, device_left: int, correction: Correction) -> list[Part]:
    model, kv = load.model, kv_bytes_per_layer(load.model, load.shape)
    kv = tuple(round(size * correction.kv) for size in kv)
    compute = round(compute_bytes(model, load.shape) * correction.compute)
    layers = load.gpu_layers
    if layers is None:
        layers = _most_layers(model, kv, compute, device_left)
    weights_there, kv_there = _on_device(model, kv, layers)
    # Layers on both sides compute on both; the host's own part is small once all layers are on the device.
    compute_here = compute if layers <= model.layers else 0
    return [
        Part(f"{prefix}weights", "weights", model.weights_bytes - weights_there, weights_there),
        Part(f"{prefix}KV cache", "kv", sum(kv) - kv_there, kv_there),
        Part(f"{prefix}compute buffers", "compute", compute_here, compute if layers else 0),
    ]


def _on_device(model: ModelFacts, kv: tuple[int, ...], layers: int) -> tuple[int, int]:
    """Bytes of weights and KV cache of the last ``layers`` layers; one more is the output."""
    first = max(0, model.layers - layers)
    weights = sum(model.layer_bytes[first:]) if layers else 0
    if layers > model.layers:
        # A tied output is a second copy of the token embeddings, on the device.
        weights += model.output_bytes + (model.input_bytes if model.tied_output else 0)
    return min(weights, model.weights_bytes), sum(kv[first:]) if layers else 0


def _most_layers(model: ModelFacts, kv: tuple[int, ...], compute: int, device_left: int) -> int:
    """As --fit does it: as many layers as the devices hold."""
    for layers in range(model.layers + 1, 0, -1):
        if sum(_on_device(model, kv, layers)) + compute <= device_left:
            return layers
    return 0
