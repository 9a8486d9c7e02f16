"""Turns facts into a command line in each build's spelling, with a reason for every flag."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.gguf.tensor_types import KV_CACHE_TYPES
from llamasup.core.http.address import TcpAddress, UnixAddress
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.llama_server.slots.policy import SlotHome
from llamasup.core.planning.plan import LaunchPlan, child_address_kind, needs_key_file
from llamasup.core.planning.plan_report import plan_as_json, refusal
from llamasup.core.settings.model import Settings
from llamasup.errors import LlamasupError, ModelInvalid, RuntimeMissing, UsageInvalid
from tests.core.planning.plans import (
    BUILDS,
    GIB,
    GPU,
    JULY,
    MIDDLE,
    NEW,
    OLD,
    SMALL_GPU,
    bert,
    capabilities,
    from_help,
    machine,
    model,
    planned,
    reason,
    value,
)

SERVED = {
    "decoder": model(),
    "decoder with odd heads": model(key_length=80, value_length=80),
    "recurrent decoder": model(architecture="mamba", head_counts_kv=(0,) * 32, key_length=0, value_length=0),
    "encoder": bert(),
    "encoder with a KV cache": model(model_class=ModelClass.ENCODER, pooling="last"),
    "reranker": bert(ModelClass.RERANKER),
    "encoder-decoder": model(architecture="t5", model_class=ModelClass.ENCODER_DECODER),
}
# Of a type that b11434 does not rewrite for the CPU: what it maps is what it uses, and may be locked.
UNPACKED_WEIGHTS = model(quantization="F16")
SOME_SETTINGS: dict[str, dict[str, Any]] = {
    "nothing set": {},
    "sizes": {"ctx_size": 1000, "parallel": 3, "threads": 2, "alias": "m"},
    "f16, flash on": {"kv_type": "f16", "flash_attn": "on"},
    "flash off": {"flash_attn": "off"},
    "flash auto": {"flash_attn": "auto"},
    "arguments of its own": {"extra": ("-c", "4096", "--temp", "0.5", "-fa"), "parallel": 2},
}


def flags_in(argv: tuple[str, ...], known: Capabilities) -> list[str]:
    """The flags of a command line, read as that build reads it."""
    found, words = [], list(argv[1:])
    while words:
        flag = words.pop(0)
        option = known.find(flag)
        assert option is not None, f"{flag} is unknown to this build"
        found.append(flag)
        del words[: option.arity]
    return found


# --- every build, every class --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "served"),
    # The oldest cannot rerank: a test of its own.
    [(build, served) for build in BUILDS for served in SERVED if (build, served) != (OLD, "reranker")],
)
@pytest.mark.parametrize("settings", SOME_SETTINGS.values(), ids=SOME_SETTINGS.keys())
def test_a_build_is_given_only_flags_that_it_accepts_and_each_has_a_reason(
    build: str, served: str, settings: dict[str, Any]
) -> None:
    known = capabilities(build)
    flash = known.find("-fa")
    if "extra" in settings and flash is not None and flash.argument is not None:
        settings = settings | {"extra": (*settings["extra"], "on")}
    made = planned(build, SERVED[served], **settings)
    flags = flags_in(made.argv, known)
    assert [flag for flag in flags if known.knows(flag) is None] == []
    explained = {each.flag for each in made.reasons if each.passed and each.reason}
    assert set(flags) == explained
    assert len(flags) == len(set(flags)), "a flag is given twice"


@given(
    build=st.sampled_from(BUILDS),
    facts=st.sampled_from(tuple(SERVED.values())),
    cpus=st.integers(1, 256),
    cores=st.integers(1, 256),
    quota=st.none() | st.floats(0.01, 300),
    available=st.integers(0, 1 << 40),
    memlock=st.none() | st.integers(0, 1 << 40),
    priority=st.booleans(),
    settings=st.builds(
        Settings,
        alias=st.none() | st.just("name"),
        ctx_size=st.none() | st.integers(-1, 1 << 32),
        parallel=st.none() | st.integers(-2, 300),
        gpu_layers=st.none() | st.sampled_from(["auto", "all"]) | st.integers(-1, 99),
        threads=st.none() | st.integers(-1, 300),
        kv_type=st.none() | st.sampled_from([*KV_CACHE_TYPES, "q9_9"]),
        flash_attn=st.none() | st.sampled_from(["on", "off", "auto"]),
        draft_model=st.none() | st.just("/models/draft.gguf"),
        mmproj=st.none() | st.just("/models/mmproj.gguf"),
        extra=st.sampled_from([(), ("-t", "1"), ("--ctx-size", "0"), ("-np", "2"), ("--mlock",), ("-x",)]),
    ),
)
def test_no_settings_pass_an_unknown_flag_or_too_many_threads(
    build: str,
    facts: Any,
    cpus: int,
    cores: int,
    quota: float | None,
    available: int,
    memlock: int | None,
    priority: bool,
    settings: Settings,
) -> None:
    known = capabilities(build)
    hardware = machine(
        cpus_allowed=cpus,
        physical_cores=min(cores, cpus),
        cpu_quota=quota,
        memory_available_bytes=available,
        memlock_limit_bytes=memlock,
        may_raise_priority=priority,
    )
    draft = model(layers=4, weights_bytes=GIB // 4) if settings.draft_model else None
    try:
        made = planned(
            build,
            facts,
            hardware,
            draft=draft,
            **{name: getattr(settings, name) for name in Settings.__struct_fields__},
        )
    except LlamasupError as error:
        said = (error.message, error.remedy)
        assert all(said), f"an error without advice: {error!r}"  # noqa: PT017 - either outcome is right
        return
    assert all(known.knows(flag) for flag in flags_in(made.argv, known))
    for flag in ("-t", "--threads", "--threads-batch"):
        assert 1 <= int(value(made, flag) or 1) <= cpus
    assert made.memory.total_bytes > 0
    assert made.parallel >= 1
    assert made.ctx_size >= 1


# --- the classic tuned command line, in three spellings ------------------------------------------


def test_the_newest_build_gets_the_classic_command_line_in_its_own_words() -> None:
    hardware = machine(memlock_limit_bytes=None, may_raise_priority=True)
    draft: dict[str, Any] = {"draft": model(layers=4), "draft_model": "/models/draft.gguf"}
    made = planned(NEW, UNPACKED_WEIGHTS, hardware, kv_type="q8_0", **draft)
    assert made.argv == (
        *("/opt/llama/llama-server", "--model", "/models/example-8b.gguf", "--alias", "example-8b"),
        *("--host", "/run/llamasup/1/a.sock", "--port", "0"),
        *("--ctx-size", "32768", "--parallel", "4", "--cont-batching"),
        *("--batch-size", "2048", "--ubatch-size", "512"),
        *("--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"),
        *("--threads", "8", "--threads-batch", "8"),
        *("--load-mode", "mmap+mlock", "--cache-ram", value(made, "--cache-ram")),
        *("--spec-draft-model", "/models/draft.gguf", "--spec-type", "draft-simple"),
        *("--spec-draft-n-max", "8", "--spec-draft-type-k", "q8_0", "--spec-draft-type-v", "q8_0"),
        *("--jinja", "--metrics", "--slots", "--verbosity", "4"),
    )
    assert (made.ctx_size, made.parallel, made.kv_type) == (8192, 4, "q8_0")
    assert made.api_key is None


def test_a_build_of_2025_gets_a_bare_flash_attention_switch_mlock_and_draft_max() -> None:
    hardware = machine(memlock_limit_bytes=None, may_raise_priority=True)
    draft: dict[str, Any] = {"draft": model(layers=4), "draft_model": "/models/draft.gguf"}
    made = planned(MIDDLE, UNPACKED_WEIGHTS, hardware, kv_type="q8_0", **draft)
    after_flash = made.argv[made.argv.index("--flash-attn") + 1]
    assert after_flash == "--cache-type-k"
    assert "--mlock" in made.argv
    assert value(made, "--model-draft") == "/models/draft.gguf"
    assert value(made, "--draft-max") == "8"
    assert value(made, "--ctx-size-draft") == "32768"
    assert value(made, "--cache-type-k-draft") == "q8_0"
    assert "--cache-ram" not in made.argv
    assert "--gpu-layers-draft" not in made.argv


def test_build_of_2024_gets_only_its_flags_and_reports_the_rest_as_left_out() -> None:
    made = planned(OLD, hardware=machine(may_raise_priority=True), kv_type="q8_0")
    assert value(made, "--host") == "127.0.0.1"
    assert value(made, "--port") == "40001"
    assert value(made, "--api-key-file") == "/run/llamasup/1/key"
    assert made.argv[made.argv.index("--flash-attn") + 1] == "--cache-type-k"
    left_out = {each.flag: each.reason for each in made.reasons if not each.passed}
    assert left_out["--prio"] == "left out: this build does not have it"
    assert {"--alias", "--jinja", "--slots", "--cache-ram"} <= left_out.keys()
    assert all(text.startswith("left out: ") for text in left_out.values())


def test_build_between_mlock_and_load_mode_does_not_lock() -> None:
    modes = "--load-mode MODE    how\n                    - none: no\n                    - mlock: yes\n"
    made = planned(from_help(modes), UNPACKED_WEIGHTS, machine(memlock_limit_bytes=None))
    assert "--load-mode" not in made.argv
    assert "this build does not have it" in reason(made, "--mlock")


def test_build_that_has_load_mode_and_calls_mlock_deprecated_gets_load_mode() -> None:
    both = (
        "--mlock    DEPRECATED in favor of `--load-mode`: force system to keep model in RAM\n"
        "--mmap, --no-mmap    DEPRECATED in favor of `--load-mode`: whether to memory-map model\n"
        "--load-mode MODE    how\n                    - none: no\n                    - mmap+mlock: both\n"
    )
    hardware = machine(memlock_limit_bytes=None)
    made = planned(from_help(both), UNPACKED_WEIGHTS, hardware)
    assert value(made, "--load-mode") == "mmap+mlock"
    assert "--mlock" not in made.argv
    for old in ("--mlock", "--no-mmap"):
        chosen = planned(from_help(both), UNPACKED_WEIGHTS, hardware, extra=(old,))
        assert value(chosen, "--load-mode") is None
        assert f"left out: {old} after -- sets how the weights are loaded" == reason(chosen, "--load-mode")


# --- context, slots, batches ---------------------------------------------------------------------


def test_context_is_given_over_all_slots_and_the_reason_shows_the_product() -> None:
    made = planned(ctx_size=5000, parallel=3)
    assert value(made, "--ctx-size") == "15000"
    assert "5000 tokens for each of 3 slots" in reason(made, "--ctx-size")
    assert (made.ctx_size, made.parallel) == (5000, 3)
    assert "5000 tokens for the only slot" in reason(planned(ctx_size=5000, parallel=1), "--ctx-size")


def test_context_is_never_above_the_models_own_unless_asked_of_a_build_that_gives_it() -> None:
    small = model(context_length=2048)
    assert planned(facts=small).ctx_size == 2048
    asked = planned(MIDDLE, facts=small, ctx_size=4096)
    assert (asked.ctx_size, asked.ctx_size_of_slot, asked.warnings) == (4096, 4096, ())
    assert "above the 2048 that the model was trained for" in reason(asked, "--ctx-size")


@pytest.mark.parametrize(
    ("build", "settings", "per_request", "total"),
    [
        pytest.param(NEW, {"ctx_size": 100_000}, 2048, 8192, id="a number far above"),
        pytest.param(JULY, {"ctx_size": 100_000, "parallel": 1}, 2048, 2048, id="one slot"),
        pytest.param(
            NEW, {"ctx_size": 4096, "profile": "throughput"}, 2048, 8 * 2048, id="one context for all"
        ),
        pytest.param(NEW, {"ctx_size": 4096, "profile": "plain"}, 2048, 8192, id="plain"),
        pytest.param(NEW, {"extra": ("-c", "100000")}, 2048, 100_000, id="passed on as it is"),
        # ggml-org/llama.cpp#22140: in builds before August 2026, YaRN does not raise the limit either.
        pytest.param(
            *(JULY, {"ctx_size": 8192, "extra": ("--rope-scaling", "yarn", "--rope-scale", "4")}, 2048, 8192),
            id="YaRN in an older build",
        ),
        # meta-models/meta-oss-cookbook#37: other scaling does not raise the limit.
        pytest.param(
            *(
                NEW,
                {"ctx_size": 8192, "extra": ("--rope-scaling", "linear", "--rope-scale", "4")},
                2048,
                8192,
            ),
            id="linear",
        ),
        pytest.param(
            *(NEW, {"ctx_size": 8192, "extra": ("--rope-scaling", "yarn", "--rope-scale", "2x")}, 2048, 8192),
            id="no number",
        ),
    ],
)
def test_a_context_above_the_models_own_is_cut_with_a_warning(
    build: str, settings: dict[str, Any], per_request: int, total: int
) -> None:
    made = planned(build, facts=model(context_length=2048), **settings)
    assert (made.ctx_size, made.shape.ctx_total) == (per_request, total)
    ((message, remedy),) = made.warnings
    asked = settings.get("ctx_size", 100_000)
    assert message.startswith(f"--ctx-size {asked} is more than the 2048 tokens that the model was trained")
    assert message.endswith("gives no request more: 2048 are used.")
    assert remedy.startswith("Set --ctx-size to 2048 or less")


@pytest.mark.parametrize(
    ("build", "settings", "per_request", "total"),
    [
        # ggml-org/llama.cpp#28030
        pytest.param(
            *(
                NEW,
                {"ctx_size": 8192, "extra": ("--rope-scaling", "yarn", "--rope-scale", "4")},
                8192,
                32_768,
            ),
            id="YaRN",
        ),
        pytest.param(
            NEW,
            {
                "ctx_size": 4096,
                "extra": (*("--rope-scaling", "yarn", "--rope-scale", "4"), *("--yarn-orig-ctx", "1024")),
            },
            *(4096, 16_384),
            id="YaRN with another original context",
        ),
        # ggml-org/llama.cpp#17459
        pytest.param(
            *(
                JULY,
                {"ctx_size": 8192, "extra": ("--override-kv", "llama.context_length=int:8192")},
                8192,
                32_768,
            ),
            id="another trained length",
        ),
        pytest.param(
            JULY,
            {
                "ctx_size": 8192,
                "extra": ("--override-kv", "llama.rope.freq_base=float:2e6,llama.context_length=int:9000"),
            },
            *(8192, 32_768),
            id="several settings",
        ),
        pytest.param(NEW, {"extra": ("-c", "8192")}, 2048, 8192, id="shared by the slots"),
    ],
)
def test_a_context_that_requests_can_use_is_not_cut(
    build: str, settings: dict[str, Any], per_request: int, total: int
) -> None:
    made = planned(build, facts=model(context_length=2048), **settings)
    assert (made.ctx_size, made.shape.ctx_total, made.warnings) == (per_request, total, ())


def test_a_file_that_names_no_context_gets_the_default() -> None:
    assert planned(facts=model(context_length=0)).ctx_size == 8192


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ctx_size": 0}, "--ctx-size 0"),
        ({"ctx_size": 1}, "--ctx-size 1"),
        ({"ctx_size": -5}, "--ctx-size -5"),
        ({"ctx_size": 2**31}, "--ctx-size times --parallel 8589934592"),
        ({"parallel": 0}, "--parallel 0"),
        ({"parallel": 257}, "--parallel 257"),
        ({"threads": 0}, "--threads 0"),
        ({"threads": 17}, "--threads 17"),
        ({"gpu_layers": -1}, "--gpu-layers -1"),
        ({"extra": ("-c", "-1")}, "--ctx-size -1"),
        ({"extra": ("-np", "0")}, "--parallel 0"),
        ({"extra": ("-t", "-1")}, "--threads -1"),
        ({"extra": ("-tb", "99")}, "--threads-batch 99"),
        ({"extra": ("-c", "7", "-np", "4")}, "--ctx-size 7"),
        ({"extra": ("-b", "3")}, "--batch-size 3"),
        ({"extra": ("-ub", "-3")}, "--ubatch-size -3"),
    ],
)
def test_number_out_of_range_is_refused_with_value_and_allowed_range(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageInvalid) as refused:
        planned(**settings)
    assert refused.value.message == f"{says} is out of range"
    assert refused.value.remedy.startswith("Give ")
    assert refused.value.exit_code == 2


def test_embeddings_get_batches_as_large_as_a_request() -> None:
    long = bert(context_length=8192, pooling="cls")
    made = planned(facts=long)
    assert (value(made, "--batch-size"), value(made, "--ubatch-size")) == ("8192", "8192")
    assert "--embedding" in made.argv
    assert "--pooling" not in made.argv
    assert "--jinja" not in made.argv
    assert value(made, "--cache-ram") == "0"


@pytest.mark.parametrize(
    ("kind", "micro"),
    [
        *((kind, "512") for kind in ("openjev", "lev", "nimble", "pplx-decider", "lfm2-d1")),
        *((kind, "8192") for kind in ("kev", "laya", "clef", "lfm2-d1-omni", "future-d9", "unknown")),
    ],
)
def test_a_decision_gets_the_micro_batch_that_its_type_needs(kind: str, micro: str) -> None:
    """llama.cpp, tools/server/README.md (#29818): the prompts of laya and clef must fit in --ubatch-size. Two
    people start clef so by hand: -c 8192 -b 8192 -ub 8192.
    """
    made = planned(facts=model(model_class=ModelClass.DECISION, decision=kind, context_length=8192))
    assert (value(made, "--ubatch-size"), value(made, "--cache-ram")) == (micro, "0")
    assert "--embedding" not in made.argv
    assert made.model_class is ModelClass.DECISION


def test_the_batch_of_an_encoder_holds_all_the_cells_that_a_small_context_is_rounded_up_to() -> None:
    made = planned(facts=bert(), ctx_size=2, parallel=1)
    assert value(made, "--ctx-size") == "2"
    assert (value(made, "--batch-size"), value(made, "--ubatch-size")) == ("256", "256")


def test_an_encoder_decoder_gets_one_slot() -> None:
    made = planned(facts=SERVED["encoder-decoder"])
    assert made.parallel == 1
    assert value(made, "--ubatch-size") == "8192"


@pytest.mark.parametrize(("facts", "pooling"), [(bert(pooling=None), "mean"), (model(), "last")])
def test_embedding_model_without_pooling_gets_a_pooling_type(facts: Any, pooling: str) -> None:
    made = planned(facts=facts, extra=("--embedding",))
    assert made.model_class is ModelClass.ENCODER
    assert value(made, "--pooling") == pooling


def test_reranker_is_started_only_with_rerank() -> None:
    made = planned(facts=bert(ModelClass.RERANKER))
    assert "--rerank" in made.argv
    assert "--embedding" not in made.argv


def test_build_without_rerank_flag_reranks_by_pooling() -> None:
    lines = ("--embedding", "embed"), ("--pooling {none,rank}", "pool"), ("-m, --model FNAME", "model")
    build = from_help("".join(f"{head:<30}{text}\n" for head, text in lines))
    made = planned(build, bert(ModelClass.RERANKER))
    assert "--embedding" in made.argv
    assert value(made, "--pooling") == "rank"


def test_build_that_cannot_rerank_is_refused_for_a_reranker() -> None:
    with pytest.raises(RuntimeMissing, match="cannot rerank") as refused:
        planned(OLD, bert(ModelClass.RERANKER))
    assert refused.value.exit_code == 69


@pytest.mark.parametrize(
    ("extra", "serves"),
    [
        (("--rerank",), ModelClass.RERANKER),
        (("--embeddings",), ModelClass.ENCODER),
        (("--embedding", "--pooling", "rank"), ModelClass.RERANKER),
    ],
)
def test_users_arguments_decide_the_class_that_a_model_is_served_as(
    extra: tuple[str, ...], serves: ModelClass
) -> None:
    made = planned(extra=extra)
    assert made.model_class is serves
    assert value(made, "--ubatch-size") == "8192"


@pytest.mark.parametrize(
    ("model_class", "help_"),
    [
        (ModelClass.PROJECTOR, "--mmproj"),
        (ModelClass.LORA, "--lora"),
        (ModelClass.DRAFT, "drafts for another model"),
        (ModelClass.VOCAB, "only the tokenizer"),
    ],
)
def test_file_that_is_not_a_model_is_refused_with_a_remedy(model_class: ModelClass, help_: str) -> None:
    with pytest.raises(ModelInvalid) as refused:
        planned(facts=model(model_class=model_class))
    assert "example-8b.gguf is a" in refused.value.message
    assert help_ in refused.value.remedy
    assert refused.value.exit_code == 65


# --- KV cache and flash attention ----------------------------------------------------------------


def test_odd_heads_keep_an_f16_cache_and_the_reason_names_the_block() -> None:
    made = planned(capabilities(NEW, SMALL_GPU), model(key_length=80, value_length=80))
    assert made.kv_type == "f16"
    assert "--cache-type-k" not in made.argv
    assert "blocks of 32 values" in reason(made, "--cache-type-k")
    assert value(made, "--flash-attn") == "auto"


def test_flash_attention_switched_off_leaves_v_in_f16() -> None:
    made = planned(capabilities(NEW, SMALL_GPU), flash_attn="off")
    assert made.kv_type == "q8_0/f16"
    assert value(made, "--cache-type-k") == "q8_0"
    assert "--cache-type-v" not in made.argv
    assert "needs flash attention, which is off" in reason(made, "--cache-type-v")


def test_flash_attention_switched_off_in_a_build_with_a_bare_switch_passes_no_switch() -> None:
    made = planned(MIDDLE, flash_attn="off")
    assert "--flash-attn" not in made.argv
    assert "--cache-type-v" not in made.argv


@pytest.mark.parametrize("settings", [{"flash_attn": "off"}, {"extra": ("-fa", "0")}])
def test_users_quantised_cache_without_flash_attention_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageInvalid, match="needs flash attention"):
        planned(kv_type="q4_0", **settings)


def test_a_cache_type_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(UsageInvalid, match=r"q8_0 packs blocks of 32 values.*heads of 80"):
        planned(facts=model(key_length=80, value_length=80), kv_type="q8_0")


def test_a_cache_type_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UsageInvalid, match="'q8'") as refused:
        planned(kv_type="q8")
    assert "q8_0" in refused.value.remedy


def test_a_cache_type_after_the_dashes_is_refused_by_the_name_that_it_was_given_with() -> None:
    for extra, flag in ((("-ctk", "bogus"), "--cache-type-k"), (("-ctv", "bogus"), "--cache-type-v")):
        with pytest.raises(UsageInvalid, match=f"^{flag} 'bogus' is not a KV cache type"):
            planned(extra=extra)


def test_a_cache_type_that_only_this_build_knows_is_passed_and_counted_as_f16() -> None:
    lines = (f"--cache-type-{side} TYPE  allowed values: f16, q6_x\n" for side in "kv")
    build = from_help("--flash-attn [on|off|auto]  flash\n" + "".join(lines))
    made = planned(build, kv_type="q6_x")
    assert made.kv_type == "q6_x"
    assert made.memory.kv_bytes == planned(build, kv_type="f16").memory.kv_bytes
    assert planned(build).kv_type == "f16"  # it has no q8_0


def test_a_build_without_flash_attention_keeps_v_in_f16() -> None:
    build = from_help("--cache-type-k TYPE  k\n--cache-type-v TYPE  v\n")
    made = planned(replace(build, devices=(SMALL_GPU,)))
    assert made.kv_type == "q8_0/f16"
    assert "which this build does not have" in reason(made, "--cache-type-v")
    with pytest.raises(UsageInvalid, match="this build does not have"):
        planned(build, kv_type="q8_0")
    with pytest.raises(UsageInvalid, match="has no --flash-attn"):
        planned(build, flash_attn="on")


def test_a_model_without_a_kv_cache_is_given_no_cache_type_even_if_one_was_asked_for() -> None:
    made = planned(facts=bert(), kv_type="q8_0")
    assert "--cache-type-k" not in made.argv
    assert "has no KV cache" in reason(made, "--cache-type-k")
    assert "--flash-attn" not in planned(MIDDLE, bert()).argv


# --- priority, locked memory, devices ------------------------------------------------------------


def test_priority_is_raised_only_where_a_cpu_stays_free_of_compute_threads() -> None:
    able = machine(may_raise_priority=True)
    assert value(planned(hardware=able), "--prio") == "2"
    full = planned(hardware=able, threads=16)
    assert "--prio" not in full.argv
    assert "would stop the proxy" in reason(full, "--prio")


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"may_raise_priority": False}, "CAP_SYS_NICE"),
        ({"cpu_quota": 4.0}, "CPU quota"),
        ({"cpus_allowed": 8}, "would stop the proxy"),
    ],
)
def test_priority_is_left_out_with_the_reason(changes: dict[str, Any], because: str) -> None:
    made = planned(hardware=machine(**({"may_raise_priority": True} | changes)))
    assert "--prio" not in made.argv
    assert because in reason(made, "--prio")


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ({}, "8"),
        ({"cpus_allowed": 3, "physical_cores": 3}, "3"),
        ({"cpu_quota": 2.9}, "2"),
        ({"cpu_quota": 0.5}, "1"),
        ({"cpu_quota": 64.0}, "8"),
        ({"cpu_sharers": 2}, "4"),
        ({"cpu_sharers": 3, "cpu_quota": 6.9}, "2"),
        ({"cpu_sharers": 9}, "1"),
    ],
)
def test_threads_follow_cores_affinity_and_quota(changes: dict[str, Any], threads: str) -> None:
    made = planned(hardware=machine(**changes))
    assert value(made, "--threads") == value(made, "--threads-batch") == threads


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cpus_allowed": 2, "physical_cores": 1}, "one thread for the only core; "),
        ({"cpus_allowed": 1, "physical_cores": 1}, "one thread for the only CPU that "),
        ({"cpu_quota": 1.0}, "a quota of 1 CPU"),
    ],
)
def test_reason_of_one_thread_is_singular(changes: dict[str, Any], why: str) -> None:
    assert why in reason(planned(hardware=machine(**changes)), "--threads")


def in_address_space(size_bytes: int, **rest: Any) -> LaunchPlan:
    return planned(hardware=machine(address_space_limit_bytes=size_bytes), parallel=1, ctx_size=2048, **rest)


def test_weights_are_not_rewritten_for_the_cpu_where_both_copies_exceed_the_address_space() -> None:
    """5 GiB of Q4_K_M are mapped, and 5 GiB more are allocated (b11434)."""
    tight, ample = in_address_space(8 * GIB), in_address_space(16 * GIB)
    assert tight.memory.fits
    assert "address space" in reason(tight, "--no-repack")
    assert "--no-repack" in tight.argv
    assert "--no-repack" not in ample.argv
    assert (
        "--no-repack" not in planned(hardware=machine(memory_available_bytes=8 * GIB)).argv
    )  # pages are dropped
    assert "--no-repack" not in in_address_space(8 * GIB, facts=model(quantization="F16")).argv


def test_prompt_cache_counts_in_addition_to_both_copies_of_the_weights() -> None:
    enough = next(
        size
        for size in range(10 * GIB, 20 * GIB, GIB // 8)
        if "--no-repack" not in in_address_space(size).argv
    )
    made = in_address_space(enough)
    assert made.memory.prompt_cache_bytes > 0
    assert made.memory.host_bytes + 5 * GIB <= made.memory.free.host_bytes


@pytest.mark.parametrize(
    ("extra", "because"),
    [(("--no-repack",), "only 8 MiB may be locked"), (("-nr", "--repack"), "repacks"), ((), "repacks")],
)
def test_weights_may_be_locked_if_the_user_disables_repacking(extra: tuple[str, ...], because: str) -> None:
    assert because in reason(planned(extra=extra), "--load-mode")


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({}, "only 8 MiB may be locked, and the weights take 5120 MiB"),
        (
            {"memlock_limit_bytes": None, "memory_available_bytes": 8 * GIB},
            "two thirds of the free memory",
        ),
        ({"memlock_limit_bytes": None, "platform": "win32"}, "Windows"),
    ],
)
def test_plan_gives_the_reason_for_not_locking_memory(changes: dict[str, Any], because: str) -> None:
    made = planned(facts=UNPACKED_WEIGHTS, hardware=machine(**changes))
    assert "--load-mode" not in made.argv
    assert because in reason(made, "--load-mode")


def test_memory_is_locked_up_to_two_thirds_of_the_free_memory() -> None:
    def with_available(size_bytes: int) -> LaunchPlan:
        hardware = machine(memlock_limit_bytes=None, memory_available_bytes=size_bytes)
        return planned(facts=UNPACKED_WEIGHTS, hardware=hardware, ctx_size=2048, extra=("--cache-ram", "0"))

    most = with_available(28 * GIB).memory.total_bytes * 3 // 2
    assert with_available(most).memory.available_bytes == most
    assert "--load-mode" in with_available(most).argv
    assert "--load-mode" not in with_available(most - 1).argv


def without_prompt_cache(made: LaunchPlan) -> int:
    return made.memory.total_bytes - made.memory.prompt_cache_bytes


def test_a_prompt_cache_is_budgeted_and_off_where_nothing_is_spare() -> None:
    needed = without_prompt_cache(planned())
    roomy = planned(hardware=machine(memory_available_bytes=100 * GIB))
    assert value(roomy, "--cache-ram") == "8192"
    half = planned(hardware=machine(memory_available_bytes=needed + 4 * GIB))
    assert value(half, "--cache-ram") == "1024"
    assert half.memory.prompt_cache_bytes == GIB
    tight = planned(hardware=machine(memory_available_bytes=needed))
    assert value(tight, "--cache-ram") == "0"
    assert tight.memory.fits
    assert not planned(hardware=machine(memory_available_bytes=GIB)).memory.fits


def test_users_prompt_cache_counts_with_its_own_size() -> None:
    made = planned(extra=("--cache-ram", "2048"))
    assert made.memory.prompt_cache_bytes == 2 * GIB


def test_prompt_cache_uses_host_memory_for_any_free_device_memory() -> None:
    small = planned(capabilities(NEW, GPU), hardware=machine(memory_available_bytes=GIB))
    assert small.memory.fits  # 22 GiB are free on the device
    budget = int(value(small, "--cache-ram") or 0)
    assert budget == small.memory.spare_host_bytes // 3 // (1 << 20)  # a quarter, before it was counted
    larger = model(weights_bytes=23 * GIB)  # more than the device has: the host holds the rest
    assert (
        value(planned(capabilities(NEW, GPU), larger, machine(memory_available_bytes=GIB)), "--cache-ram")
        == "0"
    )
    unified = capabilities(NEW, replace(GPU, shares_host_memory=True))
    mac = machine(platform="darwin", memory_available_bytes=without_prompt_cache(planned(unified)))
    assert value(planned(unified, hardware=mac), "--cache-ram") == "0"


def test_layers_are_left_to_a_build_that_fits_them_itself() -> None:
    known = capabilities(NEW, GPU)
    made = planned(known, hardware=machine(memlock_limit_bytes=None))
    assert "--gpu-layers" not in made.argv
    assert "only if no number is passed" in reason(made, "--gpu-layers")
    assert "the weights are on the device" in reason(made, "--load-mode")
    assert made.memory.available_bytes == 28 * GIB + GPU.free_bytes
    assert made.memory.free.devices == 1


def test_build_without_fit_gets_a_number_of_layers() -> None:
    known = capabilities(MIDDLE, GPU)
    made = planned(known, draft=model(layers=4), draft_model="/d.gguf")
    assert value(made, "--gpu-layers") == "999"
    assert value(made, "--gpu-layers-draft") == "999"


@pytest.mark.parametrize(
    ("build", "asked", "passed"),
    [(NEW, 12, "12"), (NEW, "all", "all"), (NEW, "auto", None), (MIDDLE, "all", "999"), (OLD, 0, None)],
)
def test_users_layers_are_passed_in_the_builds_spelling(build: str, asked: Any, passed: str | None) -> None:
    made = planned(build, gpu_layers=asked)
    assert value(made, "--gpu-layers") == passed


def test_memory_of_a_device_that_is_not_used_does_not_count() -> None:
    known = capabilities(NEW, GPU)
    for without in ({"gpu_layers": 0}, {"extra": ("-ngl", "0")}, {"extra": ("-dev", "none")}):
        assert planned(known, **without).memory.available_bytes == 28 * GIB
    unified = capabilities(NEW, replace(GPU, shares_host_memory=True))
    assert planned(unified).memory.available_bytes == 28 * GIB


# --- drafts and projectors -----------------------------------------------------------------------


def test_a_build_whose_server_does_not_draft_refuses_a_draft_model() -> None:
    with pytest.raises(UsageInvalid, match=r"--draft-model is not possible.*0\.2\.90.*does not draft"):
        planned(OLD, draft=model(layers=4), draft_model="/d.gguf")


def test_a_draft_model_has_to_be_a_decoder() -> None:
    with pytest.raises(UsageInvalid, match=r"d\.gguf is of class encoder"):
        planned(draft=bert(), draft_model="/d.gguf")


def test_a_draft_model_counts_in_memory_and_keeps_its_own_cache_types() -> None:
    odd = model(layers=4, key_length=80, weights_bytes=GIB)
    made = planned(draft=odd, draft_model="/d.gguf", kv_type="q8_0")
    assert "--spec-draft-type-k" not in made.argv
    assert value(made, "--spec-draft-type-v") == "q8_0"
    assert made.memory.weights_bytes == 6 * GIB


def test_priority_is_not_raised_with_a_draft_model() -> None:
    made = planned(hardware=machine(may_raise_priority=True), extra=("-md", "/d.gguf"))
    assert "draft model's threads spin too" in reason(made, "--prio")


def test_a_projector_is_passed_and_counted() -> None:
    projector = model(model_class=ModelClass.PROJECTOR, weights_bytes=GIB)
    made = planned(mmproj="/models/mmproj.gguf", projector=projector)
    assert value(made, "--mmproj") == "/models/mmproj.gguf"
    assert made.memory.weights_bytes == 6 * GIB


def test_file_that_is_not_a_projector_is_refused_for_mmproj() -> None:
    with pytest.raises(UsageInvalid, match=r"m\.gguf is not a projector: chat") as refused:
        planned(mmproj="/models/m.gguf", projector=model())
    assert "published with the model" in refused.value.remedy


# --- the user's own arguments --------------------------------------------------------------------


def test_arguments_of_the_user_come_last_and_unchanged_and_replace_ours() -> None:
    made = planned(capabilities(NEW, SMALL_GPU), extra=("--temp", "0.5", "-fa", "off", "--lora", "a b.gguf"))
    assert made.argv[-6:] == ("--temp", "0.5", "-fa", "off", "--lora", "a b.gguf")
    assert "--flash-attn" not in made.argv
    assert reason(made, "--flash-attn") == "left out: set by the user after --"
    assert reason(made, "-fa") == "given by the user after --"
    assert made.kv_type == "q8_0/f16"


def test_derived_values_follow_the_users_arguments() -> None:
    made = planned(extra=("-c", "12000", "--parallel", "3", "-ctk", "f16", "-ctv", "q4_0", "-ub", "64"))
    assert (made.ctx_size, made.parallel, made.kv_type) == (4000, 3, "f16/q4_0")
    assert "--ctx-size" not in made.argv


def test_context_of_zero_is_the_models_own_context() -> None:
    """For each slot, or for the one context that they share (b11434 [run]); b10068 and older divide it."""
    facts = model(context_length=4096)
    for build, extra, per_request, total in (
        (NEW, (), 4096, 4096),
        (NEW, ("-np", "4"), 4096, 16384),
        (NEW, ("-no-kvu",), 4096, 16384),
        (NEW, ("-np", "-1"), 4096, 4096),
        (NEW, ("-kvu",), 4096, 4096),
        (JULY, (), 4096, 4096),
        (JULY, ("-np", "4"), 1024, 4096),
        (MIDDLE, (), 4096, 4096),
        (MIDDLE, ("-np", "4"), 1024, 4096),
    ):
        made = planned(build, facts, extra=("--ctx-size", "0", *extra))
        slots = 1 if build == MIDDLE and not extra else 4
        assert (made.ctx_size, made.parallel, made.shape.ctx_total) == (per_request, slots, total)


@pytest.mark.parametrize(("build", "parallel"), [(NEW, 4), (MIDDLE, 1), (OLD, 1)])
def test_users_context_is_for_one_request_as_in_llama_server(build: str, parallel: int) -> None:
    """``-c 4096`` alone: n_slots = 4, n_ctx_slot = 4096, kv_unified = 'true' (b11434)."""
    made = planned(build, extra=("-c", "4096"))
    assert (made.ctx_size, made.parallel, made.shape.ctx_total) == (4096, parallel, 4096)
    assert ("--kv-unified" in made.argv) is (parallel > 1)
    for asked in ({"parallel": 4, "extra": ("-c", "4096")}, {"extra": ("-c", "4096", "-np", "4")}):
        divided = planned(build, **asked)
        assert (divided.ctx_size, divided.parallel) == (1024, 4)
        assert "--kv-unified" not in divided.argv


def test_slots_chosen_by_llama_server_share_one_cache() -> None:
    made = planned(extra=("-np", "-1", "-c", "4096"))
    assert (made.ctx_size, made.parallel) == (4096, 4)
    pooled = planned(ctx_size=1024, extra=("-kvu",))
    assert (pooled.ctx_size, pooled.parallel) == (4096, 4)
    parted = planned(ctx_size=1024, extra=("-kvu", "-no-kvu"))
    assert (parted.ctx_size, parted.parallel) == (1024, 4)


def test_of_repeated_arguments_the_last_counts() -> None:
    made = planned(extra=("-c", "1024", "--ctx-size", "2048", "-np", "1"))
    assert made.ctx_size == 2048


@pytest.mark.parametrize(
    ("extra", "instead"),
    [
        (("--host", "0.0.0.0"), "--host and --port"),
        (("--port=80",), "--host and --port"),
        (("--api-key", "x"), "--api-key-file"),
        (("--api_key_file", "x"), "--api-key-file"),
        (("-m", "x.gguf"), "MODEL"),
        (("-hf", "org/repo"), "MODEL"),
        (("--hf-token", "secret"), "MODEL"),
        (("--fim-qwen-7b-default",), "MODEL"),
        (("--ssl-cert-file", "x"), "TLS proxy"),
        (("--api-prefix", "/v2"), "prefix"),
        (("-a", "x"), "llamasup's --alias"),
        (("--alias", "x"), "llamasup's --alias"),
        (("--models-dir", "x"), "use llamasup serve"),
        (("--version",), "print and exit"),
        (("--mcp-servers-json", "{}"), "only `llamasup wrap`"),
        (("--mcp_servers_config", "x"), "only `llamasup wrap`"),
        (("--mcp-of-a-later-build",), "only `llamasup wrap`"),
        (("--tools=all",), "only `llamasup wrap`"),
        (("--tools-runtime", "x"), "only `llamasup wrap`"),
        (("-ag",), "only `llamasup wrap`"),
        (("--webui-mcp-proxy",), "only `llamasup wrap`"),
    ],
)
def test_flags_that_only_llamasup_sets_are_refused_with_an_alternative(
    extra: tuple[str, ...], instead: str
) -> None:
    with pytest.raises(UsageInvalid) as refused:
        planned(extra=extra)
    assert instead in refused.value.remedy
    assert "secret" not in str(refused.value)


def test_flags_that_switch_tools_off_are_passed_on() -> None:
    extra = ("-no-ag", "--no_agent", "--no-webui-mcp-proxy")
    assert planned(extra=extra).argv[-3:] == extra


@pytest.mark.parametrize(
    ("extra", "message", "remedy"),
    [
        (("--ctx-sise", "1"), "has no --ctx-sise", "--ctx-size"),
        (("--mlock",), "has no --mlock", "--load-mode"),
        (("--draft-max", "4"), "no longer has --draft-max", "--spec-draft-n-max"),
        (("--zzzz",), "has no --zzzz", "Leave --zzzz out"),
        (("--sidecar",), "has no --sidecar", "put it before --"),
        (("--temp=0.5",), "does not accept '--temp=0.5'", "Write --temp 0.5."),
        (("stray",), "'stray' is not an option", "start with -"),
        (("-np", "2", "stray"), "'stray' after -np", "start with -"),
        (("--temp",), "--temp needs a value (N)", "after the flag"),
        (("-c", "many"), "--ctx-size needs a whole number, not 'many'", "after --"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_before_the_start(
    extra: tuple[str, ...], message: str, remedy: str
) -> None:
    with pytest.raises(UsageInvalid) as refused:
        planned(extra=extra)
    assert message in refused.value.message
    assert remedy in refused.value.remedy


def test_a_removed_argument_without_advice_of_its_own_is_refused_like_an_unknown_one() -> None:
    build = from_help("--old N    the argument has been removed\n--other N  it\n")
    with pytest.raises(UsageInvalid, match="no longer has --old"):
        planned(build, extra=("--old", "1"))


def test_a_setting_asked_for_and_unknown_to_the_build_names_the_nearest_thing() -> None:
    with pytest.raises(UsageInvalid) as refused:
        planned(OLD, gpu_layers=10)
    assert refused.value.message.startswith("this llama-server (0.2.90) has no --gpu-layers")
    with pytest.raises(UsageInvalid, match=r"--kv-type is not supported: .* has no --cache-type-k"):
        planned(from_help("--flash-attn  on\n"), kv_type="q8_0")


# --- name, address, key, environment -------------------------------------------------------------


def test_the_name_is_the_files_without_folder_and_part_number() -> None:
    made = planned(model_path="/models/-odd name-00001-of-00003.gguf")
    assert value(made, "--alias") == "-odd name"
    assert value(made, "--model") == "/models/-odd name-00001-of-00003.gguf"
    assert value(planned(alias="gpt"), "--alias") == "gpt"
    assert value(planned(alias="gpt,small"), "--alias") == "gpt"
    assert planned(OLD, alias="gpt").argv  # llamasup itself answers to it


def test_a_relative_path_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="must be absolute"):
        planned(model_path="-c")
    with pytest.raises(ValueError, match="draft_model, which is not set"):
        planned(draft=model())


def test_a_child_listens_on_a_socket_wherever_it_can() -> None:
    assert [child_address_kind(capabilities(build), platform="linux") for build in (OLD, MIDDLE, NEW)] == [
        "tcp",
        "unix",
        "unix",
    ]
    assert child_address_kind(capabilities(NEW), platform="win32") == "tcp"


def test_the_key_of_a_child_on_loopback_is_in_its_environment_and_never_shown() -> None:
    made = planned(MIDDLE, address=TcpAddress("127.0.0.1", 40001))
    assert not needs_key_file(capabilities(MIDDLE))
    assert made.env["LLAMA_API_KEY"] == made.api_key == "sk-child"
    assert made.env_shown["LLAMA_API_KEY"] == "***"
    assert "sk-child" not in json.dumps(as_json(made))
    assert "--api-key-file" not in made.argv


def test_a_build_that_takes_no_key_from_the_environment_gets_a_file() -> None:
    assert needs_key_file(capabilities(OLD))
    assert needs_key_file(from_help(""))
    with pytest.raises(ValueError, match="needs_key_file"):
        planned(OLD, api_key_file=None)


def test_child_on_loopback_without_a_key_gets_no_key() -> None:
    made = planned(OLD, api_key=None)
    assert made.secret_names == frozenset()
    assert "--api-key-file" not in made.argv


def test_a_child_on_a_socket_is_given_no_key() -> None:
    made = planned(address=UnixAddress("/run/a.sock"), api_key="sk-child")
    assert made.api_key is None
    assert "sk-child" not in made.env.values()


def test_the_environment_is_an_allowlist() -> None:
    environ = {
        "PATH": "/usr/bin",
        "HOME": "/home/a",
        "LC_ALL": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "1",
        "LD_LIBRARY_PATH": "/usr/local/lib",
        "LLAMA_ARG_CTX_SIZE": "1",
        "LLAMA_API_KEY": "stolen",
        "HF_TOKEN": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "LD_PRELOAD": "/evil.so",
        "PYTHONPATH": "/src",
        "XDG_CONFIG_HOME": "/home/a/.config",
    }
    kept = {name: environ[name] for name in ("PATH", "HOME", "LC_ALL", "CUDA_VISIBLE_DEVICES")}
    made = planned(environ=environ, library_path="/opt/llama")
    assert made.env == kept | {
        "LD_LIBRARY_PATH": "/opt/llama:/usr/local/lib",
        "XDG_CONFIG_HOME": "/run/llamasup/1/config",
        "GGML_NO_BACKTRACE": "1",
        "GOMP_SPINCOUNT": "3000",
    }
    embedded = planned(environ=environ, kind="embedded")
    assert embedded.env["PYTHONPATH"] == "/src"
    assert embedded.env["LD_LIBRARY_PATH"] == "/usr/local/lib"


@pytest.mark.parametrize(
    "name",
    [
        *("ROCM_PATH", "ROCBLAS_TENSILE_LIBPATH", "HIPBLASLT_TENSILE_LIBPATH", "MUSA_VISIBLE_DEVICES"),
        *("ASCEND_HOME", "MESA_VK_DEVICE_SELECT", "RADV_PERFTEST", "DRI_PRIME", "OPENBLAS_NUM_THREADS"),
        *("MKL_NUM_THREADS", "XDG_DATA_DIRS", "XDG_DATA_HOME", "DYLD_FALLBACK_LIBRARY_PATH"),
    ],
)
def test_variables_of_drivers_and_libraries_reach_the_child(name: str) -> None:
    assert planned(environ={name: "/x"}).env[name] == "/x"


def test_the_library_path_has_the_name_that_the_system_gives_it() -> None:
    mac = planned(hardware=machine(platform="darwin"), library_path="/opt/llama")
    assert mac.env["DYLD_LIBRARY_PATH"] == "/opt/llama"
    windows = planned(
        hardware=machine(platform="win32"), environ={"Path": "C:\\bin"}, library_path="C:\\llama"
    )
    assert windows.env["PATH"] == "C:\\llama;C:\\bin"
    assert "Path" not in windows.env


# --- as JSON -------------------------------------------------------------------------------------


def as_json(made: LaunchPlan) -> dict[str, Any]:
    return plan_as_json(
        made,
        model="example",
        path="/opt/llama/llama-server",
        kind="binary",
        version="b1",
        profile=None,
        alternatives=[made],
        refused=None if made.memory.fits else refusal("example", made, made),
    )


def test_the_plan_as_json_has_the_contracts_shape() -> None:
    made = planned()
    shown = json.loads(json.dumps(as_json(made)))
    assert shown.keys() >= {"model", "runtime", "argv", "env", "reasons", "memory"}
    assert shown["runtime"] == {"path": "/opt/llama/llama-server", "kind": "binary", "version": "b1"}
    assert tuple(shown["argv"]) == made.argv
    assert shown["reasons"][0] == {
        "flag": "--model",
        "value": "/models/example-8b.gguf",
        "reason": "the requested model",
        "passed": True,
    }
    contract = {
        "weights_bytes": made.memory.weights_bytes,
        "kv_bytes": made.memory.kv_bytes,
        "compute_bytes": made.memory.compute_bytes,
        "total_bytes": made.memory.total_bytes,
        "available_bytes": 28 * GIB,
        "fits": True,
    }
    assert shown["memory"].items() >= contract.items()
    parts = shown["memory"]["parts"]
    assert sum(part["host_bytes"] + part["device_bytes"] for part in parts) == made.memory.total_bytes
    assert (shown["slots"], shown["ctx_size"]) == (4, 8192)
    assert shown["env_reasons"] == dict(made.env_reasons)
    assert shown["env_reasons"].keys() <= shown["env"].keys()
    assert shown["alternatives"] == [
        {
            "parallel": 4,
            "ctx_size": 8192,
            "kv_type": "f16",
            "gpu_layers": 0,
            "total_bytes": made.memory.total_bytes,
            "fits": True,
        }
    ]
    assert shown["remedy"] is None


def test_json_of_a_refused_plan_has_the_remedy() -> None:
    made = planned(hardware=machine(memory_available_bytes=GIB))
    assert as_json(made)["remedy"] == refusal("example", made, made).remedy


@pytest.mark.parametrize(("version", "is_shared"), [("7800 (a47667cf)", True), ("build 0", False)])
def test_another_build_reads_saved_slots_only_if_its_commit_is_the_same(
    version: str, is_shared: bool
) -> None:
    home = SlotHome("/cache/slots", (("/models/example-8b.gguf", 1, 2),))
    builds = [replace(capabilities(NEW), version=version, build=build) for build in ("one", "two")]
    first, second = (planned(build, keep_slots=True, slot_home=home).slots for build in builds)
    assert first is not None
    assert second is not None
    assert (first.folder, first.count) == ("/cache/slots", 4)
    assert (first.key == second.key) is is_shared
    assert planned(keep_slots=True).slots is None
