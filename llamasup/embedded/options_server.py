"""Lists llama-server's "speculative params" and "example-specific params".

The speculative ones are about the draft model and the n-gram drafts, the others about slots, caches, HTTP,
chat and multimodal input.
"""

from __future__ import annotations

from llamasup.embedded.option import PRIORITIES, Option
from llamasup.embedded.setters import (
    SPECULATIVE_TYPES,
    add_items,
    affinity,
    choice,
    contents,
    cors_origins,
    cpu_moe,
    draft_sampling,
    folder,
    gpu_layers,
    keys_file,
    on_off,
    option_integer,
    option_number,
    override_tensor,
    parallel,
    positive,
    reasoning,
    replace_items,
    rerank,
    sleep_idle,
    speculative_types,
    switch,
    template_kwargs,
    text,
)

_POOLINGS = {
    "none": "LLAMA_POOLING_TYPE_NONE",
    "mean": "LLAMA_POOLING_TYPE_MEAN",
    "cls": "LLAMA_POOLING_TYPE_CLS",
    "last": "LLAMA_POOLING_TYPE_LAST",
    "rank": "LLAMA_POOLING_TYPE_RANK",
}
_REASONING_FORMATS = {
    "none": "COMMON_REASONING_FORMAT_NONE",
    "auto": "COMMON_REASONING_FORMAT_AUTO",
    "deepseek": "COMMON_REASONING_FORMAT_DEEPSEEK",
    "deepseek-legacy": "COMMON_REASONING_FORMAT_DEEPSEEK_LEGACY",
}


# Two lines an option; the formatter would make it twelve.
# fmt: off
def _ngram(kind: str) -> tuple[Option, ...]:
    path = f"speculative.ngram_{kind.replace('-', '_')}"
    return (
        Option(f"--spec-ngram-{kind}-size-n", "N", "", option_integer(f"{path}.size_n"),
               f"ngram size N for ngram-{kind} speculative decoding, length of lookup n-gram (default: 12)"),
        Option(f"--spec-ngram-{kind}-size-m", "N", "", option_integer(f"{path}.size_m"),
               f"ngram size M for ngram-{kind} speculative decoding, length of draft m-gram (default: 48)"),
        Option(f"--spec-ngram-{kind}-min-hits", "N", "", option_integer(f"{path}.min_hits"),
               f"minimum hits for ngram-{kind} speculative decoding (default: 1)"),
    )


SPECULATIVE: tuple[Option, ...] = (
    Option("--spec-draft-threads -td --threads-draft", "N", "",
           option_integer("speculative.draft.cpuparams.n_threads"),
           "number of threads to use during generation (default: same as --threads)"),
    Option("--spec-draft-threads-batch -tbd --threads-batch-draft", "N", "",
           option_integer("speculative.draft.cpuparams_batch.n_threads"),
           "number of threads to use during batch and prompt processing (default: same as "
           "--threads-draft)"),
    Option("--spec-draft-cpu-mask -Cd --cpu-mask-draft", "M", "",
           affinity("speculative.draft.cpuparams", given="mask"),
           "Draft model CPU affinity mask. Complements cpu-range-draft (default: same as --cpu-mask)"),
    Option("--spec-draft-cpu-range -Crd --cpu-range-draft", "lo-hi", "",
           affinity("speculative.draft.cpuparams", given="range"),
           "Ranges of CPUs for affinity. Complements --cpu-mask-draft"),
    Option("--spec-draft-cpu-strict --cpu-strict-draft", "<0|1>", "",
           on_off("speculative.draft.cpuparams.strict_cpu"),
           "Use strict CPU placement for draft model (default: same as --cpu-strict)"),
    Option("--spec-draft-prio --prio-draft", "N", "",
           choice("speculative.draft.cpuparams.priority", "ggml_sched_priority", PRIORITIES),
           "set draft process/thread priority : 0-normal, 1-medium, 2-high, 3-realtime (default: 0)"),
    Option("--spec-draft-poll --poll-draft", "<0|1>", "", positive("speculative.draft.cpuparams.poll"),
           "Use polling to wait for draft model work (default: same as --poll)"),
    Option("--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft", "M", "",
           affinity("speculative.draft.cpuparams_batch", given="mask"),
           "Draft model CPU affinity mask. Complements cpu-range-draft (default: same as --cpu-mask)"),
    Option("--spec-draft-cpu-strict-batch --cpu-strict-batch-draft", "<0|1>", "",
           on_off("speculative.draft.cpuparams_batch.strict_cpu"),
           "Use strict CPU placement for draft model (default: --cpu-strict-draft)"),
    Option("--spec-draft-prio-batch --prio-batch-draft", "N", "",
           choice("speculative.draft.cpuparams_batch.priority", "ggml_sched_priority", PRIORITIES),
           "set draft process/thread priority : 0-normal, 1-medium, 2-high, 3-realtime (default: 0)"),
    Option("--spec-draft-poll-batch --poll-batch-draft", "<0|1>", "",
           positive("speculative.draft.cpuparams_batch.poll"),
           "Use polling to wait for draft model work (default: --poll-draft)"),
    Option("--spec-draft-override-tensor -otd --override-tensor-draft",
           "<tensor name pattern>=<buffer type>,...",
           "", override_tensor("speculative.draft.tensor_buft_overrides"),
           "override tensor buffer type for draft model"),
    Option("--spec-draft-cpu-moe -cmoed --cpu-moe-draft", "", "LLAMA_ARG_SPEC_DRAFT_CPU_MOE",
           cpu_moe("speculative.draft.tensor_buft_overrides", counted=False),
           "keep all Mixture of Experts (MoE) weights in the CPU for the draft model"),
    Option("--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft",
           "N",
           "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE", cpu_moe("speculative.draft.tensor_buft_overrides", counted=True),
           "keep the Mixture of Experts (MoE) weights of the first N layers in the CPU for the draft "
           "model"),
    Option("--spec-draft-n-max", "N", "LLAMA_ARG_SPEC_DRAFT_N_MAX",
           option_integer("speculative.draft.n_max"),
           "number of tokens to draft for speculative decoding (default: 3)"),
    Option("--spec-draft-n-min", "N", "LLAMA_ARG_SPEC_DRAFT_N_MIN",
           option_integer("speculative.draft.n_min"),
           "minimum number of draft tokens to use for speculative decoding (default: 0)"),
    Option("--spec-draft-p-split --draft-p-split", "P", "LLAMA_ARG_SPEC_DRAFT_P_SPLIT",
           option_number("speculative.draft.p_split"),
           "speculative decoding split probability (default: 0.10)"),
    Option("--spec-draft-p-min --draft-p-min", "P", "LLAMA_ARG_SPEC_DRAFT_P_MIN",
           option_number("speculative.draft.p_min"),
           "minimum speculative decoding probability (greedy) (default: 0.00)"),
    Option("--spec-draft-backend-sampling | --no-spec-draft-backend-sampling",
           "",
           "LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING", switch("speculative.draft.backend_sampling"),
           "offload draft sampling to the backend (default: enabled)"),
    Option("--spec-draft-sampling", "{greedy,probabilistic}", "LLAMA_ARG_SPEC_DRAFT_SAMPLING",
           draft_sampling(),
           "how the draft is sampled: greedy takes its argmax, probabilistic samples it and has the "
           "target verify by rejection sampling (default: greedy)"),
    Option("--spec-draft-device -devd --device-draft", "<dev1,dev2,..>", "",
           text("speculative.draft.devices"),
           "comma-separated list of devices to use for offloading the draft model (none = don't "
           "offload, default: follows --device)\n"
           "use --list-devices to see a list of available devices"),
    Option("--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft",
           "N",
           "LLAMA_ARG_N_GPU_LAYERS_DRAFT", gpu_layers("speculative.draft.n_gpu_layers"),
           "max. number of draft model layers to store in VRAM, either an exact number, 'auto', or "
           "'all' (default: auto)"),
    Option("--spec-draft-model -md --model-draft", "FNAME", "LLAMA_ARG_SPEC_DRAFT_MODEL",
           text("speculative.draft.mparams.path"),
           "draft model for speculative decoding (default: unused)"),
    Option("--spec-type", ",".join(SPECULATIVE_TYPES), "LLAMA_ARG_SPEC_TYPE", speculative_types(),
           "comma-separated list of types of speculative decoding to use (default: none)\n"),
    Option("--spec-ngram-mod-n-min", "N", "", option_integer("speculative.ngram_mod.n_min"),
           "minimum number of ngram tokens to use for ngram-based speculative decoding (default: 48)"),
    Option("--spec-ngram-mod-n-max", "N", "", option_integer("speculative.ngram_mod.n_max"),
           "maximum number of ngram tokens to use for ngram-based speculative decoding (default: 64)"),
    Option("--spec-ngram-mod-n-match", "N", "", option_integer("speculative.ngram_mod.n_match"),
           "ngram-mod lookup length (default: 24)"),
    *_ngram("simple"),
    *_ngram("map-k"),
    *_ngram("map-k4v"),
    Option("--draft --draft-n --draft-max", "N", "LLAMA_ARG_DRAFT_MAX", None,
           "the argument has been removed. use --spec-draft-n-max or --spec-ngram-mod-n-max"),
    Option("--draft-min --draft-n-min", "N", "LLAMA_ARG_DRAFT_MIN", None,
           "the argument has been removed. use --spec-draft-n-min or --spec-ngram-mod-n-min"),
    Option("--spec-ngram-size-n", "N", "", None,
           "the argument has been removed. use the respective --spec-ngram-*-size-n or "
           "--spec-ngram-mod-n-match"),
    Option("--spec-ngram-size-m", "N", "", None,
           "the argument has been removed. use the respective --spec-ngram-*-size-m"),
    Option("--spec-ngram-min-hits", "N", "", None,
           "the argument has been removed. use the respective --spec-ngram-*-min-hits"),
)

SERVER: tuple[Option, ...] = (
    Option("-lcs --lookup-cache-static", "FNAME", "", text("speculative.ngram_cache.lookup_cache_static"),
           "path to static lookup cache to use for lookup decoding (not updated by generation)"),
    Option("-lcd --lookup-cache-dynamic", "FNAME", "", text("speculative.ngram_cache.lookup_cache_dynamic"),
           "path to dynamic lookup cache to use for lookup decoding (updated by generation)"),
    Option("--kv-unified-per-slot", "N", "LLAMA_ARG_KV_UNIFIED_PER_SLOT",
           option_integer("kv_unified_per_slot"),
           "context limit per parallel slot (default: unset, behavior unchanged). when set without "
           "-c/--ctx-size, the shared KV pool is sized to n_parallel*N"),
    Option("-ctxcp --ctx-checkpoints --swa-checkpoints", "N", "LLAMA_ARG_CTX_CHECKPOINTS",
           option_integer("n_ctx_checkpoints"),
           "max number of context checkpoints to create per slot (default: 32)[(more "
           "info)](https://github.com/ggml-org/llama.cpp/pull/15293)"),
    Option("-cms --checkpoint-min-step", "N", "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
           option_integer("checkpoint_min_step"),
           "minimum spacing between context checkpoints in tokens (default: 8192, 0 = no minimum)"),
    Option("-cram --cache-ram", "N", "LLAMA_ARG_CACHE_RAM", option_integer("cache_ram_mib"),
           "set the maximum cache size in MiB (default: 8192, -1 - no limit, 0 - disable)[(more "
           "info)](https://github.com/ggml-org/llama.cpp/pull/16391)"),
    Option("-kvu --kv-unified | -no-kvu --no-kv-unified", "", "LLAMA_ARG_KV_UNIFIED", switch("kv_unified"),
           "use single unified KV buffer shared across all sequences (default: enabled if number of "
           "slots is auto)"),
    Option("--cache-idle-slots | --no-cache-idle-slots", "", "LLAMA_ARG_CACHE_IDLE_SLOTS",
           switch("cache_idle_slots"),
           "save idle slots to the prompt cache on new task, and clear them when using unified KV "
           "(default: enabled, requires cache-ram)"),
    Option("--context-shift | --no-context-shift", "", "LLAMA_ARG_CONTEXT_SHIFT", switch("ctx_shift"),
           "whether to use context shift on infinite text generation (default: disabled)"),
    Option("-r --reverse-prompt", "PROMPT", "", add_items("antiprompt"),
           "halt generation at PROMPT, return control in interactive mode"),
    Option("-sp --special", "", "", switch("special"),
           "special tokens output enabled (default: false)"),
    Option("--warmup | --no-warmup", "", "", switch("warmup"),
           "whether to perform warmup with an empty run (default: enabled)"),
    Option("--pooling", "{none,mean,cls,last,rank}", "LLAMA_ARG_POOLING",
           choice("pooling_type", "llama_pooling_type", _POOLINGS),
           "pooling type for embeddings, use model default if unspecified"),
    Option("-np --parallel", "N", "LLAMA_ARG_N_PARALLEL", parallel(),
           "number of server slots (default: -1, -1 = auto)"),
    Option("-cb --cont-batching | -nocb --no-cont-batching", "", "LLAMA_ARG_CONT_BATCHING",
           switch("cont_batching"),
           "whether to enable continuous batching (a.k.a dynamic batching) (default: enabled)"),
    Option("-mm --mmproj", "FILE", "LLAMA_ARG_MMPROJ", text("mmproj.path"),
           "path to a multimodal projector file. see tools/mtmd/README.md\n"
           "note: if -hf is used, this argument can be omitted"),
    Option("--mmproj-auto | --no-mmproj --no-mmproj-auto", "", "LLAMA_ARG_MMPROJ_AUTO",
           switch("no_mmproj", sets=False),
           "whether to use multimodal projector file (if available), useful when using -hf (default: "
           "enabled)"),
    Option("--mmproj-offload | --no-mmproj-offload", "", "LLAMA_ARG_MMPROJ_OFFLOAD",
           switch("mmproj_use_gpu"),
           "whether to enable GPU offloading for multimodal projector (default: enabled)"),
    Option("-mmdev --mmproj-device", "DEVICE", "MTMD_BACKEND_DEVICE", text("mmproj_device"),
           "device to use for multimodal projector (none = don't offload, default: follows --device)\n"
           "use --list-devices to see a list of available devices"),
    Option("--image-min-tokens", "N", "LLAMA_ARG_IMAGE_MIN_TOKENS", option_integer("image_min_tokens"),
           "minimum number of tokens each image can take, only used by vision models with dynamic "
           "resolution (default: read from model)"),
    Option("--image-max-tokens", "N", "LLAMA_ARG_IMAGE_MAX_TOKENS", option_integer("image_max_tokens"),
           "maximum number of tokens each image can take, only used by vision models with dynamic "
           "resolution (default: read from model)"),
    Option("--mtmd-batch-max-tokens", "N", "LLAMA_ARG_MTMD_BATCH_MAX_TOKENS",
           option_integer("mtmd_batch_max_tokens"),
           "maximum number of image tokens per batch when encoding images (default: 1024)"),
    Option("--video-fps", "N", "LLAMA_ARG_VIDEO_FPS", option_number("video_fps"),
           "target video frame rate (default: 4.0)"),
    Option("--video-timestamp-interval", "N", "LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL",
           option_integer("video_timestamp_interval_ms"),
           "interval in milliseconds between text timestamps (default: 5000)"),
    Option("--video-ffmpeg-dir", "DIR", "LLAMA_ARG_VIDEO_FFMPEG_DIR", text("video_ffmpeg_bin_dir"),
           "path to the directory containing ffmpeg and ffprobe (default: search in PATH)"),
    Option("-a --alias", "STRING", "LLAMA_ARG_ALIAS", add_items("model_alias"),
           "set model name aliases, comma-separated (to be used by API)"),
    Option("--tags", "STRING", "LLAMA_ARG_TAGS", add_items("model_tags"),
           "set model tags, comma-separated (informational, not used for routing)"),
    Option("--embd-normalize", "N", "", option_integer("embd_normalize"),
           "normalisation for embeddings (default: 2) (-1=none, 0=max absolute int16, 1=taxicab, "
           "2=euclidean, >2=p-norm)"),
    Option("--host", "HOST", "LLAMA_ARG_HOST", replace_items("hostnames"),
           "IP addresses to listen on, comma-separated, or UNIX socket paths ending in .sock; with "
           "multiple TCP addresses, :: binds IPv6 only; overlapping addresses result in undefined "
           "behavior (default: 127.0.0.1)"),
    Option("--port", "PORT", "LLAMA_ARG_PORT", option_integer("port"),
           "port to listen (default: 8080)"),
    Option("--reuse-port", "", "LLAMA_ARG_REUSE_PORT", switch("reuse_port"),
           "allow multiple sockets to bind to the same port (default: disabled)"),
    Option("--path", "PATH", "LLAMA_ARG_STATIC_PATH", text("public_path"),
           "path to serve static files from (default: )"),
    Option("--cors-origins", "ORIGINS", "LLAMA_ARG_CORS_ORIGINS", cors_origins(),
           "comma-separated list of allowed origins for CORS (default: *)\n"
           "if set to special value 'localhost', reflect the Origin header only if it is localhost"),
    Option("--cors-methods", "METHODS", "LLAMA_ARG_CORS_METHODS", text("cors_methods"),
           "comma-separated list of allowed methods for CORS (default: GET, POST, DELETE, OPTIONS)"),
    Option("--cors-headers", "HEADERS", "LLAMA_ARG_CORS_HEADERS", text("cors_headers"),
           "comma-separated list of allowed headers for CORS (default: *)"),
    Option("--cors-credentials | --no-cors-credentials", "", "LLAMA_ARG_CORS_CREDENTIALS",
           switch("cors_credentials"),
           "whether to allow credentials for CORS (default: enabled)\n"
           "note: if this is enabled and --cors-origins is set to * (default), the Origin header will "
           "be echoed back, and credentials will always be allowed"),
    Option("--api-prefix", "PREFIX", "LLAMA_ARG_API_PREFIX", text("api_prefix"),
           "prefix path the server serves from, without the trailing slash (default: )"),
    Option("--ui-config --webui-config", "JSON", "LLAMA_ARG_UI_CONFIG", text("ui_config_json"),
           "JSON that provides default UI settings (overrides UI defaults)"),
    Option("--ui-config-file --webui-config-file", "PATH", "LLAMA_ARG_UI_CONFIG_FILE",
           contents("ui_config_json"),
           "JSON file that provides default UI settings (overrides UI defaults)"),
    Option("--ui --webui | --no-ui --no-webui", "", "LLAMA_ARG_UI", switch("ui"),
           "whether to enable the Web UI (default: enabled)"),
    Option("--embedding --embeddings", "", "LLAMA_ARG_EMBEDDINGS", switch("embedding"),
           "restrict to only support embedding use case; use only with dedicated embedding models "
           "(default: disabled)"),
    Option("--rerank --reranking", "", "LLAMA_ARG_RERANKING", rerank(),
           "enable reranking endpoint on server (default: disabled)"),
    Option("--api-key", "KEY", "LLAMA_API_KEY", add_items("api_keys"),
           "API key to use for authentication, multiple keys can be provided as a comma-separated "
           "list (default: none)"),
    Option("--api-key-file", "FNAME", "LLAMA_ARG_API_KEY_FILE", keys_file(),
           "path to file containing API keys, one per line; lines starting with a hash are treated as "
           "comments (default: none)"),
    Option("--ssl-key-file", "FNAME", "LLAMA_ARG_SSL_KEY_FILE", text("ssl_file_key"),
           "path to file a PEM-encoded SSL private key"),
    Option("--ssl-cert-file", "FNAME", "LLAMA_ARG_SSL_CERT_FILE", text("ssl_file_cert"),
           "path to file a PEM-encoded SSL certificate"),
    Option("--chat-template-kwargs", "STRING", "LLAMA_ARG_CHAT_TEMPLATE_KWARGS", template_kwargs(),
           "sets additional params for the json template parser, must be a valid json object string, "
           "e.g. '{\"key1\":\"value1\",\"key2\":\"value2\"}'"),
    Option("-to --timeout", "N", "LLAMA_ARG_TIMEOUT", option_integer("timeout_read", "timeout_write"),
           "server read/write timeout in seconds (default: 3600)"),
    Option("--sse-ping-interval", "N", "LLAMA_ARG_SSE_PING_INTERVAL", option_integer("sse_ping_interval"),
           "server SSE ping interval in seconds (-1 = disabled, default: 30)"),
    Option("--threads-http", "N", "LLAMA_ARG_THREADS_HTTP", option_integer("n_threads_http"),
           "number of threads used to process HTTP requests (default: -1)"),
    Option("--cache-prompt | --no-cache-prompt", "", "LLAMA_ARG_CACHE_PROMPT", switch("cache_prompt"),
           "whether to enable prompt caching (default: enabled)"),
    Option("--cache-reuse", "N", "LLAMA_ARG_CACHE_REUSE", option_integer("n_cache_reuse"),
           "min chunk size to attempt reusing from the cache via KV shifting, requires prompt caching "
           "to be enabled (default: 0) [(card)](https://ggml.ai/f0.png)"),
    Option("--metrics", "", "LLAMA_ARG_ENDPOINT_METRICS", switch("endpoint_metrics"),
           "enable prometheus compatible metrics endpoint (default: disabled)"),
    Option("--props", "", "LLAMA_ARG_ENDPOINT_PROPS", switch("endpoint_props"),
           "enable changing global properties via POST /props (default: disabled)"),
    Option("--slots | --no-slots", "", "LLAMA_ARG_ENDPOINT_SLOTS", switch("endpoint_slots"),
           "expose slots monitoring endpoint (default: enabled)"),
    Option("--slot-save-path", "PATH", "", folder("slot_save_path"),
           "path to save slot kv cache (default: disabled)"),
    Option("--media-path", "PATH", "", folder("media_path"),
           "directory for loading local media files; files can be accessed via file:// URLs using "
           "relative paths (default: disabled)"),
    Option("--jinja | --no-jinja", "", "LLAMA_ARG_JINJA", switch("use_jinja"),
           "whether to use jinja template engine for chat (default: enabled)"),
    Option("--reasoning-format", "FORMAT", "LLAMA_ARG_THINK",
           choice("reasoning_format", "common_reasoning_format", _REASONING_FORMATS),
           "controls whether thought tags are allowed and/or extracted from the response, and in "
           "which format they're returned; one of:\n"
           "- none: leaves thoughts unparsed in `message.content`\n"
           "- deepseek: puts thoughts in `message.reasoning_content`\n"
           "- deepseek-legacy: keeps `<think>` tags in `message.content` while also populating "
           "`message.reasoning_content`\n"
           "(default: auto)"),
    Option("-rea --reasoning", "[on|off|auto]", "LLAMA_ARG_REASONING", reasoning(),
           "Use reasoning/thinking in the chat ('on', 'off', or 'auto', default: 'auto' (detect from "
           "template))"),
    Option("--reasoning-budget", "N", "LLAMA_ARG_THINK_BUDGET",
           option_integer("sampling.reasoning_budget_tokens"),
           "token budget for thinking: -1 for unrestricted, 0 for immediate end, N>0 for token budget "
           "(default: -1)"),
    Option("--reasoning-budget-message", "MESSAGE", "LLAMA_ARG_THINK_BUDGET_MESSAGE",
           text("sampling.reasoning_budget_message"),
           "message injected before the end-of-thinking tag when reasoning budget is exhausted "
           "(default: none)"),
    Option("--chat-template", "JINJA_TEMPLATE", "LLAMA_ARG_CHAT_TEMPLATE", text("chat_template"),
           "set custom jinja chat template (default: template taken from model's metadata)\n"
           "only the names of llama.cpp's built-in templates are accepted unless --jinja is on (the "
           "default)"),
    Option("--chat-template-file", "JINJA_TEMPLATE_FILE", "LLAMA_ARG_CHAT_TEMPLATE_FILE",
           contents("chat_template"),
           "set custom jinja chat template file (default: template taken from model's metadata)"),
    Option("--skip-chat-parsing | --no-skip-chat-parsing", "", "LLAMA_ARG_SKIP_CHAT_PARSING",
           switch("force_pure_content_parser"),
           "force a pure content parser, even if a Jinja template is specified; model will output "
           "everything in the content section, including any reasoning and/or tool calls (default: "
           "disabled)"),
    Option("--prefill-assistant | --no-prefill-assistant", "", "LLAMA_ARG_PREFILL_ASSISTANT",
           switch("prefill_assistant"),
           "whether to prefill the assistant's response if the last message is an assistant message "
           "(default: prefill enabled)\n"
           "when this flag is set, if the last message is an assistant message then it will be "
           "treated as a full message and not prefilled\n"),
    Option("-sps --slot-prompt-similarity", "SIMILARITY", "", option_number("slot_prompt_similarity"),
           "how much the prompt of a request must match the prompt of a slot in order to use that "
           "slot (default: 0.10, 0.0 = disabled)"),
    Option("--lora-init-without-apply", "", "", switch("lora_init_without_apply"),
           "load LoRA adapters without applying them (apply later via POST /lora-adapters) (default: "
           "disabled)"),
    Option("--sleep-idle-seconds", "SECONDS", "", sleep_idle(),
           "number of seconds of idleness after which the server will sleep (default: -1; -1 = disabled)"),
    Option("--log-prompts-dir", "PATH", "", text("path_prompts_log_dir"),
           "Log prompts to directory (auto-created if not present; only used for debugging, default: "
           "disabled)"),
)
# fmt: on
