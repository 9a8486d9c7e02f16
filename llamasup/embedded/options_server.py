"""llama-server's "example-specific params": slots, caches, HTTP, chat, multimodal input."""

from __future__ import annotations

from llamasup.embedded.option import Option
from llamasup.embedded.rules import (
    cors_origins,
    keys_file,
    parallel,
    reasoning,
    rerank,
    sleep_idle,
    template_kwargs,
    timeout,
)
from llamasup.embedded.setters import (
    add_items,
    choice,
    contents,
    folder,
    option_integer,
    option_number,
    replace_items,
    switch,
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
    Option("-to --timeout", "N", "LLAMA_ARG_TIMEOUT", timeout(),
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
