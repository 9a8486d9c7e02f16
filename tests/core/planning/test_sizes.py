"""The memory that a build reserves for a context, recognised by the options that it lists."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamasup.core.llama_server.help_text import Capabilities
from tests.core.planning.plans import MIDDLE, NEW, OLD, capabilities, model, planned

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
