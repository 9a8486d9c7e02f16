"""The choices of each profile beyond its numbers."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.llama_server.diagnosis import diagnose
from llamasup.core.llama_server.plan_limits import PlanLimits
from llamasup.core.planning.ladder import admit, step_down
from llamasup.core.planning.projectors import Candidate, Pairing
from llamasup.core.settings.model import Profile
from llamasup.core.system.process.child import Exit
from tests.core.planning.plans import (
    BUILDS,
    GIB,
    GPU,
    MIDDLE,
    NEW,
    OLD,
    SMALL_GPU,
    bert,
    capabilities,
    ladder,
    machine,
    model,
    planned,
    reason,
    value,
)

# What the model cannot be reached, named or served without.
ESSENTIAL = {"--model", "--alias", "--host", "--port"}
PROFILES: tuple[Profile | None, ...] = (None, "latency", "throughput", "memory", "plain")


def flags(argv: tuple[str, ...]) -> set[str]:
    return {word for word in argv[1:] if word.startswith("--")}


@pytest.mark.parametrize("build", BUILDS)
def test_plain_passes_the_model_its_address_and_nothing_else(build: str) -> None:
    made = planned(build, profile="plain")
    assert flags(made.argv) - {"--api-key-file"} <= ESSENTIAL


@pytest.mark.parametrize(
    ("asked", "passed"),
    [
        ({"ctx_size": 4096}, {"--ctx-size": "16384"}),
        ({"parallel": 2}, {"--parallel": "2"}),
        ({"threads": 3}, {"--threads": "3"}),
        (
            {"kv_type": "q8_0", "flash_attn": "on"},
            {"--cache-type-k": "q8_0", "--cache-type-v": "q8_0", "--flash-attn": "on"},
        ),
        ({"gpu_layers": 0}, {"--gpu-layers": "0"}),
    ],
)
def test_plain_passes_the_users_settings(asked: dict[str, Any], passed: dict[str, str]) -> None:
    made = planned(profile="plain", **asked)
    assert flags(made.argv) - ESSENTIAL == set(passed)
    assert all(value(made, flag) == given for flag, given in passed.items())


def test_plain_passes_the_users_arguments() -> None:
    assert planned(profile="plain", extra=("--temp", "0.5", "-c", "512")).argv[-4:] == (
        "--temp",
        "0.5",
        "-c",
        "512",
    )


def test_plain_still_enables_embeddings() -> None:
    assert "--embedding" in planned(facts=bert(), profile="plain").argv


def test_plain_gives_a_reason_for_everything_that_it_leaves_out() -> None:
    made = planned(profile="plain")
    left_out = {each.flag for each in made.reasons if not each.passed}
    assert {"--threads", "--ctx-size", "--flash-attn", "--cache-ram"} <= left_out
    assert all(each.reason for each in made.reasons)


def test_latency_is_for_one_request_and_throughput_for_many() -> None:
    latency, usual, throughput = (planned(profile=name).parallel for name in ("latency", None, "throughput"))
    assert latency == 1
    assert latency < throughput
    assert usual <= throughput


def test_memory_takes_least_and_keeps_nothing_that_it_does_not_need() -> None:
    lean = planned(profile="memory")
    for other in (None, "latency", "throughput"):
        assert lean.memory.total_bytes < planned(profile=other).memory.total_bytes
    assert lean.memory.prompt_cache_bytes == 0
    assert not {"--mlock", "--load-mode"} & flags(planned(capabilities(NEW), profile="memory").argv)


def test_no_profile_overrides_the_users_settings() -> None:
    for profile in ("latency", "throughput", "memory", "plain"):
        made = planned(profile=profile, ctx_size=3000, parallel=3, kv_type="f16", threads=2)
        assert (made.ctx_size_of_slot, made.parallel, made.kv_type) == (3000, 3, "f16")
        assert value(made, "--threads") == "2"


# --- the KV cache --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "roomy", "scarce"),
    [
        (None, "f16", "q8_0"),
        ("latency", "f16", "q8_0"),
        ("throughput", "f16", "q8_0"),
        ("memory", "q8_0", "q8_0"),
        ("plain", "f16", "f16"),
    ],
)
def test_a_cache_is_packed_only_to_save_memory(profile: Profile | None, roomy: str, scarce: str) -> None:
    assert planned(profile=profile).kv_type == roomy
    assert planned(capabilities(NEW, GPU), profile=profile).kv_type == roomy
    assert planned(capabilities(NEW, SMALL_GPU), profile=profile).kv_type == scarce
    assert planned(capabilities(NEW, SMALL_GPU), profile=profile, gpu_layers=0).kv_type == roomy


def test_a_cache_on_a_device_is_packed_where_that_leaves_room_for_more_layers() -> None:
    """Generation with f16 is 9 to 19 % faster on an H100 (docs/gpu.md), with fewer layers there slower."""
    all_layers = model().layers + 1
    needed = planned(capabilities(NEW, GPU)).memory.device_bytes + GIB  # --fit leaves 1 GiB free
    for free_bytes, kv_type in ((needed, "f16"), (needed - 1, "q8_0")):
        made = planned(capabilities(NEW, replace(GPU, free_bytes=free_bytes)))
        assert (made.kv_type, made.memory.gpu_layers) == (kv_type, all_layers)
    assert "makes generation slower" in reason(planned(capabilities(NEW, GPU)), "--cache-type-k")


def test_a_fixed_number_of_layers_gets_f16_where_it_fits() -> None:
    assert planned(capabilities(NEW, SMALL_GPU), gpu_layers=4).kv_type == "f16"
    assert planned(capabilities(NEW, SMALL_GPU), gpu_layers="all").kv_type == "q8_0"


def test_a_cache_is_packed_where_other_models_need_the_device() -> None:
    assert planned(capabilities(NEW, GPU), shared=True).kv_type == "q8_0"
    assert planned(capabilities(NEW, replace(GPU, shares_host_memory=True))).kv_type == "q8_0"


def test_reason_names_the_default_or_the_packed_cache() -> None:
    assert "a third of the speed" in reason(planned(), "--cache-type-k")
    assert "half the memory" in reason(planned(profile="memory"), "--cache-type-k")


# --- slots over shared cells ---------------------------------------------------------------------


def test_throughput_lets_a_long_request_use_the_free_context_of_others() -> None:
    made = planned(facts=model(context_length=32768), profile="throughput")
    assert "--kv-unified" in made.argv
    assert made.shape.unified
    assert (made.parallel, made.ctx_size_of_slot, made.ctx_size) == (8, 4096, 32768)
    assert "can use what the others leave" in reason(made, "--ctx-size")


def test_no_request_gets_more_than_the_models_trained_context() -> None:
    made = planned(facts=model(context_length=8192), profile="throughput")
    assert (made.shape.ctx_total, made.ctx_size) == (32768, 8192)


@pytest.mark.parametrize(
    ("build", "facts", "rest"),
    [
        (OLD, model(), {}),  # no such flag
        (MIDDLE, model(), {}),  # each slot would still get its part alone
        (NEW, bert(), {}),  # no decoder
        (NEW, model(), {"parallel": 1}),  # nobody to share with
        (NEW, model(), {"bounds": PlanLimits(parallel=1)}),
        (NEW, model(), {"extra": ("--no-kv-unified",)}),
        (NEW, model(), {"profile": "latency", "parallel": 8}),
        (NEW, model(), {"profile": None}),
    ],
)
def test_cells_are_not_shared_if_impossible_or_disabled(
    build: str, facts: ModelFacts, rest: dict[str, Any]
) -> None:
    made = planned(build, facts, **({"profile": "throughput"} | rest))
    assert "--kv-unified" not in made.argv
    assert not made.shape.unified
    assert made.ctx_size == made.ctx_size_of_slot


def test_users_kv_unified_is_not_passed_twice() -> None:
    made = planned(profile="throughput", extra=("-kvu",))
    assert made.shape.unified
    assert made.argv[-1] == "-kvu"
    assert "--kv-unified" not in made.argv


# --- memory --------------------------------------------------------------------------------------


def test_profile_memory_passes_the_flags_that_save_memory() -> None:
    made = planned(profile="memory")
    assert {flag: value(made, flag) for flag in ("--cache-ram", "--ctx-checkpoints", "--ubatch-size")} == {
        "--cache-ram": "0",
        "--ctx-checkpoints": "0",
        "--ubatch-size": "128",
    }
    assert "--no-repack" in made.argv
    assert (made.parallel, made.ctx_size_of_slot) == (1, 4096)
    free_to_lock = planned(
        facts=model(quantization="F16"), hardware=machine(memlock_limit_bytes=None), profile="memory"
    )
    assert "lets the system drop weights from memory" in reason(free_to_lock, "--load-mode")


@pytest.mark.parametrize("profile", [None, "latency", "throughput"])
def test_other_profiles_do_not_pass_these_flags(profile: Profile | None) -> None:
    assert not {"--ctx-checkpoints", "--no-repack"} & flags(planned(profile=profile).argv)


@pytest.mark.parametrize("quantization", ["Q4_K_M", "Q8_0", "IQ4_NL", "MXFP4"])
def test_weights_that_are_rewritten_for_the_cpu_are_not_locked(quantization: str) -> None:
    ample = machine(memlock_limit_bytes=None)
    made = planned(facts=model(quantization=quantization), hardware=ample)
    assert "--load-mode" not in made.argv
    assert "would lock the copy that it does not use" in reason(made, "--load-mode")
    as_they_are = planned(facts=model(quantization="BF16"), hardware=ample)
    assert value(as_they_are, "--load-mode") == "mmap+mlock"


# --- threads that wait ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "count"),
    [(None, "3000"), ("latency", "3000"), ("throughput", "1000"), ("memory", "3000"), ("plain", None)],
)
def test_waiting_threads_spin_shortly_and_the_plan_gives_the_reason(
    profile: Profile | None, count: str | None
) -> None:
    made = planned(profile=profile)
    assert made.env.get("GOMP_SPINCOUNT") == made.env_shown.get("GOMP_SPINCOUNT") == count
    assert ("GOMP_SPINCOUNT" in made.env_reasons) == (count is not None)
    if count is not None:
        assert "threads sleep soon" in made.env_reasons["GOMP_SPINCOUNT"]


@pytest.mark.parametrize(
    ("name", "given"), [("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "")]
)
def test_how_threads_wait_is_the_users_where_they_set_it(name: str, given: str) -> None:
    made = planned(environ={name: given})
    assert {key: said for key, said in made.env.items() if key.startswith(("OMP_", "GOMP_"))} == {name: given}
    assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & made.env_reasons.keys()


def test_another_setting_of_openmp_changes_nothing() -> None:
    made = planned(environ={"OMP_NUM_THREADS": "2"})
    assert made.env["GOMP_SPINCOUNT"] == "3000"


@pytest.mark.parametrize("profile", PROFILES)
def test_every_variable_with_a_reason_is_in_the_environment(profile: Profile | None) -> None:
    made = planned(profile=profile, environ={"PATH": "/usr/bin", "HOME": "/home/a"})
    assert made.env_reasons.keys() == made.env.keys() - {"PATH", "HOME"}
    assert all(made.env_reasons.values())


# --- plain: llama-server's own choice ------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "asked", "slots", "per_request", "total"),
    [
        # What b11434 says of itself under /props: tests/real/test_plain.py.
        (NEW, {}, 4, 131072, 131072),
        (NEW, {"parallel": 2}, 2, 131072, 262144),
        (NEW, {"parallel": 2, "extra": ("-kvu",)}, 2, 131072, 131072),
        (NEW, {"ctx_size": 1024}, 4, 4096, 4096),
        (NEW, {"ctx_size": 1024, "parallel": 2}, 2, 1024, 2048),
        (NEW, {"extra": ("--no-kv-unified",)}, 4, 131072, 131072),
        # What the help of older builds says: "(default: 4096, …)" and "(default: 0, …)", one slot.
        (MIDDLE, {}, 1, 4096, 4096),
        (OLD, {}, 1, 131072, 131072),
    ],
)
def test_plain_shows_the_slots_and_the_context_that_llama_server_takes_by_itself(
    build: str, asked: dict[str, Any], slots: int, per_request: int, total: int
) -> None:
    made = planned(build, model(context_length=131072), profile="plain", **asked)
    assert (made.parallel, made.ctx_size, made.shape.ctx_total) == (slots, per_request, total)


def test_plain_counts_the_batches_and_the_prompt_cache_of_llama_server() -> None:
    made = planned(profile="plain")
    assert (made.shape.ubatch, made.memory.prompt_cache_bytes) == (512, 8 * GIB)
    assert planned(MIDDLE, profile="plain").memory.prompt_cache_bytes == 0
    assert planned(facts=bert(context_length=8192), profile="plain").shape.ubatch == 512


def test_plain_does_not_change_the_builds_flash_attention() -> None:
    assert planned(profile="plain").kv.flash == "auto"
    assert planned(MIDDLE, profile="plain").kv.flash == "off"
    packed = planned(MIDDLE, profile="plain", kv_type="q8_0")
    assert "--flash-attn" in packed.argv  # or llama-server would end: its V cache needs it


HEAD = model(model_class=ModelClass.DRAFT, architecture="eagle3", layers=1, weights_bytes=GIB // 4)


@pytest.mark.parametrize(
    ("build", "draft", "passed"),
    [
        (NEW, model(layers=4), {"--spec-draft-model": "/d.gguf", "--spec-type": "draft-simple"}),
        (NEW, HEAD, {"--spec-draft-model": "/d.gguf", "--spec-type": "draft-eagle3"}),
        (MIDDLE, model(layers=4), {"--model-draft": "/d.gguf"}),
    ],
)
def test_plain_passes_a_draft_model_with_the_flags_that_it_needs(
    build: str, draft: ModelFacts, passed: dict[str, str]
) -> None:
    made = planned(build, draft=draft, draft_model="/d.gguf", profile="plain")
    assert {flag: value(made, flag) for flag in flags(made.argv) - ESSENTIAL} == passed
    extra_args = planned(draft=draft, extra=("--spec-draft-model", "/d.gguf"), profile="plain")
    assert flags(extra_args.argv) - ESSENTIAL == {"--spec-draft-model", "--spec-type"}


def test_plain_does_not_draft_with_the_models_own_layers() -> None:
    made = planned(facts=model(mtp_layers=1, drafts_itself=True), profile="plain")
    assert flags(made.argv) == ESSENTIAL
    assert made.memory.draft_bytes == 0


def test_plain_passes_the_users_projector_and_not_a_found_one() -> None:
    eyes = model(model_class=ModelClass.PROJECTOR, weights_bytes=GIB, embedding_length=4096)
    asked = planned(mmproj="/eyes.gguf", projector=eyes, profile="plain")
    assert value(asked, "--mmproj") == "/eyes.gguf"
    assert asked.memory.weights_bytes == 6 * GIB
    beside = Pairing(Candidate("/models/eyes.gguf", eyes), "its name matches the model's")
    found = planned(found=beside, profile="plain")
    assert "--mmproj" not in found.argv
    assert found.memory.weights_bytes == 5 * GIB
    assert planned(found=beside).memory.weights_bytes == 6 * GIB


def test_a_projector_that_the_build_cannot_load_takes_no_memory() -> None:
    eyes = model(model_class=ModelClass.PROJECTOR, weights_bytes=GIB)
    known = capabilities(NEW)
    blind = replace(known, options=tuple(each for each in known.options if "--mmproj" not in each.spellings))
    made = planned(blind, found=Pairing(Candidate("/models/eyes.gguf", eyes), "beside it"))
    assert "cannot read images" in reason(made, "--mmproj")
    assert made.memory.weights_bytes == 5 * GIB


def test_plain_is_not_checked_reduced_or_bounded_by_earlier_failures() -> None:
    nothing = machine(memory_available_bytes=1)
    candidate = ladder(hardware=nothing, profile="plain")
    made = candidate(PlanLimits())
    assert not made.checked
    assert made.adjustable == frozenset()
    assert admit(candidate, PlanLimits()).considered == (made,)
    for end, line in ((1, "std::bad_alloc"), (None, "")):
        failed = diagnose(Exit(end, None if end else "SIGSEGV"), [line], phase="starting")
        assert step_down(made, failed, candidate, steps_taken=0) is None
    bounds = PlanLimits(1, 2048, "q8_0", flash_attn_off=True, gpu_layers=1, why="it crashed")
    assert candidate(bounds) == made
