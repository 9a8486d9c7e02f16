"""What a model takes: against the sizes that llama-server b11434 logged for the same shapes at -lv 4."""

from __future__ import annotations

import pytest

from llamasup.core.context_memory import ContextShape, compute_bytes, has_kv_cache, kv_bytes
from llamasup.core.model_facts import RecurrentState
from tests.core.planning import bert, model

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
    facts: object, shape: ContextShape, logged_mib: float
) -> None:
    assert kv_bytes(facts, shape) / MIB == pytest.approx(logged_mib, abs=0.01)  # type: ignore[arg-type]


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
    facts: object, shape: ContextShape, logged_mib: float
) -> None:
    estimated_mib = compute_bytes(facts, shape) / MIB  # type: ignore[arg-type]
    assert logged_mib <= estimated_mib <= 1.6 * logged_mib


def test_a_q8_0_cache_has_little_more_than_half_the_bytes_of_f16() -> None:
    half = kv_bytes(GROUPED, ContextShape(8192, 4, 512, "q8_0", "q8_0"))
    assert half / kv_bytes(GROUPED, ContextShape(8192, 4, 512)) == 34 / 64


def test_layers_without_kv_heads_cost_nothing() -> None:
    hybrid = model(layers=4, head_counts_kv=(8, 8, 0, 8), kv_layers=(False, True, False, True))
    full = model(layers=2, head_counts_kv=(8, 8))
    shape = ContextShape(4096, 1, 512)
    assert kv_bytes(hybrid, shape) == kv_bytes(full, shape) > 0


def test_recurrent_state_is_kept_for_each_slot_whatever_the_context() -> None:
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
