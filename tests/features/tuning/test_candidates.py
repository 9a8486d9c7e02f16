"""Which changes are candidates, for builds, machines, models and purposes."""

from __future__ import annotations

from typing import Any

import pytest

from llamasup.core.gguf.facts import Experts, ModelFacts
from llamasup.core.llama_server.argv_builder import read_extra
from llamasup.core.llama_server.plan_limits import PlanLimits
from llamasup.core.planning.measured.tuned import Changes
from llamasup.core.settings.model import Settings
from llamasup.core.system.hardware.devices import Device
from llamasup.core.system.hardware.facts import Hardware
from llamasup.features.tuning.candidates import (
    Candidate,
    Purpose,
    Setup,
    candidates,
    contradict,
    default_profile,
    purpose_of,
)
from tests.core.planning.plans import (
    BUILDS,
    GIB,
    GPU,
    MIDDLE,
    NEW,
    OLD,
    bert,
    capabilities,
    machine,
    model,
    planned,
)

SMALL_GPU = Device("CUDA0", "a GPU", 4 * GIB, 3 * GIB)  # not for all layers


def proposed(*args: Any, **options: Any) -> tuple[Candidate, ...]:
    return candidates(setup_of(*args, **options))


def setup_of(
    purpose: Purpose = "latency",
    build: str = NEW,
    *,
    facts: ModelFacts | None = None,
    hardware: Hardware | None = None,
    devices: tuple[Device, ...] = (),
    environ: dict[str, str] | None = None,
    draft: ModelFacts | None = None,
    bounds: PlanLimits | None = None,
    **settings: Any,
) -> Setup:
    asked = Settings(**({"profile": default_profile(purpose)} | settings))
    known, facts, hardware = capabilities(build, *devices), facts or model(), hardware or machine()
    given = {name: getattr(asked, name) for name in Settings.__struct_fields__}
    made = planned(
        known, facts, hardware, environ=environ, draft=draft, bounds=bounds or PlanLimits(), **given
    )
    extra = read_extra(known, asked.extra)
    return Setup(purpose, known, made, facts, hardware, asked, extra, environ or {})


def names(*args: Any, **options: Any) -> list[str]:
    return [one.name for one in proposed(*args, **options)]


@pytest.mark.parametrize("purpose", ["latency", "throughput", "memory"])
@pytest.mark.parametrize("build", BUILDS)
def test_each_candidate_makes_a_plan_that_differs(build: str, purpose: Purpose) -> None:
    found = proposed(purpose, build)
    assert found
    assert len({one.name for one in found}) == len(found)
    known = capabilities(build)
    for one in found:
        assert all(known.knows(flag) for flag, _ in one.changes.flags)
        assert one.why


def test_threads_of_a_machine_with_two_threads_for_each_core() -> None:
    found = names(hardware=machine(physical_cores=8, cpus_allowed=16))
    assert [name for name in found if name.startswith("--threads ")] == [
        *("--threads 7", "--threads 4", "--threads 1"),
    ]
    assert "--threads-batch 16" in found


def test_a_quota_of_the_cpus_limits_the_threads() -> None:
    found = names(hardware=machine(physical_cores=8, cpus_allowed=16, cpu_quota=4.5))
    counts = [int(name.split()[1]) for name in found if name.startswith("--threads")]
    assert counts
    assert max(counts) <= 4


def pair(one: str, other: str) -> bool:
    words = [text.split() for text in (one, other)]
    first, second = (
        Changes(tuple(zip(each[::2], [*each[1::2], *([None] * (len(each) % 2))], strict=True)))
        for each in words
    )
    assert contradict(first, second) == contradict(second, first)
    return contradict(first, second)


def test_changes_that_exclude_each_other_are_known() -> None:
    q8_0 = "--cache-type-k q8_0 --cache-type-v q8_0"
    assert pair("--flash-attn off", q8_0)
    assert not pair("--flash-attn on", q8_0)
    assert not pair("--flash-attn off", "--cache-type-k f16 --cache-type-v f16")
    assert pair("--batch-size 512", "--ubatch-size 1024")
    assert not pair("--batch-size 512", "--ubatch-size 256")
    assert pair("--gpu-layers 0", "--cpu-moe")
    assert pair("--gpu-layers 0", "--split-mode row")
    assert not pair("--gpu-layers 20", "--cpu-moe")
    assert pair("--parallel 1", "--no-kv-unified")
    assert not pair("--threads 1", "--no-repack")


def test_on_two_cores_one_thread_is_tried() -> None:
    found = names(hardware=machine(physical_cores=2, cpus_allowed=2))
    assert [name for name in found if name.startswith("--threads ")] == ["--threads 1"]


def test_threads_after_the_dashes_stay() -> None:
    found = names(extra=("-t", "2", "-tb", "2"))
    assert not any("--threads" in name for name in found)


def test_a_micro_batch_that_the_plan_has_is_no_candidate() -> None:
    assert not any("--ubatch-size 128" in name for name in names("latency", profile="memory"))


def test_attention_that_a_crash_turned_off_may_come_back() -> None:
    off = setup_of(bounds=PlanLimits(flash_attn_off=True))
    assert "--flash-attn on" in [one.name for one in candidates(off)]


def test_the_user_decides_how_weights_are_loaded() -> None:
    assert not any("mmap" in name for name in names(build=OLD, extra=("--no-mmap",)))


def test_on_a_single_core_threads_are_no_candidates() -> None:
    found = names(hardware=machine(physical_cores=1, cpus_allowed=1))
    assert not any("--threads" in name or "SPIN" in name for name in found)


def test_what_the_user_set_is_not_changed() -> None:
    found = names(threads=3, flash_attn="on", kv_type="f16", extra=("-ub", "256", "--no-repack"))
    for flag in ("--threads", "--flash-attn", "--cache-type", "--ubatch-size", "--batch-size", "repack"):
        assert not any(flag in name for name in found), found


def test_the_users_own_openmp_variables_stay() -> None:
    assert not any("SPIN" in name for name in names(environ={"OMP_WAIT_POLICY": "passive"}))


def test_numa_is_tried_only_on_several_nodes() -> None:
    assert "--numa distribute" in names(hardware=machine(numa_nodes=2))
    assert not any("numa" in name for name in names())


def test_the_number_of_slots_stays_for_latency() -> None:
    assert not any("--parallel" in name for name in names("latency"))
    assert {"--parallel 16", "--parallel 4"} <= set(names("throughput"))
    assert "--parallel 1" in names("memory", profile=None)


def test_slots_that_share_one_context_stay_so() -> None:
    assert "--kv-unified" in names("throughput", profile=None)
    assert not any("unified" in name for name in names("throughput", profile="throughput"))


def test_slots_that_the_user_set_stay() -> None:
    assert not any("--parallel" in name for name in names("throughput", parallel=4))


def test_one_slot_has_no_unified_cache() -> None:
    assert not any("unified" in name for name in names("throughput", parallel=1))


def test_packed_caches_can_alter_answers_and_f16_cannot() -> None:
    lossy = {one.name: one.lossy for one in proposed() if one.group == "kv"}
    assert lossy == {"--cache-type-k q8_0 --cache-type-v q8_0": True}
    of_memory = {one.name: one.lossy for one in proposed("memory") if one.group == "kv"}
    assert of_memory == {"--cache-type-k q4_0 --cache-type-v q4_0": True}
    on_device = {one.name: one.lossy for one in proposed(devices=(SMALL_GPU,)) if one.group == "kv"}
    assert on_device == {"--cache-type-k f16 --cache-type-v f16": False}


def test_heads_that_blocks_do_not_divide_have_no_packed_cache() -> None:
    assert not any("q8_0" in name for name in names(facts=model(key_length=80, value_length=80)))


def test_without_flash_attention_the_cache_is_not_packed_and_the_kernel_is_tried() -> None:
    found = names(extra=())
    assert "--flash-attn off" in found
    off = proposed(flash_attn=None, extra=("-fa", "off"))
    assert not any(one.group in ("kv", "flash") for one in off)


def test_a_packed_cache_keeps_flash_attention() -> None:
    assert "--flash-attn off" not in names(devices=(SMALL_GPU,))


def test_an_encoder_keeps_its_batches_and_has_no_cache() -> None:
    found = names(facts=bert())
    assert found
    for flag in ("--ubatch-size", "--cache-type", "--spec-type", "--flash-attn", "--parallel"):
        assert not any(flag in name for name in found), found
    assert not any("--parallel" in name for name in names("throughput", facts=bert()))


def test_the_prompt_cache_is_tried_only_for_memory() -> None:
    assert not any("--cache-ram" in name for name in names("throughput"))
    assert "--cache-ram 0" in names("memory", profile=None)


def test_repacking_depends_on_the_weights_and_the_plan() -> None:
    assert "--no-repack" in names()
    assert "--no-repack" not in names(facts=model(quantization="F16"))
    small = machine(address_space_limit_bytes=8 * GIB)
    tight = names(hardware=small, profile=None, check_memory=False)
    assert ("--repack" in tight) != ("--no-repack" in tight)
    assert not any("repack" in name for name in names("memory"))


def test_loading_without_a_map_is_tried_as_the_build_spells_it() -> None:
    assert "--load-mode none" in names()
    assert "--no-mmap" in names(build=OLD)
    assert not any("mmap" in name for name in names("memory"))


def test_locked_weights_stay_mapped() -> None:
    rich = machine(memlock_limit_bytes=None)
    assert not any("--load-mode" in name for name in names(hardware=rich, facts=model(quantization="F16")))


def test_draft_lengths_are_tried_with_a_draft_model() -> None:
    found = [
        one
        for one in proposed(draft_model="/models/draft.gguf", draft=model(layers=4, file_bytes=GIB))
        if one.group == "draft"
    ]
    assert [one.name for one in found if "n-max" in one.name] == [
        f"--spec-draft-n-max {length}" for length in (2, 3, 4, 6, 12, 16)
    ]
    assert [(one.name, one.lossy) for one in found if "none" in one.name] == [("--spec-type none", False)]
    assert all(one.lossy for one in found if "n-max" in one.name)


def test_a_build_of_2025_may_leave_the_draft_model_out() -> None:
    draft = {"draft_model": "/models/draft.gguf", "draft": model(layers=4, file_bytes=GIB)}
    found = {one.name: one for one in proposed(build=MIDDLE, **draft) if one.group == "draft"}
    assert found["--draft-max 0"].lossy is False
    assert found["--draft-max 4"].lossy
    assert "--draft-max 0" not in names(build=MIDDLE)
    assert not any("--draft-max" in name for name in names(build=MIDDLE, extra=("--draft-max", "4"), **draft))


def test_a_model_that_drafts_for_itself_may_stop_to() -> None:
    facts = model(mtp_layers=1, drafts_itself=True)
    found = names(facts=facts)
    assert "--spec-type none" in found


def test_drafts_from_the_context_are_tried_without_a_draft_model() -> None:
    assert "--spec-type ngram-simple" in names()
    assert not any("ngram" in name for name in names(build=MIDDLE))
    assert not any("ngram" in name for name in names(extra=("--spec-type", "none")))


def test_placement_is_tried_only_on_devices() -> None:
    assert not any("--gpu-layers" in name for name in names())
    found = names(devices=(GPU,))
    assert "--gpu-layers 0" in found
    assert not any("--split-mode" in name for name in found)
    assert not any("--gpu-layers" in name for name in names(devices=(GPU,), gpu_layers=20))


def test_layers_that_do_not_all_fit_move_a_little() -> None:
    found = [name for name in names(devices=(SMALL_GPU,)) if "--gpu-layers" in name]
    assert len(found) == 3


def test_experts_and_split_modes_are_tried_where_they_exist() -> None:
    facts = model(experts=Experts(count=8, used=2))
    found = names(facts=facts, devices=(GPU, Device("CUDA1", "a GPU", 24 * GIB, 22 * GIB)))
    assert {"--n-cpu-moe 16", "--cpu-moe", "--split-mode row", "--split-mode none"} <= set(found)
    assert not any("moe" in name for name in names(facts=facts))


def test_the_purpose_follows_the_profile() -> None:
    assert purpose_of(None, None) == "latency"
    assert purpose_of(None, "throughput") == "throughput"
    assert purpose_of("memory", None) == "memory"
    assert default_profile("latency") is None
    assert default_profile("memory") == "memory"
