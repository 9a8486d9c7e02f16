"""How long a request may be: as long as the memory holds comfortably, and as llama-server alone allows."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.llama_server.diagnosis import diagnose
from llamasup.core.llama_server.plan_limits import PlanLimits
from llamasup.core.planning.ladder import admit, step_down
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.system.hardware.devices import Device
from llamasup.core.system.process.child import Exit
from tests.core.planning.plans import (
    BUILDS,
    GIB,
    JULY,
    MIDDLE,
    NEW,
    OLD,
    bert,
    capabilities,
    ladder,
    machine,
    model,
    needed_bytes,
    planned,
    value,
)

HOST_FULL = diagnose(Exit(1, None), ["std::bad_alloc"], phase="starting")


def small(**changes: Any) -> ModelFacts:
    """A model of half a billion parameters: 12 KiB for each token."""
    weights = GIB // 2
    shape = {
        "layers": 24,
        "embedding_length": 896,
        "feed_forward_lengths": (4864,) * 24,
        "head_counts": (14,) * 24,
        "head_counts_kv": (2,) * 24,
        "key_length": 64,
        "value_length": 64,
        "file_bytes": weights,
        "expected_bytes": weights,
        "weights_bytes": weights,
        "layer_bytes": (weights // 24,) * 24,
    }
    return model(**(shape | changes))


def with_free(build: str, facts: ModelFacts, free_bytes: int, **rest: Any) -> LaunchPlan:
    """The plan that is started with so much free memory."""
    here = machine(memory_available_bytes=free_bytes)
    return admit(ladder(build, facts, here, **rest), PlanLimits()).plan


@pytest.mark.parametrize(
    ("build", "of_size", "trained", "free_gib"),
    [
        case
        for case in product(BUILDS, (small, model), (4096, 8192, 32_768, 131_072, 262_144), (2, 4, 8, 24, 64))
        if case[1] is small or case[3] >= 8
    ],
)
def test_no_request_is_refused_that_llama_server_alone_serves(
    build: str, of_size: Any, trained: int, free_gib: int
) -> None:
    facts, free_bytes = of_size(context_length=trained), free_gib * GIB
    made = with_free(build, facts, free_bytes)
    bare = planned(build, facts, machine(memory_available_bytes=free_bytes), profile="plain")
    assert made.memory.fits
    if bare.memory.without_prompt_cache.total_bytes <= free_bytes - GIB // 4:
        assert made.ctx_size >= bare.ctx_size
    assert made.ctx_size >= min(trained, 8192)


@pytest.mark.parametrize(
    ("build", "free_gib", "slots", "per_request", "total", "kv_type"),
    [
        # The slots share one context.
        (NEW, 64, 4, 131_072, 131_072, "f16"),
        (NEW, 23, 4, 131_072, 131_072, "f16"),  # the whole context leaves a gigabyte
        (NEW, 22, 4, 131_072, 131_072, "q8_0"),  # llama-server alone would just start
        (NEW, 21, 4, 98_304, 98_304, "f16"),  # it would not: less of it leaves an eighth
        (NEW, 12, 4, 32_768, 32_768, "f16"),
        (NEW, 8, 2, 16_384, 16_384, "f16"),
        (JULY, 64, 4, 131_072, 131_072, "f16"),
        # Each slot has its own.
        (MIDDLE, 80, 4, 131_072, 524_288, "f16"),
        (MIDDLE, 48, 2, 131_072, 262_144, "f16"),
        (OLD, 24, 1, 131_072, 131_072, "f16"),
        (OLD, 12, 1, 32_768, 32_768, "f16"),
    ],
)
def test_context_is_as_long_as_the_memory_holds_comfortably(
    build: str, free_gib: int, slots: int, per_request: int, total: int, kv_type: str
) -> None:
    made = with_free(build, model(context_length=131_072), free_gib * GIB)
    assert (made.parallel, made.ctx_size, made.shape.ctx_total, made.kv_type) == (
        *(slots, per_request, total),
        kv_type,
    )
    assert value(made, "--ctx-size") == str(total)
    shares = build in (NEW, JULY)
    assert made.shared_ctx_size == total * shares
    assert ("--kv-unified" in made.argv, "--no-cache-idle-slots" in made.argv) == (shares, shares)


@pytest.mark.parametrize(
    ("rest", "slots", "per_request"),
    [
        ({"ctx_size": 4096}, 4, 4096),
        ({"extra": ("-c", "16384", "-np", "2")}, 2, 8192),
        ({"parallel": 2}, 2, 131_072),
        ({"extra": ("--no-kv-unified",)}, 2, 131_072),
        ({"extra": ("--no-kv-unified",), "parallel": 4}, 4, 65_536),
        ({"kv_type": "q4_0"}, 4, 131_072),
        ({"profile": "latency"}, 1, 131_072),
        ({"profile": "throughput"}, 8, 131_072),
        ({"profile": "memory"}, 1, 4096),
        ({"bounds": PlanLimits(parallel=2)}, 2, 16_384),
        ({"bounds": PlanLimits(ctx_size=8192)}, 4, 32_768),
        ({"bounds": PlanLimits(ctx_size=2048)}, 4, 8192),
        # Other models need the memory: the context takes no more than the weights.
        ({"shared": True}, 4, 32_768),
    ],
)
def test_what_the_user_the_profile_or_a_limit_says_comes_first(
    rest: dict[str, Any], slots: int, per_request: int
) -> None:
    made = planned(NEW, model(context_length=131_072), machine(memory_available_bytes=48 * GIB), **rest)
    assert (made.parallel, made.ctx_size) == (slots, per_request)


def test_user_who_divides_the_context_gets_no_flag_for_a_shared_one() -> None:
    made = planned(NEW, model(context_length=131_072), parallel=4, extra=("--no-kv-unified",))
    assert not {"--kv-unified", "--no-cache-idle-slots"} & {reason.flag for reason in made.reasons}


def test_an_encoder_and_a_model_without_a_known_context_keep_the_smallest() -> None:
    assert planned(facts=bert(context_length=8192)).ctx_size == 8192
    assert planned(facts=model(context_length=0)).ctx_size == 8192


def test_context_is_not_longer_where_the_free_memory_is_unknown() -> None:
    here = machine(memory_total_bytes=0)
    made = planned(NEW, model(context_length=131_072), here)
    assert made.shape.ctx_total == 32_768


@pytest.mark.parametrize(
    ("free_gib", "rest", "per_request"),
    [
        (22, {}, 98_304),  # --fit leaves a gigabyte on the device, and so does the plan
        (48, {}, 131_072),
        (10, {}, 32_768),
        (22, {"gpu_layers": 33}, 98_304),
        (6, {}, 32_768),  # a part of the layers: those on the device stay there
    ],
)
def test_longer_context_moves_no_layer_from_the_device(
    free_gib: int, rest: dict[str, Any], per_request: int
) -> None:
    device = Device("CUDA0", "a GPU", 80 * GIB, free_gib * GIB)
    made = planned(capabilities(NEW, device), model(context_length=131_072), **rest)
    least = planned(
        capabilities(NEW, device), model(context_length=131_072), bounds=PlanLimits(ctx_size=8192), **rest
    )
    assert made.ctx_size == per_request
    assert (made.memory.gpu_layers, made.kv_type) == (least.memory.gpu_layers, least.kv_type)


def test_moved_tensors_count_against_the_memory_of_host_and_device_together() -> None:
    device = Device("CUDA0", "a GPU", 24 * GIB, 4 * GIB)
    here = machine(memory_available_bytes=20 * GIB)
    facts = model(context_length=131_072)
    made = planned(capabilities(NEW, device), facts, here, extra=("--cpu-moe",), kv_type="f16")
    assert made.ctx_size == 131_072
    assert needed_bytes(made) < 23 * GIB


def test_first_step_after_out_of_memory_is_the_context_that_the_profile_asks_for() -> None:
    facts = model(context_length=131_072)
    candidate = ladder(NEW, facts)
    before = candidate(PlanLimits())
    step = step_down(before, HOST_FULL, candidate, steps_taken=0)
    assert step is not None
    assert [str(change) for change in step.changes] == ["--ctx-size 8192 instead of 32768"]
    after = candidate(step.bounds)
    assert (after.parallel, after.ctx_size) == (4, 32_768)
