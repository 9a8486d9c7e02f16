"""The context checkpoints of a plan: enough that turns are cheap, within the memory that is left."""

from __future__ import annotations

from typing import Any

import pytest

from llamasup.core.gguf.facts import ModelFacts, RecurrentState
from llamasup.core.planning.measured.tuned import defaults_key
from llamasup.core.planning.memory.kv_cache import ContextShape, checkpoint_bytes, mtp_kv_bytes
from llamasup.core.planning.plan import LaunchPlan
from tests.core.planning.plans import (
    GIB,
    JULY,
    MIDDLE,
    NEW,
    OLD,
    bert,
    machine,
    model,
    planned,
    reason,
    value,
)

MIB = 1 << 20


def hybrid(state_mib: float, **changes: Any) -> ModelFacts:
    """24 of 32 layers have a recurrent state, ``state_mib`` in all."""
    recurs = (True, True, True, False) * 8
    elements = round(state_mib * MIB / 4 / 24)
    return model(
        recurrent=RecurrentState(conv_elements=0, state_elements=elements),
        recurrent_layers=recurs,
        kv_layers=tuple(not each for each in recurs),
        **changes,
    )


# unslothai/unsloth#11073: Qwen3.8-27B, 149.6 MiB each
QWEN = hybrid(149.6, weights_bytes=16 * GIB)
# unslothai/unsloth#8988: Qwen3.5-4B, 50 MiB each
SMALL = hybrid(50, weights_bytes=3 * GIB)
# ggml-org/llama.cpp#21690, with the window of Gemma 3 27B: 52 of 62 layers, 16 heads of 128, 1,024 tokens
GEMMA = model(
    layers=62,
    head_counts=(32,) * 62,
    head_counts_kv=(16,) * 62,
    feed_forward_lengths=(21504,) * 62,
    sliding_window=1024,
    sliding_layers=((True,) * 5 + (False,)) * 10 + (True, True),
    weights_bytes=15 * GIB,
)


def kept(made: LaunchPlan) -> int:
    return sum(part.host_bytes for part in made.memory.parts if part.kind == "checkpoints")


@pytest.mark.parametrize(
    ("facts", "size_mib"),
    [(QWEN, 149.6), (SMALL, 50), (GEMMA, 416), (model(), 0)],
    ids=["qwen", "small", "gemma", "llama"],
)
def test_a_checkpoint_is_the_state_or_the_window_of_one_conversation(
    facts: ModelFacts, size_mib: float
) -> None:
    assert checkpoint_bytes(facts, ContextShape(8192, 1, 512)) / MIB == pytest.approx(size_mib, rel=0.01)
    # With --swa-full, nothing of a window is lost.
    full = checkpoint_bytes(facts, ContextShape(8192, 4, 512, unified=True, swa_full=True))
    assert full == (4 * checkpoint_bytes(facts, ContextShape(8192, 1, 512)) if facts.recurrent else 0)


def test_a_checkpoint_of_a_model_that_drafts_holds_the_cache_of_its_mtp_layers() -> None:
    drafts = hybrid(50, mtp_layers=1)
    plain = checkpoint_bytes(drafts, ContextShape(8192, 2, 512))
    drafting = checkpoint_bytes(drafts, ContextShape(8192, 2, 512, rollback=3))
    assert drafting - plain == mtp_kv_bytes(drafts, ContextShape(8192, 2, 512)) * 5 // 4 > 0
    # Without states or windows there are no checkpoints.
    assert checkpoint_bytes(model(mtp_layers=1), ContextShape(8192, 2, 512, rollback=3)) == 0


@pytest.mark.parametrize(
    ("facts", "free_gib", "settings", "count"),
    [
        (QWEN, 128, {}, None),  # 18.7 GiB for all 32
        (QWEN, 32, {}, 6),
        (QWEN, 32, {"parallel": 1}, 26),
        (QWEN, 20, {"parallel": 1}, 5),
        (QWEN, 32, {"profile": "memory"}, 8),
        (QWEN, 17.5, {"profile": "memory"}, 2),
        (SMALL, 32, {}, None),
        (SMALL, 32, {"profile": "memory"}, 8),
        (GEMMA, 24, {"parallel": 1}, 4),
        (GEMMA, 24, {"profile": "memory"}, 0),
        (model(), 32, {}, None),
        (model(), 32, {"profile": "memory"}, 0),
        (model(known=False), 32, {"profile": "memory"}, 8),
    ],
)
def test_their_number_is_bounded_by_memory(
    facts: ModelFacts, free_gib: float, settings: dict[str, Any], count: int | None
) -> None:
    made = planned(NEW, facts, machine(memory_available_bytes=round(free_gib * GIB)), **settings)
    passed = value(made, "--ctx-checkpoints")
    assert (None if passed is None else int(passed)) == count
    each = checkpoint_bytes(facts, made.shape)
    assert kept(made) == each * (32 if count is None else count)
    assert made.memory.fits
    # A quarter of the rest.
    left = made.memory.free.host_bytes - made.memory.without_prompt_cache.host_bytes + kept(made)
    assert kept(made) <= left / 4


def test_other_models_need_the_memory_too() -> None:
    alone = planned(NEW, SMALL, machine(memory_available_bytes=128 * GIB))
    shared = planned(NEW, SMALL, machine(memory_available_bytes=128 * GIB), shared=True)
    assert kept(shared) < kept(alone)
    assert "llama-server continues changed prompts from them" in reason(shared, "--ctx-checkpoints")


@pytest.mark.parametrize(
    ("build", "settings", "copies"),
    [
        (NEW, {"extra": ("--ctx-checkpoints", "3")}, 3),
        (NEW, {"extra": ("-ctxcp", "0")}, 0),
        (NEW, {"extra": ("-ctxcp", "-1")}, 0),
        (NEW, {"profile": "plain"}, 32),
        (JULY, {}, 32),
        (MIDDLE, {}, 0),  # only for sliding windows
        (OLD, {}, 0),
    ],
)
def test_those_of_the_user_and_of_the_build_are_counted(
    build: str, settings: dict[str, Any], copies: int
) -> None:
    made = planned(build, SMALL, machine(memory_available_bytes=256 * GIB), **settings)
    assert kept(made) == copies * checkpoint_bytes(SMALL, made.shape)


def test_an_embedding_model_has_none() -> None:
    assert kept(planned(NEW, bert())) == 0


def test_their_number_is_no_other_plan_for_tune() -> None:
    plans = [planned(NEW, QWEN, machine(memory_available_bytes=free * GIB), parallel=1) for free in (20, 24)]
    counts = {value(made, "--ctx-checkpoints") for made in plans}
    assert len(counts) == 2
    assert len({made.shape for made in plans}) == 1
    assert len({defaults_key(made.argv, made.env) for made in plans}) == 1
