"""The memory of a model's context: KV cache, recurrent states and compute buffers.

KV cache and recurrent states equal the sizes that llama-server logs at ``-lv 4``, to the byte; compute
buffers are an upper bound (tests/extended/real/test_memory.py, b11434, 24 architectures).
"""

from __future__ import annotations

from msgspec import Struct

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.gguf.tensor_types import KV_CACHE_TYPES

_EMBEDDING = (ModelClass.ENCODER, ModelClass.RERANKER)
_GRAPH_BYTES = 1 << 16  # of the smallest graphs, without their tensors (b11434)
# Of an indexer: score and masks per token and cell; bytes per chosen cell (b11434).
_SCORED_BYTES, _CHOSEN_BYTES = 12, 16
_CELL_MULTIPLE = 256  # llama_context rounds the cells of every sequence up to this (-c 100 gives 256 [run])


class ContextShape(Struct, frozen=True):
    """Everything that decides the size of a context. Lengths are tokens."""

    ctx_total: int  # as --ctx-size: over all slots
    parallel: int
    ubatch: int
    k_type: str = "f16"
    v_type: str = "f16"
    flash_attn: bool = True
    unified: bool = False  # all slots share one pool of cells
    swa_full: bool = False  # --swa-full, and builds without that option (before May 2025)
    mla_values: bool = False  # builds before January 2026 also cache V of MLA models
    rollback: int = 0  # extra snapshots of each recurrent state: --spec-draft-n-max with draft-mtp
    # Tokens of each slot whose logits fit into a micro-batch: 1, plus the drafted ones. None: all tokens, as
    # in builds before June 2026 (#23861).
    outputs_per_slot: int | None = None

    @property
    def streams(self) -> int:
        return 1 if self.unified else self.parallel

    @property
    def cells_per_stream(self) -> int:
        """The cells of each stream, rounded up: 1,000 tokens over 3 slots are 512 cells each [run]."""
        return _padded(_padded(self.ctx_total) // self.streams)

    def cells_in_window(self, window: int) -> int:
        """The cells of a sliding layer: the windows of the pool's sequences, and one micro-batch [run]."""
        if self.swa_full:
            return self.cells_per_stream
        sequences = self.parallel if self.unified else 1
        return _padded(min(self.cells_per_stream, window * sequences + self.ubatch))


class _Layer(Struct, frozen=True):
    """One layer's share of the context, in elements for each cell."""

    cached: bool  # has its own keys and values
    slides: bool
    recurs: bool
    keys: int
    values: int


def has_kv_cache(model: ModelFacts) -> bool:
    """Whether any layer stores keys and values."""
    return any(layer.cached for layer in _layers(model))


def kv_bytes(model: ModelFacts, shape: ContextShape) -> int:
    """Keys and values of every layer and cell, and the recurrent state of every slot."""
    return sum(kv_bytes_per_layer(model, shape))


def kv_bytes_per_layer(model: ModelFacts, shape: ContextShape) -> tuple[int, ...]:
    """The bytes of each layer: keys and values, a recurrent state for each slot, both, or nothing."""
    layers = _layers(model)
    state_bytes = model.recurrent.bytes_per_layer if model.recurrent else 0
    state_bytes *= shape.parallel * (1 + shape.rollback)
    widest = max((layer.values for layer in layers), default=0)
    return tuple(
        (_cache_bytes(model, shape, layer, widest) if layer.cached else 0)
        + (state_bytes if layer.recurs else 0)
        for layer in layers
    )


def checkpoint_bytes(model: ModelFacts, shape: ContextShape) -> int:
    """The most bytes of one context checkpoint of each slot: its recurrent state and its sliding window.

    If the model drafts with its MTP layers, the checkpoint includes their keys and values of all tokens, with
    the tokens' positions.
    """
    layers = _layers(model)
    states = sum(layer.recurs for layer in layers) * (
        model.recurrent.bytes_per_layer if model.recurrent else 0
    )
    window = 0 if shape.swa_full else model.sliding_window or 0
    windows = sum(
        _stored_bytes(layer.keys, shape.k_type) + _stored_bytes(layer.values, shape.v_type)
        for layer in layers
        if layer.cached and layer.slides and window
    )
    cells = min(shape.cells_per_stream, window)  # without those of the micro-batch [run]
    each = states + cells * windows
    drafted = mtp_kv_bytes(model, shape) * 5 // 4 if shape.rollback and each else 0
    return shape.parallel * each + drafted


def mtp_kv_bytes(model: ModelFacts, shape: ContextShape) -> int:
    """Keys and values of the layers for multi-token prediction, which have their own context (draft-mtp)."""
    layers = _layers(model)
    predicting = layers[len(layers) - model.mtp_layers :]
    return sum(_cache_bytes(model, shape, layer, widest=layer.values) for layer in predicting)


def compute_bytes(model: ModelFacts, shape: ContextShape) -> int:
    """An upper bound on the buffers of one micro-batch, the output buffer included.

    ggml reuses the memory of each part of the graph for the next one, so the widest part decides: attention,
    feed-forward, recurrence or output head. Masks and recurrent states stay allocated throughout. Widths were
    measured (b11434) on 24 small architectures and on 15 models of real width: the bound is 1.0 to 1.7 times
    the logged size (tests/extended/real/test_memory.py).
    """
    tokens = min(shape.ubatch, shape.ctx_total)
    mask_bytes, score_bytes = _attention_bytes(model, shape, tokens)
    logits = _logits(model)
    embedding = model.embedding_length
    queries = max(model.head_counts, default=0) * model.key_length
    forward = max(model.feed_forward_lengths, default=0)
    routed = model.experts.used * (3 * model.experts.feed_forward_length + embedding)
    part_bytes = max(
        tokens * (4 * (7 * embedding + 3 * queries) + score_bytes),
        tokens * 4 * (6 * embedding + max(3 * forward, routed)),
        tokens * 4 * (5 * embedding + (model.recurrent.work_elements if model.recurrent else 0)),
        4 * (tokens * 6 * embedding + _outputs(model, shape, tokens) * logits),
    )
    state_bytes = 2 * shape.parallel * model.recurrent.bytes_per_layer if model.recurrent else 0
    output_bytes = 4 * shape.parallel * logits
    side_bytes = 5 * 4 * tokens * model.side_length * model.layers  # for all layers at once, in five versions
    return part_bytes + tokens * mask_bytes + side_bytes + state_bytes + output_bytes + _GRAPH_BYTES


def _attention_bytes(model: ModelFacts, shape: ContextShape, tokens: int) -> tuple[int, int]:
    """The bytes of all masks for each token, and of one layer's scores (none with flash attention)."""
    layers = [layer for layer in _layers(model) if layer.cached]
    window = model.sliding_window if any(layer.slides for layer in layers) else None
    # Without a KV cache, attention covers the micro-batch, and recurrence needs no cells.
    cells = shape.cells_per_stream if layers else 0 if model.recurrent else tokens
    masked = cells + (shape.cells_in_window(window) if window else 0)  # sliding layers have their own mask
    heads = max(model.head_counts, default=0)
    if model.model_class is ModelClass.ENCODER_DECODER:
        # T5 adds a bias by distance for each head, which excludes flash attention, and attends to an encoder
        # output of the greatest length.
        crossed = model.context_length
        return 8 * masked + 4 * crossed, max(4 * (1 + 3 * heads) * cells, 4 * heads * crossed)
    indexed = 0
    if model.indexer.key_length:
        indexed = _SCORED_BYTES * cells + _CHOSEN_BYTES * min(cells, model.indexer.top_k)
    if shape.flash_attn:
        # Builds before #23861 make the mask in f32 and copy it to f16.
        return masked * (6 if shape.outputs_per_slot is None else 2) + indexed, 0
    return 4 * masked + indexed, 4 * heads * cells


def _outputs(model: ModelFacts, shape: ContextShape, tokens: int) -> int:
    """Tokens of a micro-batch whose logits fit into the output buffer; all of them in an embedding server."""
    if shape.outputs_per_slot is None or _embeds(model):
        return tokens
    return min(tokens, shape.parallel * shape.outputs_per_slot)


def _logits(model: ModelFacts) -> int:
    """The logits of one token; a BERT has no output head."""
    return 0 if _embeds(model) and not has_kv_cache(model) else model.vocab_size


def _embeds(model: ModelFacts) -> bool:
    return model.model_class in _EMBEDDING or model.embeds_decisions


def _layers(model: ModelFacts) -> tuple[_Layer, ...]:
    """The layers; all have a full KV cache if the header does not describe them."""
    count = len(model.head_counts_kv)
    cached = model.kv_layers or tuple(heads > 0 for heads in model.head_counts_kv)
    slides = model.sliding_layers or (False,) * count
    recurs = model.recurrent_layers or (False,) * count
    return tuple(
        _Layer(
            cached=cached[index] and heads > 0,
            slides=slides[index],
            recurs=recurs[index],
            keys=heads * ((slides[index] and model.key_length_swa) or model.key_length),
            values=heads * ((slides[index] and model.value_length_swa) or model.value_length),
        )
        for index, heads in enumerate(model.head_counts_kv)
    )


def _cache_bytes(model: ModelFacts, shape: ContextShape, layer: _Layer, widest: int) -> int:
    cells = shape.cells_per_stream
    if layer.slides and model.sliding_window:
        cells = shape.cells_in_window(model.sliding_window)
    # Without flash attention V is stored transposed, and every layer takes as much as the widest one [run].
    values = layer.values if shape.flash_attn else widest
    if model.mla and not shape.mla_values:
        values = 0
    stored = _stored_bytes(layer.keys, shape.k_type) + _stored_bytes(values, shape.v_type)
    return cells * shape.streams * (stored + _stored_bytes(model.indexer.key_length, shape.k_type))


def _stored_bytes(elements: int, cache_type: str) -> int:
    # A type newer than the table counts as f16, an upper bound for anything quantised.
    kind = KV_CACHE_TYPES.get(cache_type, KV_CACHE_TYPES["f16"])
    return -(-elements // kind.block_elements) * kind.block_bytes


def _padded(tokens: int) -> int:
    return -(-tokens // _CELL_MULTIPLE) * _CELL_MULTIPLE
