"""What a plan takes, on which side, and when that counts as fitting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llamasup.core.planning.memory.estimate import (
    Correction,
    FreeMemory,
    Load,
    MemoryEstimate,
    Part,
    estimate,
)
from llamasup.core.planning.memory.kv_cache import ContextShape, compute_bytes, kv_bytes, kv_bytes_per_layer
from tests.core.planning.plans import GIB, model

MIB = 1 << 20
OWN = 24 * MIB
SHAPE = ContextShape(ctx_total=8192, parallel=2, ubatch=512)
# Four blocks of 1 GiB, half a GiB of token embeddings and a quarter of output head.
SMALL = model(
    layers=4,
    weights_bytes=4 * GIB + 768 * MIB,
    layer_bytes=(GIB,) * 4,
    input_bytes=512 * MIB,
    output_bytes=256 * MIB,
)
COMPUTE = compute_bytes(SMALL, SHAPE)
KV = kv_bytes_per_layer(SMALL, SHAPE)
ON_DEVICE = 4 * GIB + 256 * MIB + sum(KV) + COMPUTE  # of SMALL, all that can go there


def sized(
    free: FreeMemory, layers: int | None = None, facts: object = SMALL, correction: Correction | None = None
) -> MemoryEstimate:
    load = Load(facts, SHAPE, layers)  # type: ignore[arg-type]
    return estimate(load, free, runtime_bytes=OWN, correction=correction or Correction())


def part(memory: MemoryEstimate, name: str) -> Part:
    (found,) = [each for each in memory.parts if each.name == name]
    return found


# --- on the host ---------------------------------------------------------------------------------


def test_without_a_device_all_of_it_is_on_the_host_and_the_parts_add_up() -> None:
    memory = sized(FreeMemory(100 * GIB))
    assert memory.device_bytes == 0
    assert memory.gpu_layers is None
    assert (memory.weights_bytes, memory.kv_bytes, memory.compute_bytes) == (
        SMALL.weights_bytes,
        kv_bytes(SMALL, SHAPE),
        COMPUTE,
    )
    assert memory.total_bytes == SMALL.weights_bytes + sum(KV) + COMPUTE + OWN


def test_layers_asked_for_without_a_device_of_its_own_memory_are_on_the_host() -> None:
    assert sized(FreeMemory(100 * GIB), layers=99) == sized(FreeMemory(100 * GIB), layers=0)


def test_memory_fits_up_to_the_last_byte() -> None:
    needed = sized(FreeMemory(0)).host_bytes
    assert sized(FreeMemory(needed)).fits
    assert not sized(FreeMemory(needed - 1)).fits
    assert sized(FreeMemory(needed - 1)).lacks_host


def test_no_memory_at_all_is_too_little_and_memory_not_known_refuses_nothing() -> None:
    assert not sized(FreeMemory(0)).fits
    assert sized(FreeMemory(0, known=False)).fits


# --- on devices ----------------------------------------------------------------------------------


def test_a_device_that_is_large_enough_gets_every_layer_and_the_host_keeps_the_token_embeddings() -> None:
    memory = sized(FreeMemory(GIB, 20 * GIB, devices=1))
    assert memory.gpu_layers == 5
    assert memory.device_bytes == ON_DEVICE
    assert memory.host_bytes == 512 * MIB + OWN
    assert memory.fits


@pytest.mark.parametrize("devices", [1, 2])
def test_each_device_keeps_the_margin_of_fit_free(devices: int) -> None:
    enough = ON_DEVICE + devices * GIB
    assert sized(FreeMemory(9 * GIB, enough, devices)).gpu_layers == 5
    assert sized(FreeMemory(9 * GIB, enough - 1, devices)).gpu_layers == 4


def test_a_number_of_layers_counts_the_output_first_then_the_last_blocks() -> None:
    memory = sized(FreeMemory(9 * GIB, 20 * GIB, 1), layers=3)
    assert part(memory, "weights") == Part("weights", "weights", 2 * GIB + 512 * MIB, 2 * GIB + 256 * MIB)
    assert part(memory, "KV cache") == Part("KV cache", "kv", sum(KV[:2]), sum(KV[2:]))
    # Both sides compute.
    assert part(memory, "compute buffers") == Part("compute buffers", "compute", COMPUTE, COMPUTE)
    output_only = sized(FreeMemory(9 * GIB, 20 * GIB, 1), layers=1)
    assert part(output_only, "weights").device_bytes == 256 * MIB
    assert part(output_only, "KV cache").device_bytes == 0


def test_a_tied_output_is_on_both_sides() -> None:
    tied = replace(SMALL, tied_output=True, output_bytes=0, weights_bytes=SMALL.weights_bytes - 256 * MIB)
    weights = part(sized(FreeMemory(9 * GIB, 20 * GIB, 1), facts=tied), "weights")
    assert (weights.host_bytes, weights.device_bytes) == (512 * MIB, 4 * GIB + 512 * MIB)
    assert part(sized(FreeMemory(9 * GIB), facts=tied), "weights").host_bytes == tied.weights_bytes


def test_users_layers_above_the_device_memory_do_not_fit() -> None:
    memory = sized(FreeMemory(100 * GIB, 3 * GIB, 1), layers=99)
    assert memory.gpu_layers == 5
    assert memory.lacks_device
    assert not memory.lacks_host
    assert not memory.fits


def test_a_device_too_small_for_anything_leaves_all_of_it_to_the_host() -> None:
    memory = sized(FreeMemory(100 * GIB, GIB, 1))
    assert memory.gpu_layers == 0
    assert memory.device_bytes == 0


def test_the_driver_takes_memory_of_a_device_that_computes() -> None:
    driver = 700 * MIB
    free = FreeMemory(9 * GIB, ON_DEVICE + GIB + driver, 1, driver_bytes=driver)
    memory = sized(free)
    assert part(memory, "llama-server itself") == Part("llama-server itself", "runtime", OWN, driver)
    assert memory.gpu_layers == 5
    assert sized(replace(free, device_bytes=free.device_bytes - 1)).gpu_layers == 4
    assert sized(free, layers=0).device_bytes == 0


def test_projector_takes_device_memory_first_unless_disabled() -> None:
    free = FreeMemory(9 * GIB, ON_DEVICE + GIB, 1)
    load = Load(SMALL, SHAPE)
    beside = estimate(load, free, runtime_bytes=OWN, projector_bytes=GIB)
    assert part(beside, "projector") == Part("projector", "weights", 0, GIB)
    assert beside.gpu_layers == 4
    kept_off = estimate(load, free, runtime_bytes=OWN, projector_bytes=GIB, projector_on_device=False)
    assert part(kept_off, "projector") == Part("projector", "weights", GIB)
    assert kept_off.gpu_layers == 5
    assert (
        part(
            estimate(load, FreeMemory(9 * GIB), runtime_bytes=OWN, projector_bytes=GIB), "projector"
        ).host_bytes
        == GIB
    )


def test_draft_model_gets_the_rest_of_the_device_memory() -> None:
    load = Load(SMALL, SHAPE)
    both = estimate(load, FreeMemory(99 * GIB, ON_DEVICE + GIB, 1), runtime_bytes=OWN, draft=load)
    assert both.gpu_layers == 5
    assert part(both, "draft model: weights").device_bytes == 0
    assert both.weights_bytes == 2 * SMALL.weights_bytes
    assert both.kv_bytes == 2 * sum(KV)


# --- what was measured, and the prompt cache -----------------------------------------------------


def test_measurement_sets_cache_and_buffers_and_only_raises_the_process() -> None:
    free = FreeMemory(100 * GIB)
    memory = sized(free, correction=Correction(kv=0.5, compute=2.0, runtime_bytes=MIB, measured=True))
    assert memory.measured
    assert memory.kv_bytes == sum(KV) // 2
    assert memory.compute_bytes == 2 * COMPUTE
    assert part(memory, "llama-server itself").host_bytes == OWN
    larger = sized(free, correction=Correction(runtime_bytes=3 * OWN))
    assert not larger.measured
    assert part(larger, "llama-server itself").host_bytes == 3 * OWN


def test_a_prompt_cache_counts_and_one_without_a_limit_has_no_size() -> None:
    memory = sized(FreeMemory(100 * GIB))
    assert memory.with_prompt_cache(GIB).prompt_cache_bytes == GIB
    assert memory.with_prompt_cache(GIB).total_bytes == memory.total_bytes + GIB
    assert memory.with_prompt_cache(0) == memory
    assert memory.with_prompt_cache(-MIB) == memory


@given(
    free=st.builds(FreeMemory, st.integers(0, 8 * GIB), st.integers(0, 8 * GIB), st.integers(0, 3)),
    layers=st.none() | st.integers(0, 9),
    tied=st.booleans(),
    slots=st.integers(1, 8),
)
def test_parts_add_up_for_any_placement_and_agree_with_fits(
    free: FreeMemory, layers: int | None, tied: bool, slots: int
) -> None:
    facts = replace(SMALL, tied_output=tied)
    shape = ContextShape(ctx_total=2048 * slots, parallel=slots, ubatch=512)
    memory = estimate(Load(facts, shape, layers), free, runtime_bytes=OWN)
    assert memory.kv_bytes == kv_bytes(facts, shape)
    assert memory.weights_bytes - facts.weights_bytes in (0, facts.input_bytes if tied else 0)
    assert memory.host_bytes == sum(each.host_bytes for each in memory.parts)
    assert memory.device_bytes == sum(each.device_bytes for each in memory.parts)
    assert memory.fits == (memory.host_bytes <= free.host_bytes and memory.device_bytes <= free.device_bytes)
    assert all(each.host_bytes >= 0 and each.device_bytes >= 0 for each in memory.parts)
    if layers is None and free.devices:
        # What llama-server fits by itself is never too much for the device.
        assert memory.device_bytes <= free.device_bytes
    if not free.devices:
        assert memory.device_bytes == 0
