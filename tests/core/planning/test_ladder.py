"""The ladder: the order in which a plan is reduced, how far, and the settings that stay (S5)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.llama_server.diagnosis import Diagnosis, diagnose
from llamasup.core.llama_server.log_lines import StartupFailure, read_line
from llamasup.core.llama_server.plan_limits import Change, PlanLimits
from llamasup.core.planning.ladder import (
    MAX_STEPS,
    admit,
    blames_kv_cache,
    is_out_of_memory,
    largest_that_fits,
    step_down,
)
from llamasup.core.planning.memory.kv_cache import has_kv_cache
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.settings.model import Settings
from llamasup.core.system.process.child import Exit
from tests.core.planning.plans import (
    GIB,
    GPU,
    LONG,
    NEW,
    SMALL_GPU,
    bert,
    capabilities,
    ladder,
    machine,
    model,
    needed_bytes,
    planned,
)
from tests.kit.extent import examples

SIGABRT = Exit(None, "SIGABRT")
MISSING_TENSOR = diagnose(
    Exit(1, None),
    ["llama_model_load: error loading model: missing tensor 'blk.2.attn_norm.weight'"],
    phase="starting",
)
HOST_FULL = diagnose(Exit(1, None), ["std::bad_alloc"], phase="starting")
DEVICE_FULL = diagnose(SIGABRT, ["CUDA error: out of memory"], phase="starting")
SEGFAULT = diagnose(Exit(None, "SIGSEGV"), [], phase="starting")
FLASH_ABORT = diagnose(SIGABRT, ["/src/ggml-cuda/fattn.cu:123: fatal error"], phase="starting")
NO_MESSAGE = diagnose(Exit(1, None), ["the devices disagree"], phase="starting")
OTHER_ABORT = diagnose(SIGABRT, ["/src/llama-sampling.cpp:7: fatal error"], phase="starting")
NO_MODEL = diagnose(Exit(1, None), ["unknown model architecture: 'x'"], phase="starting")
NOTHING = machine(memory_available_bytes=1)

ORDER = ("--parallel", "--ctx-size", "--kv-type", "--gpu-layers")


def settings_of(made: LaunchPlan) -> dict[str, object]:
    return {
        "--parallel": made.parallel,
        "--ctx-size": made.ctx_size_of_slot,
        "--kv-type": made.kv_type,
        "--gpu-layers": made.gpu_layers,
    }


def differing(before: LaunchPlan, after: LaunchPlan) -> list[str]:
    old, new = settings_of(before), settings_of(after)
    return [name for name in ORDER if old[name] != new[name]]


def unpacked(*args: Any, **rest: Any) -> Callable[[PlanLimits], LaunchPlan]:
    """A ladder that begins with an f16 cache that the user did not set."""
    candidate = ladder(*args, **rest)

    def made(bounds: PlanLimits) -> LaunchPlan:
        return replace(candidate(replace(bounds, kv_type=bounds.kv_type or "f16")), bounds=bounds)

    return made


# --- before a start ------------------------------------------------------------------------------


def test_plan_that_fits_is_not_changed() -> None:
    admission = admit(ladder(), PlanLimits())
    assert admission.plan == planned()
    assert admission.considered == (planned(),)


def test_before_a_start_slots_go_first_then_the_cache_is_packed_then_the_context_goes_one_at_a_time() -> None:
    considered = admit(unpacked(hardware=NOTHING), PlanLimits()).considered
    changed = [differing(*pair) for pair in pairwise(considered)]
    assert all(len(names) == 1 for names in changed)
    names = [name for (name,) in changed]
    assert list(dict.fromkeys(names)) == ["--parallel", "--kv-type", "--ctx-size"]
    last = considered[-1]
    assert (last.parallel, last.ctx_size_of_slot, last.kv_type) == (1, 2048, "q8_0")


def test_largest_plan_that_fits_is_chosen_with_the_reason() -> None:
    for size in admit(ladder(hardware=NOTHING), PlanLimits()).considered[1:]:
        free = machine(memory_available_bytes=needed_bytes(size))
        admission = admit(ladder(hardware=free), PlanLimits())
        assert settings_of(admission.plan) == settings_of(size)
        assert admission.plan.memory.fits
        assert not any(each.memory.fits for each in admission.considered[:-1])
        assert any("the larger plan does not fit in memory" in each.reason for each in admission.plan.reasons)
        assert admission.preferred == planned(hardware=free)


def test_where_nothing_fits_the_preferred_plan_is_returned_and_does_not_fit() -> None:
    admission = admit(ladder(hardware=NOTHING), PlanLimits())
    assert admission.plan == admission.preferred == planned(hardware=NOTHING)
    assert not admission.plan.memory.fits


def test_an_embedding_model_gives_up_context_and_keeps_its_cache() -> None:
    considered = admit(ladder(NEW, bert(context_length=8192), NOTHING), PlanLimits()).considered
    assert considered[-1].ctx_size_of_slot == 2048
    assert {each.kv_type for each in considered} == {"f16"}


def test_step_that_saves_nothing_is_skipped() -> None:
    """Fewer slots of a fixed total context are larger slots."""
    considered = admit(
        ladder(hardware=NOTHING, extra=("-c", "16384", "-ctk", "f16")), PlanLimits()
    ).considered
    assert {each.shape.ctx_total for each in considered} == {16384}
    sizes = [each.memory.context_bytes for each in considered]
    assert sizes == sorted(set(sizes), reverse=True)


# --- what was set by hand ------------------------------------------------------------------------

BY_HAND: list[tuple[dict[str, Any], set[str]]] = [
    ({"parallel": 4}, {"--parallel"}),
    ({"ctx_size": 8192}, {"--ctx-size"}),
    ({"kv_type": "f16"}, {"--kv-type"}),
    ({"gpu_layers": 20}, {"--gpu-layers"}),
    ({"extra": ("-np", "4")}, {"--parallel"}),
    ({"extra": ("-np", "-1")}, {"--parallel"}),
    ({"extra": ("-c", "32768")}, {"--ctx-size"}),
    ({"extra": ("-ctk", "f16")}, {"--kv-type"}),
    ({"extra": ("--cache-type-v", "f16")}, {"--kv-type"}),
    ({"extra": ("-ngl", "20")}, {"--gpu-layers"}),
    ({"parallel": 4, "ctx_size": 8192, "kv_type": "f16", "gpu_layers": "all"}, set(ORDER)),
]


@pytest.mark.parametrize(("extra_args", "fixed"), BY_HAND)
@pytest.mark.parametrize("diagnosis", [HOST_FULL, DEVICE_FULL, SEGFAULT, FLASH_ABORT])
def test_users_settings_stay_through_every_step(
    extra_args: dict[str, Any], fixed: set[str], diagnosis: Diagnosis
) -> None:
    candidate = ladder(capabilities(NEW, GPU), **extra_args)
    preferred = made = candidate(PlanLimits())
    for step in range(MAX_STEPS):
        adjustment = step_down(made, diagnosis, candidate, steps_taken=step)
        if adjustment is None:
            break
        made = candidate(adjustment.bounds)
        if extra_args.get("extra", ("",))[0] != "-c":  # there it is the total that stays
            assert not fixed & set(differing(preferred, made))
        assert not fixed & {change.setting for change in adjustment.changes}
    for each in admit(ladder(hardware=NOTHING, **extra_args), PlanLimits()).considered:
        assert not (fixed - {"--ctx-size"}) & set(differing(planned(hardware=NOTHING, **extra_args), each))


def test_no_step_is_taken_if_the_user_set_everything() -> None:
    extra_args = {"parallel": 4, "ctx_size": 8192, "kv_type": "q8_0", "gpu_layers": 10, "flash_attn": "on"}
    candidate = ladder(capabilities(NEW, GPU), **extra_args)
    for diagnosis in (HOST_FULL, DEVICE_FULL):
        assert step_down(candidate(PlanLimits()), diagnosis, candidate, steps_taken=0) is None


def test_users_flash_attention_stays_on() -> None:
    for extra_args in ({"flash_attn": "on"}, {"extra": ("-fa", "on")}):
        candidate = ladder(kv_type="f16", **extra_args)
        step = step_down(candidate(PlanLimits()), FLASH_ABORT, candidate, steps_taken=0)
        assert step is not None
        assert candidate(step.bounds).kv.flash == "on"


def test_the_profile_plain_is_not_adjusted() -> None:
    candidate = ladder(capabilities(NEW, GPU), profile="plain")
    for diagnosis in (HOST_FULL, DEVICE_FULL, SEGFAULT):
        assert step_down(candidate(PlanLimits()), diagnosis, candidate, steps_taken=0) is None
    f16 = unpacked(profile="plain")
    assert step_down(f16(PlanLimits()), HOST_FULL, f16, steps_taken=0) is None


# --- out of memory -------------------------------------------------------------------------------


def walk(
    candidate: Callable[[PlanLimits], LaunchPlan], diagnosis: Diagnosis
) -> tuple[list[LaunchPlan], list[tuple[Change, ...]]]:
    """Start after start fails in the same way."""
    plans = [candidate(PlanLimits())]
    changes: list[tuple[Change, ...]] = []
    while (adjustment := step_down(plans[-1], diagnosis, candidate, steps_taken=len(changes))) is not None:
        assert (adjustment.step, adjustment.most_steps) == (len(changes) + 1, MAX_STEPS)
        plans.append(candidate(adjustment.bounds))
        changes.append(adjustment.changes)
    return plans, changes


def test_after_out_of_memory_one_setting_at_a_time_goes_down_in_the_promised_order() -> None:
    plans, changes = walk(unpacked(capabilities(NEW, GPU)), DEVICE_FULL)
    assert [change.setting for (change,) in changes] == ["--parallel", "--ctx-size", "--kv-type"]
    assert [differing(*pair) for pair in pairwise(plans)] == [[change.setting] for (change,) in changes]


def test_step_halves_the_memory_besides_weights_or_goes_to_the_limit() -> None:
    candidate = ladder(profile="throughput")
    made = candidate(PlanLimits())
    adjustment = step_down(made, HOST_FULL, candidate, steps_taken=0)
    assert adjustment is not None
    after = candidate(adjustment.bounds)
    halved = after.memory.context_bytes <= made.memory.context_bytes // 2
    assert halved or after.parallel == 1
    if halved:
        one_less = candidate(replace(adjustment.bounds, parallel=after.parallel * 2))
        assert one_less.memory.context_bytes > made.memory.context_bytes // 2


def test_step_that_cannot_halve_goes_to_the_limit_of_its_setting() -> None:
    buffers_rule = model(head_counts_kv=(1,) * 32, feed_forward_lengths=(100_000,) * 32)
    candidate = ladder(facts=buffers_rule)
    made = candidate(PlanLimits())
    adjustment = step_down(made, HOST_FULL, candidate, steps_taken=0)
    assert adjustment is not None
    after = candidate(adjustment.bounds)
    assert [change.setting for change in adjustment.changes] == ["--parallel"]
    assert after.parallel == 1
    assert after.memory.context_bytes > made.memory.context_bytes // 2


def test_no_step_goes_below_the_least_useful_context() -> None:
    odd = model(context_length=5000)
    assert admit(ladder(NEW, odd, NOTHING), PlanLimits()).considered[-1].ctx_size_of_slot == 2048
    short = model(context_length=1000)
    assert admit(ladder(NEW, short, NOTHING), PlanLimits()).considered[-1].ctx_size_of_slot == 1000


def test_step_names_old_and_new_values_and_its_reason_is_in_the_plan() -> None:
    candidate = ladder(parallel=1)
    adjustment = step_down(candidate(PlanLimits()), HOST_FULL, candidate, steps_taken=1)
    assert adjustment is not None
    (change,) = adjustment.changes
    before, after = candidate(PlanLimits()).ctx_size_of_slot, candidate(adjustment.bounds).ctx_size_of_slot
    assert change == Change("--ctx-size", str(before), str(after))
    assert str(adjustment) == f"--ctx-size {after} instead of {before} (step 2 of 3)"
    made = candidate(adjustment.bounds)
    assert any("llama-server ran out of memory" in each.reason for each in made.reasons)


def test_three_steps_and_no_more() -> None:
    candidate = ladder()
    made = candidate(PlanLimits())
    assert step_down(made, HOST_FULL, candidate, steps_taken=MAX_STEPS - 1) is not None
    assert step_down(made, HOST_FULL, candidate, steps_taken=MAX_STEPS) is None


def test_layers_go_last_by_half_and_only_for_the_devices_memory() -> None:
    small = {"parallel": 1, "ctx_size": 2048, "kv_type": "q8_0"}
    candidate = ladder(capabilities(NEW, GPU), **small)
    made = candidate(PlanLimits())
    assert step_down(made, HOST_FULL, candidate, steps_taken=0) is None
    adjustment = step_down(made, DEVICE_FULL, candidate, steps_taken=0)
    assert adjustment is not None
    assert adjustment.changes == (Change("--gpu-layers", "auto", "16"),)
    again = step_down(candidate(adjustment.bounds), DEVICE_FULL, candidate, steps_taken=1)
    assert again is not None
    assert again.changes == (Change("--gpu-layers", "16", "8"),)


def test_half_of_the_layers_means_of_those_that_were_expected_on_the_device() -> None:
    small = {"parallel": 1, "ctx_size": 2048, "kv_type": "q8_0"}
    large = model(weights_bytes=100 * GIB)
    known, host = capabilities(NEW, GPU), machine(memory_available_bytes=200 * GIB)
    candidate = ladder(known, large, host, **small)
    expected = candidate(PlanLimits()).memory.gpu_layers
    assert expected is not None
    assert 0 < expected < 10
    adjustment = step_down(candidate(PlanLimits()), DEVICE_FULL, candidate, steps_taken=0)
    assert adjustment is not None
    assert adjustment.bounds.gpu_layers == expected // 2


def test_on_a_device_that_shares_the_hosts_memory_half_of_all_layers_are_tried() -> None:
    unified = capabilities(NEW, replace(GPU, shares_host_memory=True))
    candidate = ladder(unified, parallel=1, ctx_size=2048, kv_type="q8_0")
    adjustment = step_down(candidate(PlanLimits()), DEVICE_FULL, candidate, steps_taken=0)
    assert adjustment is not None
    assert adjustment.bounds.gpu_layers == 16


def test_no_step_remains_without_layers_on_the_device() -> None:
    candidate = ladder(capabilities(NEW, GPU), parallel=1, ctx_size=2048, kv_type="q8_0")
    made = candidate(PlanLimits(gpu_layers=0, why="-"))
    assert step_down(made, DEVICE_FULL, candidate, steps_taken=0) is None


def test_the_warning_that_it_does_not_fit_counts_as_out_of_memory() -> None:
    heard = read_line("common_fit_params: failed to fit params to free device memory: n_ctx_min is too large")
    assert isinstance(heard, StartupFailure)
    assert is_out_of_memory(heard.diagnosis)
    candidate = ladder(capabilities(NEW, GPU))
    assert step_down(candidate(PlanLimits()), heard.diagnosis, candidate, steps_taken=0) is not None


# --- crashes of the cache's kernels --------------------------------------------------------------


@pytest.mark.parametrize("crash", [SEGFAULT, FLASH_ABORT])
def test_crash_of_cache_kernels_leads_to_f16_then_to_no_flash_attention(
    crash: Diagnosis,
) -> None:
    plans, changes = walk(ladder(capabilities(NEW, SMALL_GPU)), crash)
    assert [change.setting for (change,) in changes[:2]] == ["--kv-type", "--flash-attn"]
    assert [plan.kv_type for plan in plans[:3]] == ["q8_0", "f16", "f16"]
    assert plans[2].kv.flash == "off"
    assert any("llama-server crashed during its start" in each.reason for each in plans[2].reasons)


def test_users_packed_cache_and_its_flash_attention_stay() -> None:
    candidate = ladder(kv_type="q8_0")
    step = step_down(candidate(PlanLimits()), SEGFAULT, candidate, steps_taken=0)
    assert step is not None
    assert candidate(step.bounds).kv_type == "q8_0"


# --- flags of llamasup's own ---------------------------------------------------------------------


def refused(flag: str) -> Diagnosis:
    return diagnose(Exit(1, None), [f"error: invalid argument: {flag}"], phase="starting")


@pytest.mark.parametrize(
    ("diagnosis", "rest", "changed"),
    [
        (OTHER_ABORT, {}, {"--parallel": "1", "--profile": "plain"}),
        (refused("--kv-unified"), {}, {"--parallel": "1", "--profile": "plain"}),
        (OTHER_ABORT, {"parallel": 2, "profile": "latency"}, {"--profile": "plain"}),
        # The drafts first: they suit a file or a build least often.
        (OTHER_ABORT, {"drafts": True}, {"--spec-type": "none"}),
        (MISSING_TENSOR, {"drafts": True}, {"--spec-type": "none"}),
        (refused("--spec-type"), {"drafts": True}, {"--spec-type": "none"}),
        (
            OTHER_ABORT,
            {"drafts": True, "extra": ("--spec-type", "draft-mtp")},
            {"--parallel": "1", "--profile": "plain"},
        ),
    ],
)
def test_start_is_tried_again_without_the_flags_that_llamasup_adds(
    diagnosis: Diagnosis, rest: dict[str, Any], changed: dict[str, str]
) -> None:
    drafts = rest.pop("drafts", False)
    facts = model(context_length=16_384, mtp_layers=int(drafts), drafts_itself=drafts)
    candidate = ladder(NEW, facts, **rest)
    plans, changes = walk(candidate, diagnosis)
    assert {
        change.setting: change.after for change in changes[0] if change.setting != "--ctx-size"
    } == changed
    assert len(changes) == (2 if "--spec-type" in changed and diagnosis is OTHER_ABORT else 1)
    if "--profile" in changed:
        assert plans[1].ctx_size == 8192
        assert "--kv-unified" not in plans[1].argv
    else:
        (why,) = [each.reason for each in plans[1].reasons if each.flag == "--spec-type"]
        assert "did not start with the drafts" in why


@pytest.mark.parametrize(
    ("diagnosis", "rest"),
    [
        (NO_MODEL, {}),
        (NO_MESSAGE, {}),  # another program may have ended it: the next start is the same, after a while
        (MISSING_TENSOR, {}),
        (refused("--frobnicate"), {}),
        (refused("--top-k"), {"extra": ("--top-k", "4")}),
        (OTHER_ABORT, {"profile": "plain"}),
    ],
)
def test_any_other_end_changes_nothing(diagnosis: Diagnosis, rest: dict[str, Any]) -> None:
    assert not is_out_of_memory(diagnosis)
    candidate = ladder(**rest)
    assert step_down(candidate(PlanLimits()), diagnosis, candidate, steps_taken=0) is None


def test_a_cache_that_crashed_when_packed_is_not_packed_again_to_save_memory() -> None:
    plain_cache = PlanLimits(kv_type="f16", why="it crashed")
    considered = admit(ladder(hardware=NOTHING), plain_cache).considered
    assert {each.kv_type for each in considered} == {"f16"}
    candidate = ladder(parallel=1, ctx_size=2048)
    assert step_down(candidate(plain_cache), HOST_FULL, candidate, steps_taken=1) is None


# --- what would fit if the user gave way ---------------------------------------------------------


def given_way(free_bytes: int, facts: ModelFacts | None = None, **asked: Any) -> LaunchPlan:
    free = machine(memory_available_bytes=free_bytes)
    smallest = admit(ladder(hardware=free, facts=facts, **asked), PlanLimits()).considered[-1]

    def candidate(now: Settings, bounds: PlanLimits) -> LaunchPlan:
        names = ("parallel", "ctx_size", "kv_type", "gpu_layers", "extra")
        settings = {name: getattr(now, name) for name in names}
        return planned(facts=facts, hardware=free, bounds=bounds, **settings)

    return largest_that_fits(smallest, Settings(**asked), candidate)


def test_largest_fitting_plan_starts_from_the_users_settings() -> None:
    wanted = planned(facts=LONG, ctx_size=65536, parallel=1)
    half = planned(facts=LONG, ctx_size=32768, parallel=1)
    found = given_way(needed_bytes(half), LONG, ctx_size=65536, parallel=1)
    assert (found.ctx_size_of_slot, found.parallel) == (32768, 1)
    assert given_way(needed_bytes(wanted), LONG, ctx_size=65536, parallel=1).ctx_size_of_slot == 65536


def test_slots_are_given_up_before_context_and_both_before_the_type_of_the_cache() -> None:
    asked: dict[str, Any] = {"ctx_size": 8192, "parallel": 8, "kv_type": "f16"}
    one = given_way(needed_bytes(planned(ctx_size=8192, parallel=1, kv_type="f16")), **asked)
    assert (one.parallel, one.ctx_size_of_slot, one.kv_type) == (1, 8192, "f16")
    packed = given_way(needed_bytes(planned(ctx_size=2048, parallel=1, kv_type="q8_0")), **asked)
    assert (packed.parallel, packed.ctx_size_of_slot, packed.kv_type) == (1, 2048, "q8_0")


def test_a_context_too_short_for_most_uses_is_offered_only_where_nothing_longer_fits() -> None:
    least = planned(ctx_size=256, parallel=1, kv_type="q8_0")
    found = given_way(needed_bytes(least))
    assert (found.parallel, found.ctx_size_of_slot, found.kv_type) == (1, 256, "q8_0")
    assert found.memory.fits
    assert not given_way(needed_bytes(least) - 1).memory.fits


def test_default_cache_is_packed_last() -> None:
    free = machine(memory_available_bytes=needed_bytes(planned(ctx_size=2048, parallel=1, kv_type="q8_0")))
    smallest = replace(unpacked(hardware=free, ctx_size=2048, parallel=1)(PlanLimits()), bounds=PlanLimits())

    def candidate(now: Settings, bounds: PlanLimits) -> LaunchPlan:
        return unpacked(hardware=free, ctx_size=now.ctx_size, parallel=now.parallel)(bounds)

    assert not smallest.memory.fits
    assert largest_that_fits(smallest, Settings(ctx_size=2048, parallel=1), candidate).kv_type == "q8_0"


def test_layers_that_the_device_cannot_hold_are_given_up_before_anything_else() -> None:
    known = capabilities(NEW, replace(GPU, free_bytes=4 * GIB))
    asked = Settings(gpu_layers="all", ctx_size=16384, parallel=2)

    def candidate(now: Settings, bounds: PlanLimits) -> LaunchPlan:
        settings = {name: getattr(now, name) for name in ("gpu_layers", "ctx_size", "parallel")}
        return planned(known, LONG, bounds=bounds, **settings)

    found = largest_that_fits(candidate(asked, PlanLimits()), asked, candidate)
    assert found.memory.fits
    assert (found.gpu_layers, found.ctx_size_of_slot, found.parallel) == (None, 16384, 2)


def test_users_layers_stay_if_the_host_is_too_small() -> None:
    known = capabilities(NEW, GPU)
    asked = Settings(gpu_layers=1, ctx_size=65536, parallel=1)
    free = machine(memory_available_bytes=8 * GIB)

    def candidate(now: Settings, bounds: PlanLimits) -> LaunchPlan:
        return planned(
            known, LONG, free, bounds=bounds, gpu_layers=now.gpu_layers, ctx_size=now.ctx_size, parallel=1
        )

    preferred = candidate(asked, PlanLimits())
    assert preferred.memory.lacks_host
    found = largest_that_fits(preferred, asked, candidate)
    assert found.memory.fits
    assert found.gpu_layers == 1
    assert found.ctx_size_of_slot < 65536


def test_users_arguments_stay_even_if_nothing_fits() -> None:
    found = given_way(6 * GIB, extra=("-c", "131072"))
    assert not found.memory.fits
    assert found.shape.ctx_total == 131072


# --- in general ----------------------------------------------------------------------------------

ASKED = st.fixed_dictionaries(
    {},
    optional={
        "parallel": st.integers(1, 64),
        "ctx_size": st.integers(2, 300_000),
        "kv_type": st.sampled_from(["f16", "q8_0", "q4_0", "f32"]),
        "flash_attn": st.sampled_from(["on", "auto"]),
        "profile": st.sampled_from([None, "latency", "throughput", "memory"]),
    },
)
FREE = st.integers(0, 64 * GIB)
MODELS = st.sampled_from([model(), model(context_length=1000), bert(), model(key_length=80, value_length=80)])


def suits(facts: Any, asked: dict[str, Any]) -> dict[str, Any]:
    odd = facts.key_length % 32
    return {name: given for name, given in asked.items() if not (odd and name == "kv_type")}


@settings(max_examples=examples(25))
@given(facts=MODELS, asked=ASKED, free=FREE)
def test_each_smaller_plan_takes_no_more_and_keeps_the_users_settings(
    facts: Any, asked: dict[str, Any], free: int
) -> None:
    asked = suits(facts, asked)
    admission = admit(ladder(NEW, facts, machine(memory_available_bytes=free), **asked), PlanLimits())
    for before, after in pairwise(admission.considered):
        assert needed_bytes(after) <= needed_bytes(before)
        assert after.memory.context_bytes < before.memory.context_bytes
    # A model without a KV cache has no type of it.
    kept = {"parallel", "ctx_size"} | ({"kv_type"} if has_kv_cache(facts) else set())
    for each in admission.considered:
        given_by_hand = {
            "parallel": each.parallel,
            "ctx_size": each.ctx_size_of_slot,
            "kv_type": each.kv_type,
        }
        asked |= {"ctx_size": min(asked["ctx_size"], facts.context_length)} if "ctx_size" in asked else {}
        assert all(given_by_hand[name] == asked[name] for name in kept & set(asked))
    assert admission.plan.memory.fits == any(each.memory.fits for each in admission.considered)


@settings(max_examples=examples(25))
@given(
    facts=MODELS,
    asked=ASKED,
    ends=st.lists(
        st.sampled_from([HOST_FULL, DEVICE_FULL, SEGFAULT, FLASH_ABORT, OTHER_ABORT]), min_size=4, max_size=9
    ),
    device=st.none() | st.integers(2, 30),
)
def test_ladder_ends_after_three_steps_that_each_change_a_setting(
    facts: Any, asked: dict[str, Any], ends: list[Diagnosis], device: int | None
) -> None:
    known = capabilities(NEW, *([replace(GPU, free_bytes=device * GIB)] if device else []))
    candidate = ladder(known, facts, **suits(facts, asked))
    made, taken = candidate(PlanLimits()), 0
    for end in ends:
        adjustment = step_down(made, end, candidate, steps_taken=taken)
        if adjustment is None:
            continue
        taken += 1
        after = candidate(adjustment.bounds)
        assert adjustment.changes
        assert all(change.before != change.after for change in adjustment.changes)
        if is_out_of_memory(end) and after.gpu_layers == made.gpu_layers:
            assert after.memory.context_bytes < made.memory.context_bytes
        made = after
    assert taken <= MAX_STEPS


def test_a_crash_is_evidence_against_the_cache_only_once_the_weights_were_read() -> None:
    computing = diagnose(
        Exit(None, "SIGSEGV"), ["llama_context: constructing llama_context"], phase="starting"
    )
    named = diagnose(Exit(None, "SIGABRT"), ["/src/fattn.cu:12: GGML_ASSERT(false) failed"], phase="starting")
    other = diagnose(Exit(None, "SIGABRT"), ["/src/ggml.c:12: GGML_ASSERT(false) failed"], phase="starting")
    assert [blames_kv_cache(each) for each in (SEGFAULT, computing, named, other)] == [
        False,
        True,
        True,
        False,
    ]
