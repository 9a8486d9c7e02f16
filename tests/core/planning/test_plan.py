"""Turns facts into a command line in each build's spelling, with a reason for every flag."""

from __future__ import annotations

import json
from collections.abc import Iterable
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


# --- the flags, and the reasons of those that are left out ----------------------------------------

NO_FLASH = from_help("--cache-type-k TYPE  k\n--cache-type-v TYPE  v\n")
POOLS_BY_RANK = from_help("--embedding  embed\n--pooling {none,rank}  pool\n-m, --model FNAME  model\n")
LOADS_OR_LOCKS = from_help(
    "--load-mode MODE  how\n                    - none: no\n                    - mlock: yes\n"
)
ON_SMALL_GPU = {"build": capabilities(NEW, SMALL_GPU)}
ODD_HEADS = model(key_length=80, value_length=80)
RANKS = bert(ModelClass.RERANKER)
MAY_RAISE = {"may_raise_priority": True}
MAY_LOCK = {"memlock_limit_bytes": None}


@pytest.mark.parametrize(
    ("rest", "flags"),
    [
        # "" is a switch, None a flag that is not passed.
        ({"facts": model(context_length=0)}, {"--ctx-size": "32768"}),
        (
            {"facts": bert(context_length=8192, pooling="cls")},
            {"--batch-size": "8192", "--ubatch-size": "8192", "--embedding": ""}
            | {"--pooling": None, "--jinja": None, "--cache-ram": "0"},
        ),
        # A small context is rounded up to 256 cells.
        (
            {"facts": bert(), "ctx_size": 2, "parallel": 1},
            {"--ctx-size": "2", "--batch-size": "256", "--ubatch-size": "256"},
        ),
        ({"facts": SERVED["encoder-decoder"]}, {"--parallel": "1", "--ubatch-size": "8192"}),
        ({"facts": bert(pooling=None), "extra": ("--embedding",)}, {"--pooling": "mean"}),
        ({"extra": ("--embedding",)}, {"--pooling": "last"}),
        ({"facts": RANKS}, {"--rerank": "", "--embedding": None}),
        ({"build": POOLS_BY_RANK, "facts": RANKS}, {"--embedding": "", "--pooling": "rank"}),
        (ON_SMALL_GPU | {"facts": ODD_HEADS}, {"--cache-type-k": None, "--flash-attn": "auto"}),
        (ON_SMALL_GPU | {"flash_attn": "off"}, {"--cache-type-k": "q8_0", "--cache-type-v": None}),
        ({"build": MIDDLE, "flash_attn": "off"}, {"--flash-attn": None, "--cache-type-v": None}),
        ({"build": MIDDLE, "facts": bert()}, {"--flash-attn": None}),
        ({"hardware": machine(**MAY_RAISE)}, {"--prio": "2"}),
        ({"gpu_layers": 12}, {"--gpu-layers": "12"}),
        ({"gpu_layers": "all"}, {"--gpu-layers": "all"}),
        ({"gpu_layers": "auto"}, {"--gpu-layers": None}),
        ({"build": MIDDLE, "gpu_layers": "all"}, {"--gpu-layers": "999"}),
        ({"build": OLD, "gpu_layers": 0}, {"--gpu-layers": None}),
        ({"build": OLD, "api_key": None}, {"--api-key-file": None}),
    ],
)
def test_flags_of_a_plan(rest: dict[str, Any], flags: dict[str, str | None]) -> None:
    made = planned(**rest)
    passed = {flag: value(made, flag) for flag in flags}
    expected = {flag: passed[flag] if given == "" else given for flag, given in flags.items()}
    assert passed == expected
    assert {flag for flag in flags if flag in made.argv} == {
        flag for flag, given in flags.items() if given is not None
    }


@pytest.mark.parametrize(
    ("rest", "flag", "because"),
    [
        (ON_SMALL_GPU | {"facts": ODD_HEADS}, "--cache-type-k", "blocks of 32 values"),
        (ON_SMALL_GPU | {"flash_attn": "off"}, "--cache-type-v", "needs flash attention, which is off"),
        (
            {"build": replace(NO_FLASH, devices=(SMALL_GPU,))},
            *("--cache-type-v", "which this build does not have"),
        ),
        ({"facts": bert(), "kv_type": "q8_0"}, "--cache-type-k", "has no KV cache"),
        ({"hardware": machine(may_raise_priority=False)}, "--prio", "CAP_SYS_NICE"),
        ({"hardware": machine(cpu_quota=4.0, **MAY_RAISE)}, "--prio", "CPU quota"),
        ({"hardware": machine(cpus_allowed=8, **MAY_RAISE)}, "--prio", "would stop the proxy"),
        ({"hardware": machine(**MAY_RAISE), "threads": 16}, "--prio", "would stop the proxy"),
        (
            {"hardware": machine(**MAY_RAISE), "extra": ("-md", "/d.gguf")},
            *("--prio", "draft model's threads also spin"),
        ),
        ({"extra": ("--no-repack",)}, "--load-mode", "only 8 MiB may be locked"),
        ({"extra": ("-nr", "--repack")}, "--load-mode", "repacks"),
        ({}, "--load-mode", "repacks"),
        (
            {"facts": UNPACKED_WEIGHTS},
            *("--load-mode", "only 8 MiB may be locked, and the weights take 5120 MiB"),
        ),
        (
            {
                "facts": UNPACKED_WEIGHTS,
                "hardware": machine(memory_available_bytes=8 * GIB, **MAY_LOCK),
            },
            *("--load-mode", "two thirds of the free memory"),
        ),
        (
            {"facts": UNPACKED_WEIGHTS, "hardware": machine(platform="win32", **MAY_LOCK)},
            *("--load-mode", "Windows"),
        ),
        (
            {"build": LOADS_OR_LOCKS, "facts": UNPACKED_WEIGHTS, "hardware": machine(**MAY_LOCK)},
            *("--mlock", "this build does not have it"),
        ),
        (
            {"build": capabilities(NEW, GPU), "hardware": machine(**MAY_LOCK)},
            *("--load-mode", "the weights are on the device"),
        ),
        ({"build": capabilities(NEW, GPU)}, "--gpu-layers", "only if no number is passed"),
    ],
)
def test_flag_is_left_out_with_the_reason(rest: dict[str, Any], flag: str, because: str) -> None:
    made = planned(**rest)
    assert flag not in made.argv
    assert because in reason(made, flag)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ({"kv_type": "q4_0", "flash_attn": "off"}, "needs flash attention"),
        ({"kv_type": "q4_0", "extra": ("-fa", "0")}, "needs flash attention"),
        ({"kv_type": "q8_0", "facts": ODD_HEADS}, r"q8_0 packs blocks of 32 values.*heads of 80"),
        ({"kv_type": "q8_0", "build": NO_FLASH}, "this build does not have"),
        ({"flash_attn": "on", "build": NO_FLASH}, "has no --flash-attn"),
        ({"extra": ("-ctk", "bogus")}, "^--cache-type-k 'bogus' is not a KV cache type"),
        ({"extra": ("-ctv", "bogus")}, "^--cache-type-v 'bogus' is not a KV cache type"),
        ({"build": OLD, "gpu_layers": 10}, r"^this llama-server \(0\.2\.90\) has no --gpu-layers"),
        (
            {"build": from_help("--flash-attn  on\n"), "kv_type": "q8_0"},
            r"--kv-type is not supported: .* has no --cache-type-k",
        ),
        (
            {"build": from_help("--old N    the argument has been removed\n"), "extra": ("--old", "1")},
            "no longer has --old",
        ),
    ],
)
def test_setting_that_cannot_work_is_refused(rest: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageInvalid, match=message):
        planned(**rest)


# --- KV cache and flash attention ----------------------------------------------------------------


def test_a_cache_type_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UsageInvalid, match="'q8'") as refused:
        planned(kv_type="q8")
    assert "q8_0" in refused.value.remedy


def test_a_cache_type_that_only_this_build_knows_is_passed_and_counted_as_f16() -> None:
    lines = (f"--cache-type-{side} TYPE  allowed values: f16, q6_x\n" for side in "kv")
    build = from_help("--flash-attn [on|off|auto]  flash\n" + "".join(lines))
    made = planned(build, kv_type="q6_x")
    assert made.kv_type == "q6_x"
    assert made.memory.kv_bytes == planned(build, kv_type="f16").memory.kv_bytes
    assert planned(build).kv_type == "f16"  # it has no q8_0


# --- priority, locked memory, devices ------------------------------------------------------------


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


def test_memory_of_a_device_that_is_not_used_does_not_count() -> None:
    known = capabilities(NEW, GPU)
    for without in ({"gpu_layers": 0}, {"extra": ("-ngl", "0")}, {"extra": ("-dev", "none")}):
        assert planned(known, **without).memory.available_bytes == 28 * GIB
    unified = capabilities(NEW, replace(GPU, shares_host_memory=True))
    assert planned(unified).memory.available_bytes == 28 * GIB


# --- the user's own arguments --------------------------------------------------------------------


def test_arguments_of_the_user_come_last_and_unchanged_and_replace_ours() -> None:
    made = planned(capabilities(NEW, SMALL_GPU), extra=("--temp", "0.5", "-fa", "off", "--lora", "a b.gguf"))
    assert made.argv[-6:] == ("--temp", "0.5", "-fa", "off", "--lora", "a b.gguf")
    assert "--flash-attn" not in made.argv
    assert reason(made, "--flash-attn") == "left out: set by the user after --"
    assert reason(made, "-fa") == "given by the user after --"
    assert made.kv_type == "q8_0/f16"


def test_derived_values_follow_the_users_arguments() -> None:
    assert planned(extra=("-c", "1024", "--ctx-size", "2048", "-np", "1")).ctx_size == 2048
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
        (("--log-jsonl",), "plain log"),
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


def test_flags_that_switch_reserved_ones_off_are_passed_on() -> None:
    extra = ("-no-ag", "--no_agent", "--no-webui-mcp-proxy", "--no-log-jsonl")
    assert planned(extra=extra).argv[-4:] == extra


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
    assert planned(OLD, api_key=None).secret_names == frozenset()
    on_socket = planned(address=UnixAddress("/run/a.sock"), api_key="sk-child")
    assert on_socket.api_key is None
    assert "sk-child" not in on_socket.env.values()


def test_a_build_that_takes_no_key_from_the_environment_gets_a_file() -> None:
    assert needs_key_file(capabilities(OLD))
    assert needs_key_file(from_help(""))
    with pytest.raises(ValueError, match="needs_key_file"):
        planned(OLD, api_key_file=None)


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


@pytest.mark.parametrize(
    ("drivers", "environ", "settings", "warns"),
    [
        ({"NVIDIA"}, {}, {}, "NVIDIA"),
        ({"AMD", "NVIDIA"}, {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": ""}, {}, "NVIDIA"),
        ({"NVIDIA"}, {"CUDA_VISIBLE_DEVICES": ""}, {}, None),
        ({"NVIDIA"}, {}, {"gpu_layers": 0}, None),
        ({}, {}, {}, None),
    ],
)
def test_gpu_that_the_build_cannot_use_is_named(
    drivers: Iterable[str], environ: dict[str, str], settings: dict[str, Any], warns: str | None
) -> None:
    here = machine(gpu_drivers=frozenset(drivers))
    warnings = planned(hardware=here, environ=environ, **settings).warnings
    remedies = [] if warns is None else ["Install a build for it: llamasup runtime install"]
    assert [remedy for _, remedy in warnings] == remedies
    assert all(f"the {warns} GPU" in message for message, _ in warnings)
    assert planned(capabilities(NEW, GPU), hardware=here, environ=environ, **settings).warnings == ()
