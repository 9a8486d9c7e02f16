"""How much memory a plan takes, where, and whether there is that much.

Upper bounds, so that "fits" is not promised lightly, until a load of this model was measured: from then on
the estimate starts from what it really took (:mod:`llamasup.planning.load_history`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from llamasup.gguf.facts import ModelFacts
from llamasup.planning.memory.context import ContextShape, compute_bytes, kv_bytes_per_layer

__all__ = ["ESTIMATED", "Correction", "Load", "MemoryEstimate", "Part", "Room", "estimate"]

# What --fit leaves free on each device (--fit-target, b11434).
_DEVICE_MARGIN_BYTES = 1 << 30

Kind = Literal["weights", "kv", "compute", "runtime", "prompt cache"]


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that can be had now, without swapping."""

    host_bytes: int
    device_bytes: int = 0  # over all devices that will be used and have memory of their own
    devices: int = 0
    known: bool = True  # False: the system does not tell
    # Which side takes what was said tensor by tensor (--n-cpu-moe and the like): only the sum is known.
    placed_by_hand: bool = False
    names: tuple[str, ...] = ()  # of all devices that will be used, also those that share the host's memory


@dataclass(frozen=True, slots=True)
class Load:
    """One model with its context."""

    model: ModelFacts
    shape: ContextShape
    gpu_layers: int | None = None  # None: as many as fit; as --gpu-layers counts, the output is one of them


@dataclass(frozen=True, slots=True)
class Correction:
    """What earlier loads taught: factors on our estimates, and what the process takes by itself."""

    kv: float = 1.0
    compute: float = 1.0
    runtime_bytes: int = 0  # raises what is assumed, never lowers it: not every page is resident at once
    measured: bool = False  # this very plan


ESTIMATED = Correction()


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the memory table."""

    name: str
    kind: Kind
    host_bytes: int
    device_bytes: int = 0
    drafts: bool = False  # of the draft model, or of what drafts in the model's own file

    @property
    def total_bytes(self) -> int:
        return self.host_bytes + self.device_bytes


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    parts: tuple[Part, ...]
    room: Room
    measured: bool = False  # corrected by what an earlier load took
    gpu_layers: int | None = None  # that go to devices with memory of their own; None where there are none

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
    def draft_bytes(self) -> int:
        """All that drafting takes."""
        return sum(part.total_bytes for part in self.parts if part.drafts)

    @property
    def context_bytes(self) -> int:
        """What smaller settings make smaller: KV caches, and the larger side of each compute buffer.

        Not both sides: whether layers are split between host and device changes from plan to plan.
        """
        compute = (part for part in self.parts if part.kind == "compute")
        return self.kv_bytes + sum(max(part.host_bytes, part.device_bytes) for part in compute)

    @property
    def available_bytes(self) -> int:
        return self.room.host_bytes + self.room.device_bytes

    @property
    def spare_host_bytes(self) -> int:
        taken = self.total_bytes if self.room.placed_by_hand else self.host_bytes
        return max(0, self.room.host_bytes - taken)

    @property
    def fits(self) -> bool:
        """Memory that is not known refuses nothing."""
        return not self.room.known or not (self.lacks_host or self.lacks_device)

    @property
    def lacks_host(self) -> bool:
        if self.room.placed_by_hand:
            return self.total_bytes > self.available_bytes
        return self.host_bytes > self.room.host_bytes

    @property
    def lacks_device(self) -> bool:
        return not self.room.placed_by_hand and self.device_bytes > self.room.device_bytes

    @property
    def without_prompt_cache(self) -> MemoryEstimate:
        return replace(self, parts=tuple(part for part in self.parts if part.kind != "prompt cache"))

    def with_prompt_cache(self, size_bytes: int) -> MemoryEstimate:
        """Below 0 is llama-server's "no limit", which is the user's own choice: nothing to reckon with."""
        if size_bytes <= 0:
            return self
        return replace(self, parts=(*self.parts, Part("prompt cache", "prompt cache", size_bytes)))


def estimate(
    target: Load,
    room: Room,
    *,
    runtime_bytes: int,
    draft: Load | None = None,
    projector_bytes: int = 0,
    projector_on_device: bool = True,
    correction: Correction = ESTIMATED,
) -> MemoryEstimate:
    """What loading ``target`` takes, with its draft model and projector, and where it will be.

    ``runtime_bytes`` is what the process takes without any model.
    """
    loads = [(target, False)] if draft is None else [(target, False), (draft, True)]
    parts: list[Part] = []
    if projector_bytes:
        on_device = projector_on_device and room.devices > 0
        place = (0, projector_bytes) if on_device else (projector_bytes, 0)
        parts.append(Part("projector", "weights", *place))
    on_devices: list[int] = []
    for load, drafts in loads:
        left = room.device_bytes - room.devices * _DEVICE_MARGIN_BYTES - sum(p.device_bytes for p in parts)
        layers, more = _parts(load, left if room.devices else None, correction, drafts=drafts)
        parts += more
        on_devices.append(layers)
    own = max(runtime_bytes, correction.runtime_bytes)
    parts.append(Part("llama-server itself", "runtime", own))
    gpu_layers = on_devices[0] if room.devices else None
    return MemoryEstimate(tuple(parts), room, correction.measured, gpu_layers)


def _parts(
    load: Load, device_left: int | None, correction: Correction, *, drafts: bool
) -> tuple[int, list[Part]]:
    """Layers on the devices, and what goes where. ``device_left`` None: all memory is the host's."""
    model, kv = load.model, kv_bytes_per_layer(load.model, load.shape)
    kv = tuple(round(size * correction.kv) for size in kv)
    compute = round(compute_bytes(model, load.shape) * correction.compute)
    if device_left is None:
        layers = 0
    elif load.gpu_layers is None:
        layers = _most_layers(model, kv, compute, device_left)
    else:
        layers = min(load.gpu_layers, model.layers + 1)
    there = _on_device(model, kv, layers)
    # Layers on both sides compute on both; the host's own part is small once all layers are on the device.
    compute_here = compute if layers <= model.layers else 0
    weights_here = max(0, model.weights_bytes - there.weights)
    prefix = "draft model: " if drafts else ""
    return layers, [
        Part(f"{prefix}weights", "weights", weights_here, there.weights + there.copied, drafts),
        Part(f"{prefix}KV cache", "kv", sum(kv) - there.kv, there.kv, drafts),
        Part(f"{prefix}compute buffers", "compute", compute_here, compute if layers else 0, drafts),
    ]


class _OnDevice(NamedTuple):
    weights: int
    copied: int  # weights that the host keeps as well
    kv: int


def _on_device(model: ModelFacts, kv: tuple[int, ...], layers: int) -> _OnDevice:
    """Bytes on the devices: the first of ``layers`` is the output, the others the last blocks (b11434).

    Builds before December 2025 take the output last; that makes a difference of one layer.
    """
    if layers == 0:
        return _OnDevice(0, 0, 0)
    first = model.layers + 1 - layers
    weights = sum(model.layer_bytes[first:]) + model.output_bytes
    # A tied output is a second copy of the token embeddings, which themselves stay on the host.
    return _OnDevice(weights, model.input_bytes if model.tied_output else 0, sum(kv[first:]))


def _most_layers(model: ModelFacts, kv: tuple[int, ...], compute: int, device_left: int) -> int:
    """As --fit does it: as many layers as the devices hold."""
    for layers in range(model.layers + 1, 0, -1):
        if sum(_on_device(model, kv, layers)) + compute <= device_left:
            return layers
    return 0
