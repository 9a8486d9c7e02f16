"""The memory that a build reserves for a context, recognised by the options that it lists."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.llama_server.plan_limits import PlanLimits
from llamasup.core.system.hardware.devices import Device
from llamasup.errors import UsageInvalid
from tests.core.planning.plans import (
    GIB,
    GPU,
    MIDDLE,
    NEW,
    OLD,
    capabilities,
    machine,
    model,
    planned,
    reason,
    value,
)

SLIDING = model(sliding_window=1024, sliding_layers=(True, False) * 16)
LATENT = model(head_counts_kv=(1,) * 32, key_length=576, value_length=512, mla=True)


def without(flag: str) -> Capabilities:
    """The newest build, if it did not list ``flag``."""
    known = capabilities(NEW)
    return replace(known, options=tuple(each for each in known.options if flag not in each.spellings))


# --- sliding windows -----------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "whole"), [(NEW, False), (MIDDLE, False), (OLD, True)])
def test_a_build_without_swa_full_keeps_every_cell_of_a_sliding_layer(build: str, whole: bool) -> None:
    """They slide since #13194 (May 2025), and the option came with it."""
    assert planned(build, SLIDING).shape.swa_full is whole


def test_half_of_the_layers_sliding_takes_little_more_than_half_of_the_cache() -> None:
    slides, whole = planned(NEW, SLIDING), planned(without("--swa-full"), SLIDING)
    assert 0.5 < slides.memory.kv_bytes / whole.memory.kv_bytes < 0.75


def test_full_swa_cache_counts_every_cell() -> None:
    asked = planned(NEW, SLIDING, extra=("--swa-full",))
    assert asked.shape.swa_full
    assert asked.memory.kv_bytes == planned(without("--swa-full"), SLIDING).memory.kv_bytes


# --- latent attention ----------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "both"), [(NEW, False), (MIDDLE, True), (OLD, True)])
def test_a_build_without_fit_caches_the_values_of_latent_attention_too(build: str, both: bool) -> None:
    """That ended in January 2026; --fit is of December 2025."""
    assert planned(build, LATENT).shape.mla_values is both


def test_values_that_are_cached_take_as_much_as_they_are_long() -> None:
    keys, both = (planned(build, LATENT, kv_type="f16").memory for build in (NEW, without("--fit")))
    assert both.kv_bytes / keys.kv_bytes == (576 + 512) / 576


# --- outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "outputs"), [(NEW, 1), (MIDDLE, None), (OLD, None)])
def test_a_build_without_load_mode_has_room_for_the_logits_of_every_token(
    build: str, outputs: int | None
) -> None:
    """#23861 (June 2026) reserves one of each slot; --load-mode came a month later."""
    assert planned(build).shape.outputs_per_slot == outputs


def test_room_for_fewer_logits_is_less_memory() -> None:
    few, all_of_them = (planned(build).memory.compute_bytes for build in (NEW, without("--load-mode")))
    assert few < all_of_them / 2


def test_drafted_tokens_need_room_for_their_logits_as_well() -> None:
    drafted = planned(NEW, model(mtp_layers=1, drafts_itself=True)).shape
    assert drafted.outputs_per_slot == 1 + 2


def test_load_with_memory_flags_is_no_measurement_for_one_without() -> None:
    moves = ((), ("--no-repack",), ("-nkvo",), ("--lora", "/a.gguf"), ("-ncmoe", "4"), ("-ncmoe", "8"))
    keys = {planned(extra=extra).key for extra in moves}
    assert len(keys) == len(moves)
    assert planned(extra=("--temp", "1")).key in keys


# --- the free memory, and layers on devices -------------------------------------------------------


SECOND = Device("CUDA1", "another GPU", 48 * GIB, 40 * GIB)
UNIFIED = replace(GPU, name="MTL0", shares_host_memory=True)


# --- room ----------------------------------------------------------------------------------------


def test_free_memory_is_that_of_the_host_and_all_devices() -> None:
    free = planned(capabilities(NEW, GPU, SECOND)).memory.free
    assert (free.host_bytes, free.device_bytes, free.devices) == (28 * GIB, 62 * GIB, 2)


@pytest.mark.parametrize(("chosen", "free"), [("CUDA1", 40), ("CUDA0,CUDA1", 62), ("CUDA9", 0)])
def test_only_the_users_chosen_devices_count(chosen: str, free: int) -> None:
    made = planned(capabilities(NEW, GPU, SECOND), extra=("--device", chosen))
    assert made.memory.free.device_bytes == free * GIB


def test_a_device_that_shares_the_hosts_memory_adds_none() -> None:
    made = planned(capabilities(NEW, UNIFIED))
    assert (made.memory.free.devices, made.memory.device_bytes) == (0, 0)
    assert made.memory.available_bytes == 28 * GIB


@pytest.mark.parametrize("layers", ["all", 20])
def test_users_layers_on_a_device_with_shared_memory_are_accepted(layers: Any) -> None:
    made = planned(capabilities(NEW, UNIFIED), gpu_layers=layers)
    assert made.memory.fits
    assert made.memory.host_bytes > 5 * GIB


def test_address_space_excludes_the_reservation_of_threads() -> None:
    few = planned(hardware=machine(address_space_limit_bytes=8 * GIB, cpus_allowed=2, physical_cores=2))
    many = planned(hardware=machine(address_space_limit_bytes=8 * GIB, cpus_allowed=128))
    assert 7 * GIB < few.memory.free.host_bytes < 8 * GIB - 490 * (1 << 20)  # measured: 490 MiB, b11434
    assert many.memory.free.host_bytes < few.memory.free.host_bytes - GIB


def test_of_free_memory_and_address_space_the_tighter_one_counts() -> None:
    assert planned(hardware=machine(address_space_limit_bytes=99 * GIB)).memory.free.host_bytes == 28 * GIB
    assert planned(hardware=machine(address_space_limit_bytes=GIB // 4)).memory.free.host_bytes == 0


def test_address_space_too_small_for_llama_server_refuses_the_plan() -> None:
    assert not planned(hardware=machine(address_space_limit_bytes=GIB // 4)).memory.fits


def test_a_cgroup_that_is_full_refuses_and_a_system_that_does_not_tell_does_not() -> None:
    assert not planned(hardware=machine(memory_available_bytes=0)).memory.fits
    assert planned(hardware=machine(memory_available_bytes=0, memory_total_bytes=0)).memory.fits


@pytest.mark.parametrize(
    ("devices", "settings", "device"),
    [
        ((), {}, "CPU"),
        ((GPU,), {}, "CUDA0"),
        ((GPU, SECOND), {}, "CUDA0,CUDA1"),
        ((GPU, SECOND), {"extra": ("--device", "CUDA1")}, "CUDA1"),
        ((GPU,), {"extra": ("--device", "none")}, "CPU"),
        ((GPU,), {"gpu_layers": 0}, "CPU"),
        ((GPU,), {"gpu_layers": 20}, "CUDA0+CPU"),
        ((GPU,), {"gpu_layers": "all"}, "CUDA0"),
        ((UNIFIED,), {}, "MTL0"),
        ((UNIFIED,), {"gpu_layers": 20}, "MTL0+CPU"),
    ],
)
def test_plan_names_its_devices(devices: tuple[Device, ...], settings: dict[str, Any], device: str) -> None:
    assert planned(capabilities(NEW, *devices), **settings).device == device


# --- layers --------------------------------------------------------------------------------------


def test_bounded_layers_are_passed_with_the_reason() -> None:
    made = planned(capabilities(NEW, GPU), bounds=PlanLimits(gpu_layers=16, why="it ran out of memory"))
    assert value(made, "--gpu-layers") == "16"
    assert reason(made, "--gpu-layers").endswith("it ran out of memory")
    assert (made.gpu_layers, made.memory.gpu_layers) == (16, 16)


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"gpu_layers": 20}, 20),
        ({"gpu_layers": "all"}, 33),
        ({"extra": ("-ngl", "12")}, 12),
        ({"extra": ("-ngl", "all")}, 33),
        ({"gpu_layers": 20, "extra": ("-ngl", "12")}, 12),
        ({"gpu_layers": 0}, 0),
        ({"extra": ("--device", "none")}, 0),
    ],
)
def test_users_layers_are_never_bounded(settings: dict[str, Any], layers: int) -> None:
    made = planned(capabilities(NEW, GPU), bounds=PlanLimits(gpu_layers=5, why="-"), **settings)
    assert made.gpu_layers == layers
    assert "--gpu-layers" not in made.adjustable or made.gpu_layers == 0


@pytest.mark.parametrize("settings", [{}, {"gpu_layers": "auto"}, {"extra": ("-ngl", "auto")}])
def test_auto_leaves_the_count_to_the_build(settings: dict[str, Any]) -> None:
    made = planned(capabilities(NEW, GPU), **settings)
    assert made.gpu_layers is None
    assert made.memory.gpu_layers == 33


@pytest.mark.parametrize("device", [GPU, UNIFIED])
def test_a_build_that_cannot_fit_layers_by_itself_gets_all_of_them_where_they_fit(device: Device) -> None:
    assert value(planned(capabilities(MIDDLE, device)), "--gpu-layers") == "999"


@pytest.mark.parametrize(("free_bytes", "least"), [(5 * GIB, 5), (GIB // 4, 0)])
def test_a_build_that_cannot_fit_layers_by_itself_gets_as_many_as_the_device_holds(
    free_bytes: int, least: int
) -> None:
    made = planned(capabilities(MIDDLE, replace(GPU, free_bytes=free_bytes)))
    layers = value(made, "--gpu-layers")
    assert layers is not None
    assert int(layers) == made.memory.gpu_layers
    assert least <= int(layers) < 33
    assert made.memory.fits
    assert made.memory.device_bytes <= free_bytes
    assert "the device holds about this many" in reason(made, "--gpu-layers")


def test_build_without_fit_gets_all_layers_with_a_draft_or_is_refused() -> None:
    small = replace(GPU, free_bytes=5 * GIB)
    made = planned(capabilities(MIDDLE, small), draft_model="/d.gguf", draft=model(weights_bytes=GIB))
    assert value(made, "--gpu-layers") == "999"
    assert not made.memory.fits


def test_without_a_device_there_are_no_layers_to_place() -> None:
    assert planned().gpu_layers == 0
    assert value(planned(bounds=PlanLimits(gpu_layers=5, why="-")), "--gpu-layers") is None


def test_less_than_no_layers_is_out_of_range() -> None:
    with pytest.raises(UsageInvalid, match="--gpu-layers -5 is out of range"):
        planned(gpu_layers=-5)


@pytest.mark.parametrize("extra", [("--no-mmproj-offload",), ("--mmproj-offload", "--no-mmproj-offload")])
def test_projector_not_on_the_device_counts_on_the_host(extra: tuple[str, ...]) -> None:
    projector = model(model_class=ModelClass.PROJECTOR, weights_bytes=GIB, projection_length=4096)

    def placed(*passed: str) -> int:
        made = planned(capabilities(NEW, GPU), mmproj="/p.gguf", projector=projector, extra=passed)
        (part,) = [part for part in made.memory.parts if part.name == "projector"]
        return part.host_bytes

    assert placed(*extra) == GIB
    assert placed() == placed("--no-mmproj-offload", "--mmproj-offload") == 0


# --- what was said tensor by tensor --------------------------------------------------------------

SMALL = replace(GPU, free_bytes=4 * GIB)


@pytest.mark.parametrize(
    "extra",
    [("--n-cpu-moe", "20"), ("--cpu-moe",), ("-ot", "exps=CPU"), ("-nkvo",), ("-kvo", "-nkvo")],
    ids=str,
)
def test_layers_for_a_small_device_are_not_refused_where_their_tensors_were_put_elsewhere(
    extra: tuple[str, ...],
) -> None:
    """The usual way to run a mixture of experts: all layers on the device, the experts on the host."""
    assert planned(capabilities(NEW, SMALL), gpu_layers="all").memory.lacks_device
    made = planned(capabilities(NEW, SMALL), gpu_layers="all", extra=extra)
    assert made.memory.fits


def test_plan_above_host_and_device_together_is_refused() -> None:
    made = planned(
        capabilities(NEW, SMALL),
        None,
        machine(memory_available_bytes=GIB),
        gpu_layers="all",
        extra=("--cpu-moe",),
    )
    assert made.memory.lacks_host
    assert not made.memory.lacks_device
    assert not made.memory.fits


def test_prompt_cache_excludes_memory_that_user_placed_tensors_may_take() -> None:
    free = machine(memory_available_bytes=8 * GIB)
    whole = planned(capabilities(NEW, GPU), None, free, gpu_layers="all")
    moved = planned(capabilities(NEW, GPU), None, free, gpu_layers="all", extra=("--cpu-moe",))
    assert moved.memory.prompt_cache_bytes < whole.memory.prompt_cache_bytes


@pytest.mark.parametrize("extra", [("-kvo",), ("-nkvo", "-kvo")], ids=str)
def test_a_cache_that_stays_on_the_device_is_counted_there(extra: tuple[str, ...]) -> None:
    assert planned(capabilities(NEW, SMALL), gpu_layers="all", extra=extra).memory.lacks_device


def test_without_a_device_there_is_nothing_to_put_elsewhere() -> None:
    assert not planned(extra=("--cpu-moe",)).memory.free.user_placed
