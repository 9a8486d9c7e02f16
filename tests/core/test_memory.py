"""The estimate and what it refuses."""

from __future__ import annotations

import pytest

from llamasup.core.context_memory import ContextShape, kv_bytes
from llamasup.core.errors import DoesNotFit
from llamasup.core.memory import estimate, refuse_misfit
from llamasup.core.model_facts import ModelFacts
from tests.core.planning import model
from tests.core.test_context_memory import GROUPED, NARROW


def test_the_estimate_adds_draft_and_projector_and_fits_only_if_all_of_it_does() -> None:
    shape = ContextShape(8192, 4, 512)
    alone = estimate(GROUPED, shape, available_bytes=1 << 40)
    both = estimate(GROUPED, shape, available_bytes=1 << 40, draft=(NARROW, shape), beside_bytes=100)
    assert both.weights_bytes == GROUPED.weights_bytes + NARROW.weights_bytes + 100
    assert both.kv_bytes == alone.kv_bytes + kv_bytes(NARROW, shape)
    assert both.total_bytes == both.weights_bytes + both.kv_bytes + both.compute_bytes
    assert estimate(GROUPED, shape, available_bytes=alone.total_bytes).fits
    assert not estimate(GROUPED, shape, available_bytes=alone.total_bytes - 1).fits


def test_what_exceeds_all_memory_is_refused_with_both_numbers_and_what_to_do() -> None:
    shape = ContextShape(1 << 24, 1, 512)  # 16 Mi tokens of 128 KiB
    memory = estimate(model(), shape, available_bytes=20 << 30, physical_bytes=32 << 30)
    with pytest.raises(DoesNotFit) as refused:
        refuse_misfit(memory)
    assert "needs at least 2053.0 GiB" in refused.value.message
    assert "has 32.0 GiB in all, 20.0 GiB of them free" in refused.value.message
    assert "--ctx-size" in refused.value.remedy
    assert refused.value.exit_code == 71


@pytest.mark.parametrize(
    "facts",
    [model(sliding_layers=(True,) * 32), model(mla=True, head_counts_kv=(2,) * 32)],
    ids=["sliding window", "MLA"],
)
def test_what_is_only_overestimated_is_not_refused(facts: ModelFacts) -> None:
    shape = ContextShape(1 << 20, 1, 512)
    memory = estimate(facts, shape, available_bytes=1 << 30, physical_bytes=22 << 30)
    assert not memory.fits
    assert memory.total_bytes > memory.physical_bytes
    refuse_misfit(memory)


def test_memory_that_is_not_known_refuses_nothing_and_what_is_not_free_now_may_be_soon() -> None:
    shape = ContextShape(8192, 1, 512)
    refuse_misfit(estimate(model(), shape, available_bytes=0))
    refuse_misfit(estimate(model(), shape, available_bytes=0, physical_bytes=7 << 30))
