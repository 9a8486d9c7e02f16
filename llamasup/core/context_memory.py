"""What a context of one model takes: its KV cache, its recurrent states, the buffers it computes in.

The KV cache is exact for plain attention (checked against the sizes that llama-server logs at ``-lv 4``).
Everything else is an upper bound, so that "fits" is not promised lightly: sliding-window layers are counted
at full length, MLA as if V were cached too, and compute buffers as the largest of what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from llamasup.core.model_facts import ModelFacts

__all__ = ["CACHE_TYPES", "CacheType", "ContextShape", "compute_bytes", "has_kv_cache", "kv_bytes"]


@dataclass(frozen=True, slots=True)
class CacheType:
    """A ggml type that the KV cache can have: so many elements are stored in so many bytes."""

    block: int
    block_bytes: int


CACHE_TYPES = MappingProxyType(
    {  # ggml-common.h: block_q8_0 is a 2-byte scale and 32 bytes, and so on
        "f32": CacheType(1, 4),
        "f16": CacheType(1, 2),
        "bf16": CacheType(1, 2),
        "q8_0": CacheType(32, 34),
        "q5_1": CacheType(32, 24),
        "q5_0": CacheType(32, 22),
        "q4_1": CacheType(32, 20),
        "q4_0": CacheType(32, 18),
        "iq4_nl": CacheType(32, 18),
    }
)

_CELL_MULTIPLE = 256  # llama_context rounds the cells of every sequence up to this (-c 100 gives 256 [run])


@dataclass(frozen=True, slots=True)
class ContextShape:
    """What decides the size of a context. Lengths are tokens."""

    ctx_total: int  # as --ctx-size: over all slots
    parallel: int
    ubatch: int
    k_type: str = "f16"
    v_type: str = "f16"
    flash_attn: bool = True
    unified: bool = False  # one pool of cells that all slots share

    @property
    def streams(self) -> int:
        return 1 if self.unified else self.parallel

    @property
    def cells_per_stream(self) -> int:
        """1,000 tokens over 3 slots are 512 cells each [run]."""
        return _padded(_padded(self.ctx_total) // self.streams)


def has_kv_cache(model: ModelFacts) -> bool:
    """Whether any layer keeps keys and values."""
    return _kv_heads(model) > 0


def kv_bytes(model: ModelFacts, shape: ContextShape) -> int:
    """Keys and values of every layer and cell, and the recurrent state of every slot."""
    recurrent = 0
    if model.recurrent is not None:
        recurrent = model.recurrent.bytes_per_layer * sum(model.recurrent_layers) * shape.parallel
    cells = shape.cells_per_stream * shape.streams
    heads = _kv_heads(model)
    keys = _stored_bytes(heads * model.key_length, shape.k_type)
    values = _stored_bytes(heads * model.value_length, shape.v_type)
    return cells * (keys + values) + recurrent


def compute_bytes(model: ModelFacts, shape: ContextShape) -> int:
    """An upper bound on the buffers of one micro-batch.

    Attention mask: 2 bytes per token and cell with flash attention; 4 without it, and 4 more for each head's
    scores [run, b11434]. The layers' own values are below 16 widths of f32 (measured: 9 to 11). Builds before
    the number of outputs was bounded also hold the logits of every token in the micro-batch.
    """
    tokens = min(shape.ubatch, shape.ctx_total)
    cells = shape.cells_per_stream if has_kv_cache(model) else tokens
    mask = 2 if shape.flash_attn else 4 * (1 + max(model.head_counts, default=0))
    widest = max(
        16 * model.embedding_length,
        6 * model.embedding_length + 2 * max(model.feed_forward_lengths, default=0),
        2 * model.embedding_length + model.vocab_size,
    )
    return tokens * (cells * mask + widest * 4)


def _kv_heads(model: ModelFacts) -> int:
    """Heads over all layers with a cache of their own; where the reader does not say which, over all."""
    caches = model.kv_layers or (True,) * len(model.head_counts_kv)
    return sum(heads for heads, cached in zip(model.head_counts_kv, caches, strict=True) if cached)


def _stored_bytes(elements: int, cache_type: str) -> int:
    # A type newer than the table counts as f16, an upper bound for anything quantised.
    kind = CACHE_TYPES.get(cache_type, CACHE_TYPES["f16"])
    return -(-elements // kind.block) * kind.block_bytes


def _padded(tokens: int) -> int:
    return -(-tokens // _CELL_MULTIPLE) * _CELL_MULTIPLE
