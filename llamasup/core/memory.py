"""How much memory a model will take as planned, and whether there is that much."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llamasup.core.context_memory import ContextShape, compute_bytes, kv_bytes
from llamasup.core.errors import DoesNotFit
from llamasup.core.model_facts import ModelFacts

__all__ = ["MemoryEstimate", "estimate", "refuse_misfit"]


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes, over all devices together."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    available_bytes: int
    least_bytes: int = 0  # what it takes even where all of the above are overestimated
    physical_bytes: int = 0  # all memory of host and devices, whoever has it now; 0 where it is not known

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes


def estimate(
    model: ModelFacts,
    shape: ContextShape,
    *,
    available_bytes: int,
    physical_bytes: int = 0,
    draft: tuple[ModelFacts, ContextShape] | None = None,
    beside_bytes: int = 0,
) -> MemoryEstimate:
    """What loading ``model`` in this ``shape`` takes, with its draft model and what is loaded beside it."""
    loads = ((model, shape),) if draft is None else ((model, shape), draft)
    weights_bytes = sum(facts.weights_bytes for facts, _ in loads) + beside_bytes
    return MemoryEstimate(
        weights_bytes=weights_bytes,
        kv_bytes=sum(kv_bytes(facts, each) for facts, each in loads),
        compute_bytes=sum(compute_bytes(facts, each) for facts, each in loads),
        available_bytes=available_bytes,
        least_bytes=weights_bytes + sum(_least_kv_bytes(facts, each) for facts, each in loads),
        physical_bytes=physical_bytes,
    )


def refuse_misfit(memory: MemoryEstimate) -> None:
    """Raise DoesNotFit for what no amount of freeing memory could make fit.

    It would be loaded for minutes and then be killed. What merely is not free now may be by then.
    """
    if 0 < memory.physical_bytes < memory.least_bytes:
        raise DoesNotFit(
            f"the model needs at least {_gib(memory.least_bytes)} of memory ({_gib(memory.weights_bytes)} of "
            f"it for the weights), and this machine has {_gib(memory.physical_bytes)} in all, "
            f"{_gib(memory.available_bytes)} of them free",
            remedy="use a smaller --ctx-size, fewer --parallel slots or a smaller quantization",
        )


def _least_kv_bytes(model: ModelFacts, shape: ContextShape) -> int:
    """Without what builds may save: sliding-window layers (counted as nothing) and V of MLA."""
    sliding = model.sliding_layers or (False,) * len(model.head_counts_kv)
    heads = tuple(0 if slides else count for count, slides in zip(model.head_counts_kv, sliding, strict=True))
    value_length = 0 if model.mla else model.value_length
    return kv_bytes(replace(model, head_counts_kv=heads, value_length=value_length), shape)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
