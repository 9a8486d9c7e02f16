"""The table against xllamacpp's real CommonParams: each value is set where llama.cpp reads it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamasup.embedded import program
from llamasup.embedded.arguments import ArgumentError, apply, parse
from llamasup.embedded.option import options_by_section
from llamasup.embedded.options import SETTERS
from llamasup.embedded.program import options_of, supported


def given(params: Any, *words: str) -> Any:
    apply(params, parse(options_of(supported(params)), words, {}).assignments)
    return params


def value_at(params: Any, path: str) -> Any:
    for name in path.split("."):
        params = getattr(params, name)
    return params.name if hasattr(params, "name") else params


@pytest.mark.parametrize(
    ("words", "path", "expected"),
    [
        ("--model /m/a b.gguf", "model.path", "/m/a b.gguf"),
        ("--ctx-size 4096", "n_ctx", 4096),
        ("--ctx-size 0", "fit_params_min_ctx", -1),
        ("-b 256", "n_batch", 256),
        ("-ub 128", "n_ubatch", 128),
        ("--parallel -1", "n_parallel", -1),
        ("--threads 3", "cpuparams.n_threads", 3),
        ("--threads-batch 2", "cpuparams_batch.n_threads", 2),
        ("--prio 2", "cpuparams.priority", "GGML_SCHED_PRIO_HIGH"),
        ("--poll 0", "cpuparams.poll", 0),
        ("--cpu-strict 1", "cpuparams.strict_cpu", True),
        ("--cpu-mask 3", "cpuparams.mask_valid", True),
        ("-fa on", "flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_ENABLED"),
        ("-fa off", "flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_DISABLED"),
        ("-fa auto", "flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_AUTO"),
        ("-ctk q8_0", "cache_type_k", "GGML_TYPE_Q8_0"),
        ("-ctv iq4_nl", "cache_type_v", "GGML_TYPE_IQ4_NL"),
        ("-ngl 12", "n_gpu_layers", 12),
        ("-ngl auto", "n_gpu_layers", -1),
        ("-ngl all", "n_gpu_layers", -2),
        ("-ngl 0", "n_gpu_layers", 0),
        ("--split-mode row", "split_mode", "LLAMA_SPLIT_MODE_ROW"),
        ("--main-gpu 1", "main_gpu", 1),
        ("--load-mode mmap+mlock", "load_mode", "LLAMA_LOAD_MODE_MMAP_MLOCK"),
        ("--fit off", "fit_params", False),
        ("--fit-ctx 2048", "fit_params_min_ctx", 2048),
        ("--no-kv-offload", "no_kv_offload", True),
        ("--no-repack", "no_extra_bufts", True),
        ("--no-cont-batching", "cont_batching", False),
        ("-kvu", "kv_unified", True),
        ("--swa-full", "swa_full", True),
        ("--cache-ram 0", "cache_ram_mib", 0),
        ("--ctx-checkpoints 4", "n_ctx_checkpoints", 4),
        ("--cache-reuse 256", "n_cache_reuse", 256),
        ("--metrics", "endpoint_metrics", True),
        ("--no-slots", "endpoint_slots", False),
        ("--props", "endpoint_props", True),
        ("--timeout 30", "timeout_write", 30),
        ("--threads-http 4", "n_threads_http", 4),
        ("--sse-ping-interval 5", "sse_ping_interval", 5),
        ("--api-prefix /llm", "api_prefix", "/llm"),
        ("--host 127.0.0.1,::1", "hostnames", ["127.0.0.1", "::1"]),
        ("--alias b,a", "model_alias", {"a", "b"}),
        ("--embedding", "embedding", True),
        ("--rerank", "pooling_type", "LLAMA_POOLING_TYPE_RANK"),
        ("--pooling cls", "pooling_type", "LLAMA_POOLING_TYPE_CLS"),
        ("--no-jinja", "use_jinja", False),
        ("--reasoning-format none", "reasoning_format", "COMMON_REASONING_FORMAT_NONE"),
        ("--reasoning off", "default_template_kwargs", {"enable_thinking": "false"}),
        ("--no-warmup", "warmup", False),
        ("--context-shift", "ctx_shift", True),
        ("--rope-scaling yarn", "rope_scaling_type", "LLAMA_ROPE_SCALING_TYPE_YARN"),
        ("--rope-scale 4", "rope_freq_scale", 0.25),
        ("--numa isolate", "numa", "GGML_NUMA_STRATEGY_ISOLATE"),
        ("--sleep-idle-seconds 60", "sleep_idle_seconds", 60),
        ("--log-verbosity 4", "verbosity", 4),
        ("--verbose", "verbosity", 2**31 - 1),
        ("--mmproj /p.gguf", "mmproj.path", "/p.gguf"),
        ("--no-mmproj", "no_mmproj", True),
        ("--spec-draft-model /d.gguf", "speculative.draft.mparams.path", "/d.gguf"),
        ("--model-draft /d.gguf", "speculative.draft.mparams.path", "/d.gguf"),
        ("--spec-draft-n-max 8", "speculative.draft.n_max", 8),
        ("--spec-draft-ngl all", "speculative.draft.n_gpu_layers", -2),
        ("--spec-draft-type-k q8_0", "speculative.draft.cache_type_k", "GGML_TYPE_Q8_0"),
        ("--temp -1", "sampling.temp", 0.0),
        ("--top-k 7", "sampling.top_k", 7),
        ("--seed -1", "sampling.seed", 0xFFFFFFFF),
        ("--grammar root::=[a]", "sampling.grammar.grammar", "root::=[a]"),
    ],
)
def test_value_is_set(params: Any, words: str, path: str, expected: object) -> None:
    spelling, _, value = words.partition(" ")
    assert value_at(given(params, spelling, *([value] if value else [])), path) == expected


@pytest.mark.parametrize(
    ("spelling", "value"),
    [
        ("--cache-type-k", "q9"),
        ("--load-mode", "fast"),
        ("--split-mode", "half"),
        ("--pooling", "some"),
        ("--prio", "9"),
        ("--fit", "maybe"),
        ("--spec-type", "count"),
        ("--spec-type", "draft-simple,nope"),
        ("--numa", "mirror"),
        ("--tensor-split", "a"),
        ("--chat-template-kwargs", "{"),
        ("--chat-template-kwargs", "[1]"),
        ("--lora-scaled", "adapter.gguf"),
        ("--override-tensor", "no-equals-sign"),
        ("--spec-draft-device", "CUDA9"),
        ("--sleep-idle-seconds", "0"),
        ("--repeat-last-n", "-2"),
        ("--rope-scale", "0"),
        ("--n-cpu-moe", "-1"),
        ("--fit-target", ",".join(["1"] * 400)),
        ("--tensor-split", ",".join(["1"] * 400)),
        ("--spec-draft-sampling", "random"),
        ("--reasoning", "often"),
    ],
)
def test_invalid_value_is_rejected(params: Any, spelling: str, value: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        given(params, spelling, value)
    assert str(refused.value).startswith(f'error while handling argument "{spelling}": ')


@pytest.mark.parametrize("spelling", ["--api-key-file", "--slot-save-path"])
def test_missing_path_is_rejected(params: Any, spelling: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as refused:
        given(params, spelling, str(tmp_path / "missing"))
    assert str(refused.value).startswith(f'error while handling argument "{spelling}": ')


def test_several_speculative_types_are_given_with_commas(params: Any) -> None:
    types = given(params, "--spec-type", "draft-simple,ngram-mod").speculative.types
    assert [kind.name.removeprefix("COMMON_SPECULATIVE_TYPE_") for kind in types] == [
        "DRAFT_SIMPLE",
        "NGRAM_MOD",
    ]


def test_one_fit_target_is_for_all_devices_and_several_are_for_the_first(params: Any) -> None:
    mib = 1024 * 1024
    assert set(given(params, "--fit-target", "512").fit_params_target) == {512 * mib}
    assert given(params, "--fit-target", "1,2").fit_params_target[:3] == [mib, 2 * mib, 512 * mib]


def test_shares_of_the_devices_that_are_not_named_are_zero(params: Any) -> None:
    assert given(params, "--tensor-split", "3,1").tensor_split[:4] == [3.0, 1.0, 0.0, 0.0]


def test_tensor_overrides_add_up(params: Any) -> None:
    overrides = given(params, "-ot", "token_embd=CPU", "--n-cpu-moe", "2", "--cpu-moe").tensor_buft_overrides
    experts = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"
    assert overrides.split(",") == ["token_embd=CPU", rf"blk\.0{experts}", rf"blk\.1{experts}", experts]


def test_adapters_add_up_with_their_scales(params: Any) -> None:
    adapters = given(params, "--lora", 'a.gguf,"b,b.gguf"', "--lora-scaled", "c:d.gguf:0.5").lora_adapters
    assert [(one.path, one.scale) for one in adapters] == [
        ("a.gguf", 1.0),
        ("b,b.gguf", 1.0),
        ("c:d.gguf", 0.5),
    ]


def test_mask_and_range_of_cpus_add_up(params: Any) -> None:
    mask = given(params, "--cpu-mask", "1", "--cpu-range", "4-5").cpuparams.cpumask
    assert [cpu for cpu, used in enumerate(mask) if used] == [0, 4, 5]


def test_template_arguments_are_kept_as_json_text(params: Any) -> None:
    kwargs = given(params, "--chat-template-kwargs", '{"a": {"b": 1}, "c": "d"}').default_template_kwargs
    assert kwargs == {"a": '{"b":1}', "c": '"d"'}


def test_a_sampling_default_of_the_user_is_marked_as_such(params: Any) -> None:
    assert params.sampling.user_sampling_config == 0
    given(params, "--temp", "0.5", "--top-k", "3")
    assert params.sampling.user_sampling_config == 64 | 2  # llama.cpp's bits for temperature and top-k


def test_keys_come_from_a_file_without_its_comments(params: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\none\n\n  two  \n")
    assert given(params, "--api-key-file", str(tmp_path / "keys")).api_keys == ["one", "two"]


def test_options_missing_in_the_wheel_are_not_supported() -> None:
    older = SimpleNamespace(n_ctx=0, hostnames=[])
    spellings = {spelling for option in options_of(supported(older)) for spelling in option.entry.spellings}
    assert {"--ctx-size", "--host", "--version"} <= spellings
    assert not spellings & {"--model", "--cache-ram", "--spec-type"}
    with pytest.raises(ArgumentError, match="invalid argument: --cache-ram"):
        given(older, "--cache-ram", "0")


def test_no_spelling_and_no_variable_is_in_the_table_twice(params: Any) -> None:
    options = options_of(supported(params))
    spellings = [spelling for option in options for spelling in option.entry.spellings]
    variables = [option.entry.env for option in options if option.entry.env]
    assert len(spellings) == len(set(spellings))
    assert len(variables) == len(set(variables))


def test_each_option_of_the_help_has_a_setter_or_asks_or_is_removed() -> None:
    text = Path(program.__file__).with_name("help.txt").read_text("utf-8")
    options = options_of(options_by_section(text, SETTERS))
    assert all(option.setter or option.asks or option.entry.removed for option in options)
    listed = {spelling for option in options for spelling in option.entry.spellings}
    assert SETTERS.keys() - listed == {"--spec-draft-cpu-range-batch"}  # llama-server has no such option
