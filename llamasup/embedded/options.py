"""Says what the options of llama-server set. ``help.txt`` has their names, arguments and descriptions.

The help can be replaced by that of another build; what its options mean to xllamacpp is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from llamasup.core.gguf.tensor_types import KV_CACHE_TYPES
from llamasup.embedded.option import Setter, integer, number, unsigned
from llamasup.embedded.setters import (
    add_items,
    add_keys_of_file,
    add_template_kwargs,
    affinity,
    at_least_minus_one,
    at_least_zero,
    choice,
    contents,
    cpu_moe,
    flash_attention,
    folder,
    gpu_layers,
    grammar,
    idle_seconds,
    is_probabilistic,
    lora,
    on_off,
    option_integer,
    option_number,
    override_tensor,
    positive,
    read_into,
    replace_items,
    rope_scale,
    sampled,
    set_cors_origins,
    set_ctx_size,
    set_fit_target,
    set_reasoning,
    set_rerank,
    set_tensor_split,
    slots,
    speculative_types,
    switch,
    text,
)


def _cpus(option: str, batch: str, path: str) -> Mapping[str, Setter]:
    """Return the options about the CPUs for generation, or with ``batch`` for prompts."""
    priorities = "-1=low 0=normal 1=medium 2=high 3=realtime"
    return {
        f"--{option}threads{batch}": option_integer(f"{path}.n_threads"),
        f"--{option}cpu-mask{batch}": affinity(path, given="mask"),
        f"--{option}cpu-range{batch}": affinity(path, given="range"),
        f"--{option}cpu-strict{batch}": on_off(f"{path}.strict_cpu"),
        f"--{option}prio{batch}": choice(
            f"{path}.priority", "ggml_sched_priority", priorities, prefix="ggml_sched_prio"
        ),
        f"--{option}poll{batch}": positive(f"{path}.poll"),
    }


def _same_name(make: Callable[[str], Setter], attributes: str) -> Mapping[str, Setter]:
    """Return the options whose attributes have the same names."""
    return {f"--{name.replace('_', '-')}": make(name) for name in attributes.split()}


def _ngram(kind: str) -> Mapping[str, Setter]:
    path = f"speculative.ngram_{kind.replace('-', '_')}"
    return {
        f"--spec-ngram-{kind}-size-n": option_integer(f"{path}.size_n"),
        f"--spec-ngram-{kind}-size-m": option_integer(f"{path}.size_m"),
        f"--spec-ngram-{kind}-min-hits": option_integer(f"{path}.min_hits"),
    }


def _kv_type(path: str) -> Setter:
    return choice(path, "ggml_type", " ".join(KV_CACHE_TYPES))


_DRAFT = "speculative.draft"

SETTERS: Mapping[str, Setter] = {
    **_same_name(
        switch,
        "swa_full no_host check_tensors offline kv_unified cache_idle_slots special warmup "
        "cont_batching reuse_port cors_credentials ui embedding cache_prompt prefill_assistant "
        "lora_init_without_apply",
    ),
    **_same_name(
        option_number,
        "rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_slow "
        "yarn_beta_fast video_fps slot_prompt_similarity",
    ),
    **_same_name(
        option_integer,
        "yarn_orig_ctx main_gpu verbosity kv_unified_per_slot checkpoint_min_step image_min_tokens "
        "image_max_tokens mtmd_batch_max_tokens embd_normalize port sse_ping_interval",
    ),
    **_same_name(text, "mmproj_device cors_methods cors_headers api_prefix chat_template"),
    **_same_name(
        partial(sampled, read=number), "dry_multiplier dry_base adaptive_target adaptive_decay dynatemp_range"
    ),
    **_cpus("", "", "cpuparams"),
    **_cpus("", "-batch", "cpuparams_batch"),
    "--ctx-size": Setter(("n_ctx",), set_ctx_size),
    "--predict": option_integer("n_predict"),
    "--batch-size": option_integer("n_batch"),
    "--ubatch-size": option_integer("n_ubatch"),
    "--keep": option_integer("n_keep"),
    "--flash-attn": read_into("flash_attn_type", read=flash_attention),
    "--perf": switch("no_perf", "sampling.no_perf", sets=False),
    "--rope-scaling": choice("rope_scaling_type", "llama_rope_scaling_type", "none linear yarn"),
    "--rope-scale": read_into("rope_freq_scale", read=rope_scale),
    "--kv-offload": switch("no_kv_offload", sets=False),
    "--repack": switch("no_extra_bufts", sets=False),
    "--cache-type-k": _kv_type("cache_type_k"),
    "--cache-type-v": _kv_type("cache_type_v"),
    "--load-mode": choice("load_mode", "llama_load_mode", "auto none mmap mlock mmap+mlock dio=direct-io"),
    "--lazy-mode": choice("lazy_mode", "llama_lazy_mode", "on auto off"),
    "--numa": choice("numa", "ggml_numa_strategy", "distribute isolate numactl"),
    "--device": text("devices"),
    "--override-tensor": override_tensor("tensor_buft_overrides"),
    "--cpu-moe": cpu_moe("tensor_buft_overrides", counted=False),
    "--n-cpu-moe": cpu_moe("tensor_buft_overrides", counted=True),
    "--gpu-layers": read_into("n_gpu_layers", read=gpu_layers),
    "--split-mode": choice("split_mode", "llama_split_mode", "none layer row tensor"),
    "--tensor-split": Setter(("tensor_split",), set_tensor_split),
    "--fit": on_off("fit_params"),
    "--fit-target": Setter(("fit_params_target",), set_fit_target),
    "--fit-ctx": option_integer("fit_params_min_ctx"),
    "--op-offload": switch("no_op_offload", sets=False),
    "--lora": lora(scaled=False),
    "--lora-scaled": lora(scaled=True),
    "--model": text("model.path"),
    "--verbose": read_into("verbosity", read=lambda _: 2**31 - 1),
    "--spec-draft-type-k": _kv_type(f"{_DRAFT}.cache_type_k"),
    "--spec-draft-type-v": _kv_type(f"{_DRAFT}.cache_type_v"),
    "--samplers": sampled("samplers", str, "SAMPLERS"),
    "--seed": sampled("seed", unsigned),
    "--ignore-eos": switch("sampling.ignore_eos"),
    "--temp": sampled("temp", at_least_zero, "TEMP"),
    "--top-k": sampled("top_k", integer, "TOP_K"),
    "--top-p": sampled("top_p", number, "TOP_P"),
    "--min-p": sampled("min_p", number, "MIN_P"),
    "--top-nsigma": sampled("top_n_sigma", number),
    "--xtc-probability": sampled("xtc_probability", number, "XTC_PROBABILITY"),
    "--xtc-threshold": sampled("xtc_threshold", number, "XTC_THRESHOLD"),
    "--typical": sampled("typ_p", number),
    "--repeat-last-n": sampled("penalty_last_n", at_least_minus_one, "PENALTY_LAST_N"),
    "--repeat-penalty": sampled("penalty_repeat", number, "PENALTY_REPEAT"),
    "--presence-penalty": sampled("penalty_present", number),
    "--frequency-penalty": sampled("penalty_freq", number),
    "--dry-allowed-length": sampled("dry_allowed_length", integer),
    "--dry-penalty-last-n": sampled("dry_penalty_last_n", at_least_minus_one),
    "--dynatemp-exp": sampled("dynatemp_exponent", number),
    "--mirostat": sampled("mirostat", integer, "MIROSTAT"),
    "--mirostat-lr": sampled("mirostat_eta", number, "MIROSTAT_ETA"),
    "--mirostat-ent": sampled("mirostat_tau", number, "MIROSTAT_TAU"),
    "--grammar": grammar(file=False),
    "--grammar-file": grammar(file=True),
    "--backend-sampling": switch("sampling.backend_sampling"),
    **_cpus("spec-draft-", "", f"{_DRAFT}.cpuparams"),
    **_cpus("spec-draft-", "-batch", f"{_DRAFT}.cpuparams_batch"),
    "--spec-draft-override-tensor": override_tensor(f"{_DRAFT}.tensor_buft_overrides"),
    "--spec-draft-cpu-moe": cpu_moe(f"{_DRAFT}.tensor_buft_overrides", counted=False),
    "--spec-draft-n-cpu-moe": cpu_moe(f"{_DRAFT}.tensor_buft_overrides", counted=True),
    "--spec-draft-n-max": option_integer(f"{_DRAFT}.n_max"),
    "--spec-draft-n-min": option_integer(f"{_DRAFT}.n_min"),
    "--spec-draft-p-split": option_number(f"{_DRAFT}.p_split"),
    "--spec-draft-p-min": option_number(f"{_DRAFT}.p_min"),
    "--spec-draft-backend-sampling": switch(f"{_DRAFT}.backend_sampling"),
    "--spec-draft-sampling": read_into(f"{_DRAFT}.probabilistic", read=is_probabilistic),
    "--spec-draft-device": text(f"{_DRAFT}.devices"),
    "--spec-draft-ngl": read_into(f"{_DRAFT}.n_gpu_layers", read=gpu_layers),
    "--spec-draft-model": text(f"{_DRAFT}.mparams.path"),
    "--spec-type": read_into("speculative.types", read=speculative_types),
    "--spec-ngram-mod-n-min": option_integer("speculative.ngram_mod.n_min"),
    "--spec-ngram-mod-n-max": option_integer("speculative.ngram_mod.n_max"),
    "--spec-ngram-mod-n-match": option_integer("speculative.ngram_mod.n_match"),
    **_ngram("simple"),
    **_ngram("map-k"),
    **_ngram("map-k4v"),
    "--lookup-cache-static": text("speculative.ngram_cache.lookup_cache_static"),
    "--lookup-cache-dynamic": text("speculative.ngram_cache.lookup_cache_dynamic"),
    "--ctx-checkpoints": option_integer("n_ctx_checkpoints"),
    "--cache-ram": option_integer("cache_ram_mib"),
    "--context-shift": switch("ctx_shift"),
    "--reverse-prompt": add_items("antiprompt"),
    "--pooling": choice("pooling_type", "llama_pooling_type", "none mean cls last rank"),
    "--parallel": read_into("n_parallel", read=slots),
    "--mmproj": text("mmproj.path"),
    "--mmproj-auto": switch("no_mmproj", sets=False),
    "--mmproj-offload": switch("mmproj_use_gpu"),
    "--video-timestamp-interval": option_integer("video_timestamp_interval_ms"),
    "--video-ffmpeg-dir": text("video_ffmpeg_bin_dir"),
    "--alias": add_items("model_alias"),
    "--tags": add_items("model_tags"),
    "--host": replace_items("hostnames"),
    "--path": text("public_path"),
    "--cors-origins": Setter(("cors_origins",), set_cors_origins),
    "--ui-config": text("ui_config_json"),
    "--ui-config-file": contents("ui_config_json"),
    "--rerank": Setter(("embedding", "pooling_type"), set_rerank),
    "--api-key": add_items("api_keys"),
    "--api-key-file": Setter(("api_keys",), add_keys_of_file),
    "--ssl-key-file": text("ssl_file_key"),
    "--ssl-cert-file": text("ssl_file_cert"),
    "--chat-template-kwargs": Setter(("default_template_kwargs",), add_template_kwargs),
    "--timeout": option_integer("timeout_read", "timeout_write"),
    "--threads-http": option_integer("n_threads_http"),
    "--cache-reuse": option_integer("n_cache_reuse"),
    "--metrics": switch("endpoint_metrics"),
    "--props": switch("endpoint_props"),
    "--slots": switch("endpoint_slots"),
    "--slot-save-path": folder("slot_save_path"),
    "--media-path": folder("media_path"),
    "--jinja": switch("use_jinja"),
    "--reasoning-format": choice(
        "reasoning_format", "common_reasoning_format", "none auto deepseek deepseek-legacy"
    ),
    "--reasoning": Setter(("enable_reasoning", "default_template_kwargs"), set_reasoning),
    "--reasoning-budget": option_integer("sampling.reasoning_budget_tokens"),
    "--reasoning-budget-message": text("sampling.reasoning_budget_message"),
    "--chat-template-file": contents("chat_template"),
    "--skip-chat-parsing": switch("force_pure_content_parser"),
    "--sleep-idle-seconds": read_into("sleep_idle_seconds", read=idle_seconds),
    "--log-prompts-dir": text("path_prompts_log_dir"),
}
