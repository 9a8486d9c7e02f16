"""What a context takes: against the sizes that llama-server b11434 logged for the same shapes at -lv 4.

tests/extended/real/test_memory.py asks the server itself, for many architectures.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamasup.core.gguf.facts import Experts, Indexer, ModelClass, ModelFacts, RecurrentState
from llamasup.core.planning.memory.kv_cache import (
    ContextShape,
    compute_bytes,
    has_kv_cache,
    kv_bytes,
    kv_bytes_per_layer,
    mtp_kv_bytes,
)
from tests.core.planning.plans import bert, model

MIB = 1 << 20

# Random-weights llamas: the first is as wide as the demo model, the second has grouped queries.
NARROW = model(
    layers=2,
    embedding_length=64,
    feed_forward_lengths=(128, 128),
    head_counts=(2, 2),
    head_counts_kv=(2, 2),
    key_length=32,
    value_length=32,
    vocab_size=516,
)
GROUPED = model(
    layers=6,
    embedding_length=256,
    feed_forward_lengths=(512,) * 6,
    head_counts=(8,) * 6,
    head_counts_kv=(2,) * 6,
    key_length=32,
    value_length=32,
    vocab_size=516,
)


@pytest.mark.parametrize(
    ("facts", "shape", "logged_mib"),
    [
        (NARROW, ContextShape(8192, 4, 512, "q8_0", "q8_0"), 2.12),
        (GROUPED, ContextShape(8192, 4, 512, "q8_0", "q8_0"), 6.38),
        (GROUPED, ContextShape(8192, 4, 512, unified=True), 12.00),
        (GROUPED, ContextShape(32768, 4, 2048), 48.00),
        (GROUPED, ContextShape(100, 1, 512), 0.38),  # rounded up to 256 cells
        (GROUPED, ContextShape(1000, 3, 512), 2.25),  # to 512 cells for each slot
    ],
)
def test_the_kv_cache_has_the_size_that_llama_server_logs(
    facts: ModelFacts, shape: ContextShape, logged_mib: float
) -> None:
    assert kv_bytes(facts, shape) / MIB == pytest.approx(logged_mib, abs=0.01)


@pytest.mark.parametrize(
    ("facts", "shape", "logged_mib"),
    [
        (NARROW, ContextShape(8192, 4, 512), 3.14),
        (GROUPED, ContextShape(8192, 4, 512), 7.52),
        (GROUPED, ContextShape(8192, 4, 512, unified=True), 13.52),
        (GROUPED, ContextShape(32768, 4, 2048), 54.07),
        (GROUPED, ContextShape(8192, 4, 512, flash_attn=False), 39.26),
        (GROUPED, ContextShape(32768, 4, 512, flash_attn=False), 147.26),
    ],
)
def test_compute_buffers_are_bounded_from_above_and_not_by_much(
    facts: ModelFacts, shape: ContextShape, logged_mib: float
) -> None:
    estimated_mib = compute_bytes(facts, replace(shape, outputs_per_slot=1)) / MIB
    assert logged_mib <= estimated_mib <= 1.3 * logged_mib


def test_builds_before_outputs_were_bounded_hold_the_logits_of_every_token() -> None:
    """Llama 3 8B: a 2024 build logs 258.50 MiB for 512 tokens of 8192."""
    llama = model(layers=1)
    shape = ContextShape(8192, 1, 512)
    assert 258.50 <= compute_bytes(llama, shape) / MIB <= 1.3 * 258.50
    assert compute_bytes(llama, replace(shape, outputs_per_slot=1)) / MIB < 150


def test_tokens_drafted_ahead_need_room_for_their_logits() -> None:
    shape = ContextShape(8192, 4, 512, outputs_per_slot=1)
    wordy = replace(NARROW, vocab_size=100_000)
    more = compute_bytes(wordy, replace(shape, outputs_per_slot=17)) - compute_bytes(wordy, shape)
    assert more == pytest.approx(16 * 4 * 4 * wordy.vocab_size, rel=0.1)


def test_a_q8_0_cache_has_little_more_than_half_the_bytes_of_f16() -> None:
    half = kv_bytes(GROUPED, ContextShape(8192, 4, 512, "q8_0", "q8_0"))
    assert half / kv_bytes(GROUPED, ContextShape(8192, 4, 512)) == 34 / 64


def test_layers_without_kv_heads_cost_nothing() -> None:
    hybrid = model(layers=4, head_counts_kv=(8, 8, 0, 8), kv_layers=(False, True, False, True))
    full = model(layers=2, head_counts_kv=(8, 8))
    shape = ContextShape(4096, 1, 512)
    assert kv_bytes(hybrid, shape) == kv_bytes(full, shape) > 0


def test_each_slot_has_a_recurrent_state_for_any_context() -> None:
    state = RecurrentState(conv_elements=100, state_elements=400)
    mamba = model(
        architecture="mamba",
        layers=3,
        head_counts_kv=(0, 0, 0),
        recurrent=state,
        recurrent_layers=(True,) * 3,
    )
    assert not has_kv_cache(mamba)
    assert kv_bytes(mamba, ContextShape(4096, 2, 512)) == kv_bytes(mamba, ContextShape(512, 2, 512)) == 12000


def test_a_bert_keeps_no_cache_and_computes_over_its_own_input_only() -> None:
    assert not has_kv_cache(bert())
    assert kv_bytes(bert(), ContextShape(2048, 4, 512)) == 0
    one, four = ContextShape(512, 1, 512), ContextShape(2048, 4, 512)
    assert compute_bytes(bert(), one) == compute_bytes(bert(), four)


# --- sliding windows ------------------------------------------------------------------------------

SLIDING = model(
    layers=4,
    head_counts_kv=(1,) * 4,
    key_length=32,
    value_length=32,
    sliding_window=64,
    sliding_layers=(True, False, True, False),
)
CELL = 2 * 32 * 2  # bytes: one head's key and value of 32 f16


@pytest.mark.parametrize(
    ("shape", "sliding_cells"),
    [
        (ContextShape(8192, 1, 512), 768),  # 64 + 512, rounded up
        (ContextShape(8192, 4, 512), 4 * 768),
        (ContextShape(8192, 4, 512, unified=True), 768),  # 4 * 64 + 512
        (ContextShape(8192, 16, 512, unified=True), 1536),
        (ContextShape(512, 1, 512), 512),  # never more than a full layer has
        (ContextShape(8192, 2, 512, swa_full=True), 8192),
        (ContextShape(8192, 1, 64), 256),
    ],
)
def test_a_sliding_layer_keeps_its_window_and_one_micro_batch(
    shape: ContextShape, sliding_cells: int
) -> None:
    full_cells = shape.cells_per_stream * shape.streams
    per_layer = kv_bytes_per_layer(SLIDING, shape)
    assert per_layer == (sliding_cells * CELL, full_cells * CELL) * 2
    assert sum(per_layer) == kv_bytes(SLIDING, shape)


def test_heads_in_the_window_may_be_smaller_and_are_given_the_widest_ones_room_without_flash_attention() -> (
    None
):
    gemma4 = replace(SLIDING, key_length=64, value_length=64, key_length_swa=32, value_length_swa=32)
    shape = ContextShape(2048, 1, 512)
    assert kv_bytes_per_layer(gemma4, shape)[:2] == (768 * CELL, 2048 * 2 * CELL)
    transposed = replace(shape, flash_attn=False)
    assert kv_bytes_per_layer(gemma4, transposed)[:2] == (768 * 3 * CELL // 2, 2048 * 2 * CELL)


def test_sliding_layers_have_a_mask_of_their_own() -> None:
    shape = ContextShape(8192, 1, 512, outputs_per_slot=1)
    plain = replace(SLIDING, sliding_layers=(False,) * 4)
    assert compute_bytes(SLIDING, shape) - compute_bytes(plain, shape) == 512 * 768 * 2


# --- what else layers keep ------------------------------------------------------------------------


def test_latent_attention_caches_one_key_and_no_value() -> None:
    deepseek = replace(SLIDING, sliding_layers=(), key_length=96, value_length=64, mla=True)
    shape = ContextShape(2048, 1, 512)
    assert kv_bytes(deepseek, shape) == 4 * 2048 * 96 * 2
    assert kv_bytes(deepseek, replace(shape, mla_values=True)) == 4 * 2048 * (96 + 64) * 2


def test_an_indexer_caches_a_key_of_its_own_and_scores_every_cell() -> None:
    """DeepSeek V3.2; b11434 logs 50.66 MiB for a tiny one with 8192 cells."""
    plain = replace(SLIDING, sliding_layers=(), key_length=96, value_length=64, mla=True)
    indexed = replace(plain, indexer=Indexer(64, 2048))
    shape = ContextShape(8192, 1, 512, outputs_per_slot=1)
    assert kv_bytes(indexed, shape) - kv_bytes(plain, shape) == 4 * 8192 * 64 * 2
    assert compute_bytes(indexed, shape) - compute_bytes(plain, shape) == 512 * (12 * 8192 + 16 * 2048)


def test_a_layer_can_have_a_cache_and_a_recurrent_state_and_its_snapshots() -> None:
    state = RecurrentState(conv_elements=10, state_elements=90)
    falcon = replace(
        SLIDING,
        sliding_layers=(),
        kv_layers=(True, False, True, False),
        recurrent=state,
        recurrent_layers=(True, True, False, False),
    )
    shape = ContextShape(512, 2, 512)
    assert kv_bytes_per_layer(falcon, shape) == (512 * CELL + 800, 800, 512 * CELL, 0)
    assert kv_bytes_per_layer(falcon, replace(shape, rollback=3))[1] == 4 * 800


def test_layers_for_prediction_have_their_cache_in_a_context_of_their_own() -> None:
    glm = replace(SLIDING, sliding_layers=(), kv_layers=(True, True, True, False), mtp_layers=1)
    shape = ContextShape(2048, 2, 512)
    assert kv_bytes(glm, shape) == 3 * 2048 * CELL
    assert mtp_kv_bytes(glm, shape) == 2048 * CELL
    assert mtp_kv_bytes(SLIDING, shape) == 0


def test_unknown_cache_type_counts_as_f16() -> None:
    shape = ContextShape(2048, 1, 512)
    assert kv_bytes(GROUPED, replace(shape, k_type="q2_x")) == kv_bytes(GROUPED, shape)


# --- what the widest part of the graph is ---------------------------------------------------------


def test_the_experts_that_a_token_uses_decide_where_they_are_wider_than_the_rest() -> None:
    """Qwen3 30B A3B: 92.60 MiB logged."""
    qwen = model(
        layers=2,
        embedding_length=2048,
        feed_forward_lengths=(6144,) * 2,
        head_counts=(32,) * 2,
        head_counts_kv=(4,) * 2,
        vocab_size=151_936,
        experts=Experts(128, 8, 0, 768),
    )
    estimated_mib = compute_bytes(qwen, ContextShape(4096, 1, 512, outputs_per_slot=1)) / MIB
    assert 92.60 <= estimated_mib <= 1.1 * 92.60


def test_inputs_of_all_layers_are_made_at_once() -> None:
    """Gemma 3n: 47.41 MiB logged for a tiny one of 22 layers with inputs of 256."""
    gemma3n = replace(NARROW, layers=22, side_length=256)
    plain = replace(gemma3n, side_length=0)
    shape = ContextShape(2048, 1, 512, outputs_per_slot=1)
    more_mib = (compute_bytes(gemma3n, shape) - compute_bytes(plain, shape)) / MIB
    assert 45 <= more_mib <= 1.3 * 45


def test_recurrence_is_computed_per_token_and_reads_the_state_of_each_slot() -> None:
    """Mamba 2 2.7B: 79.42 MiB logged for one slot, 37.68 for four with 128 tokens."""
    convolved = 5120 + 2 * 128
    mamba = model(
        architecture="mamba2",
        layers=2,
        embedding_length=2560,
        feed_forward_lengths=(0, 0),
        head_counts=(0, 0),
        head_counts_kv=(0, 0),
        key_length=0,
        value_length=0,
        vocab_size=50_288,
        recurrent=RecurrentState(3 * convolved, 128 * 5120, 7 * convolved),
        recurrent_layers=(True, True),
    )
    one, four = ContextShape(4096, 1, 512, outputs_per_slot=1), ContextShape(4096, 4, 128, outputs_per_slot=1)
    assert 79.42 <= compute_bytes(mamba, one) / MIB <= 1.4 * 79.42
    assert 37.68 <= compute_bytes(mamba, four) / MIB <= 1.4 * 37.68


def test_encoder_decoder_always_counts_scores_and_bias() -> None:
    """The tiny T5: 82.89 MiB logged for 4096 tokens."""
    t5 = model(
        model_class=ModelClass.ENCODER_DECODER,
        architecture="t5",
        layers=2,
        context_length=8192,
        embedding_length=64,
        feed_forward_lengths=(96, 96),
        head_counts=(2, 2),
        head_counts_kv=(2, 2),
        key_length=32,
        value_length=32,
        vocab_size=365,
    )
    shape = ContextShape(4096, 1, 512, outputs_per_slot=1)
    assert 82.89 <= compute_bytes(t5, shape) / MIB <= 1.4 * 82.89
    assert compute_bytes(t5, replace(shape, flash_attn=False)) == compute_bytes(t5, shape)


def test_a_decoder_that_embeds_computes_the_logits_of_every_token() -> None:
    """A llama as wide as Llama 3.2 1B, with --embedding: 272.52 MiB and 0.99 of output logged."""
    embedder = model(
        model_class=ModelClass.ENCODER,
        layers=3,
        embedding_length=2048,
        feed_forward_lengths=(8192,) * 3,
        head_counts=(32,) * 3,
        head_counts_kv=(8,) * 3,
        key_length=64,
        value_length=64,
    )
    estimated_mib = compute_bytes(embedder, ContextShape(4096, 2, 512, outputs_per_slot=1)) / MIB
    assert 273.51 <= estimated_mib <= 1.1 * 273.51
