"""Lists llama-server's "common params" and "sampling params".

The common ones are about threads, context, attention, RoPE, the model file, its memory and devices, and the
log. The sampling ones are the defaults of requests.
"""

from __future__ import annotations

from llamasup.embedded.option import KV_TYPES, PRIORITIES, Option, integer, number, unsigned
from llamasup.embedded.setters import (
    affinity,
    at_least_minus_one,
    at_least_zero,
    choice,
    cpu_moe,
    ctx_size,
    fit_target,
    flash_attn,
    gpu_layers,
    grammar,
    lora,
    on_off,
    option_integer,
    option_number,
    override_tensor,
    positive,
    read_into,
    rope_scale,
    sampled,
    switch,
    tensor_split,
    text,
)

_ROPE_SCALINGS = {
    "none": "LLAMA_ROPE_SCALING_TYPE_NONE",
    "linear": "LLAMA_ROPE_SCALING_TYPE_LINEAR",
    "yarn": "LLAMA_ROPE_SCALING_TYPE_YARN",
}
_LOAD_MODES = {
    "auto": "LLAMA_LOAD_MODE_AUTO",
    "none": "LLAMA_LOAD_MODE_NONE",
    "mmap": "LLAMA_LOAD_MODE_MMAP",
    "mlock": "LLAMA_LOAD_MODE_MLOCK",
    "mmap+mlock": "LLAMA_LOAD_MODE_MMAP_MLOCK",
    "dio": "LLAMA_LOAD_MODE_DIRECT_IO",
}
_LAZY_MODES = {
    "on": "LLAMA_LAZY_MODE_ON",
    "auto": "LLAMA_LAZY_MODE_AUTO",
    "off": "LLAMA_LAZY_MODE_OFF",
}
_NUMA = {
    "distribute": "GGML_NUMA_STRATEGY_DISTRIBUTE",
    "isolate": "GGML_NUMA_STRATEGY_ISOLATE",
    "numactl": "GGML_NUMA_STRATEGY_NUMACTL",
}
_SPLIT_MODES = {
    "none": "LLAMA_SPLIT_MODE_NONE",
    "layer": "LLAMA_SPLIT_MODE_LAYER",
    "row": "LLAMA_SPLIT_MODE_ROW",
    "tensor": "LLAMA_SPLIT_MODE_TENSOR",
}


def _kv_type(names: str, env: str, path: str, about: str) -> Option:
    setter = choice(path, "ggml_type", KV_TYPES)
    return Option(
        names, "TYPE", env, setter, f"{about}\nallowed values: {', '.join(KV_TYPES)} (default: f16)"
    )


# Two lines an option; the formatter would make it twelve.
# fmt: off
COMMON: tuple[Option, ...] = (
    Option("-h --help --usage", "", "", None,
           "print usage and exit", asks="help"),
    Option("--version", "", "", None,
           "show version and build info", asks="version"),
    Option("-t --threads", "N", "LLAMA_ARG_THREADS", option_integer("cpuparams.n_threads"),
           "number of CPU threads to use during generation (default: -1)"),
    Option("-tb --threads-batch", "N", "", option_integer("cpuparams_batch.n_threads"),
           "number of threads to use during batch and prompt processing (default: same as --threads)"),
    Option("-C --cpu-mask", "M", "", affinity("cpuparams", given="mask"),
           'CPU affinity mask: arbitrarily long hex. Complements cpu-range (default: "")'),
    Option("-Cr --cpu-range", "lo-hi", "", affinity("cpuparams", given="range"),
           "range of CPUs for affinity. Complements --cpu-mask"),
    Option("--cpu-strict", "<0|1>", "", on_off("cpuparams.strict_cpu"),
           "use strict CPU placement (default: 0)"),
    Option("--prio", "N", "", choice("cpuparams.priority", "ggml_sched_priority", PRIORITIES),
           "set process/thread priority : low(-1), normal(0), medium(1), high(2), realtime(3) "
           "(default: 0)"),
    Option("--poll", "<0...100>", "", positive("cpuparams.poll"),
           "use polling level to wait for work (0 - no polling, default: 50)"),
    Option("-Cb --cpu-mask-batch", "M", "", affinity("cpuparams_batch", given="mask"),
           "CPU affinity mask: arbitrarily long hex. Complements cpu-range-batch (default: same as "
           "--cpu-mask)"),
    Option("-Crb --cpu-range-batch", "lo-hi", "", affinity("cpuparams_batch", given="range"),
           "ranges of CPUs for affinity. Complements --cpu-mask-batch"),
    Option("--cpu-strict-batch", "<0|1>", "", on_off("cpuparams_batch.strict_cpu"),
           "use strict CPU placement (default: same as --cpu-strict)"),
    Option("--prio-batch", "N", "", choice("cpuparams_batch.priority", "ggml_sched_priority", PRIORITIES),
           "set process/thread priority : 0-normal, 1-medium, 2-high, 3-realtime (default: 0)"),
    Option("--poll-batch", "<0|1>", "", positive("cpuparams_batch.poll"),
           "use polling to wait for work (default: same as --poll)"),
    Option("-c --ctx-size", "N", "LLAMA_ARG_CTX_SIZE", ctx_size(),
           "size of the prompt context (default: 0, 0 = loaded from model)"),
    Option("-n --predict --n-predict", "N", "LLAMA_ARG_N_PREDICT", option_integer("n_predict"),
           "number of tokens to predict (default: -1, -1 = infinity)"),
    Option("-b --batch-size", "N", "LLAMA_ARG_BATCH", option_integer("n_batch"),
           "logical maximum batch size (default: 2048)"),
    Option("-ub --ubatch-size", "N", "LLAMA_ARG_UBATCH", option_integer("n_ubatch"),
           "physical maximum batch size (default: 512)"),
    Option("--keep", "N", "", option_integer("n_keep"),
           "number of tokens to keep from the initial prompt (default: 0, -1 = all)"),
    Option("--swa-full", "", "LLAMA_ARG_SWA_FULL", switch("swa_full"),
           "use full-size SWA cache (default: false)\n"
           "[(more info)](https://github.com/ggml-org/llama.cpp/pull/13194#issuecomment-2868343055)"),
    Option("-fa --flash-attn", "[on|off|auto]", "LLAMA_ARG_FLASH_ATTN", flash_attn(),
           "set Flash Attention use ('on', 'off', or 'auto', default: 'auto')"),
    Option("--perf | --no-perf", "", "LLAMA_ARG_PERF", switch("no_perf", "sampling.no_perf", sets=False),
           "whether to enable internal libllama performance timings (default: false)"),
    Option("--rope-scaling", "{none,linear,yarn}", "LLAMA_ARG_ROPE_SCALING_TYPE",
           choice("rope_scaling_type", "llama_rope_scaling_type", _ROPE_SCALINGS),
           "RoPE frequency scaling method, defaults to linear unless specified by the model"),
    Option("--rope-scale", "N", "LLAMA_ARG_ROPE_SCALE", rope_scale(),
           "RoPE context scaling factor, expands context by a factor of N"),
    Option("--rope-freq-base", "N", "LLAMA_ARG_ROPE_FREQ_BASE", option_number("rope_freq_base"),
           "RoPE base frequency, used by NTK-aware scaling (default: loaded from model)"),
    Option("--rope-freq-scale", "N", "LLAMA_ARG_ROPE_FREQ_SCALE", option_number("rope_freq_scale"),
           "RoPE frequency scaling factor, expands context by a factor of 1/N"),
    Option("--yarn-orig-ctx", "N", "LLAMA_ARG_YARN_ORIG_CTX", option_integer("yarn_orig_ctx"),
           "YaRN: original context size of model (default: 0 = model training context size)"),
    Option("--yarn-ext-factor", "N", "LLAMA_ARG_YARN_EXT_FACTOR", option_number("yarn_ext_factor"),
           "YaRN: extrapolation mix factor (default: -1.00, 0.0 = full interpolation)"),
    Option("--yarn-attn-factor", "N", "LLAMA_ARG_YARN_ATTN_FACTOR", option_number("yarn_attn_factor"),
           "YaRN: scale sqrt(t) or attention magnitude (default: -1.00)"),
    Option("--yarn-beta-slow", "N", "LLAMA_ARG_YARN_BETA_SLOW", option_number("yarn_beta_slow"),
           "YaRN: high correction dim or alpha (default: -1.00)"),
    Option("--yarn-beta-fast", "N", "LLAMA_ARG_YARN_BETA_FAST", option_number("yarn_beta_fast"),
           "YaRN: low correction dim or beta (default: -1.00)"),
    Option("-kvo --kv-offload | -nkvo --no-kv-offload", "", "LLAMA_ARG_KV_OFFLOAD",
           switch("no_kv_offload", sets=False),
           "whether to enable KV cache offloading (default: enabled)"),
    Option("--repack | -nr --no-repack", "", "LLAMA_ARG_REPACK", switch("no_extra_bufts", sets=False),
           "whether to enable weight repacking (default: enabled)"),
    Option("--no-host", "", "LLAMA_ARG_NO_HOST", switch("no_host"),
           "bypass host buffer allowing extra buffers to be used"),
    _kv_type("-ctk --cache-type-k", "LLAMA_ARG_CACHE_TYPE_K", "cache_type_k",
             "KV cache data type for K"),
    _kv_type("-ctv --cache-type-v", "LLAMA_ARG_CACHE_TYPE_V", "cache_type_v",
             "KV cache data type for V"),
    Option("-lm --load-mode", "MODE", "LLAMA_ARG_LOAD_MODE",
           choice("load_mode", "llama_load_mode", _LOAD_MODES),
           "model loading mode (default: auto)\n"
           "- auto: mmap, unless a device does not support it\n"
           "- none: no special loading mode\n"
           "- mmap: memory-map model (if mmap disabled, slower load but may reduce pageouts if not "
           "using mlock)\n"
           "- mlock: force system to keep model in RAM rather than swapping or compressing\n"
           "- mmap+mlock: mmap + force system to keep model in RAM rather than swapping or compressing\n"
           "- dio: use DirectIO if available\n"),
    Option("-lzm --lazy-mode", "MODE", "LLAMA_ARG_LAZY_MODE",
           choice("lazy_mode", "llama_lazy_mode", _LAZY_MODES),
           "on-demand reading of certain tensors, for example per-layer embeddings (default: auto)\n"
           "- on: read the rows of such tensors from disk on demand instead of keeping them resident "
           "(requires mmap)\n"
           "- auto: on, but only for tensors larger than 4 GiB\n"
           "- off: always keep them resident"),
    Option("--numa", "TYPE", "LLAMA_ARG_NUMA", choice("numa", "ggml_numa_strategy", _NUMA),
           "attempt optimizations that help on some NUMA systems\n"
           "- distribute: spread execution evenly over all nodes\n"
           "- isolate: only spawn threads on CPUs on the node that execution started on\n"
           "- numactl: use the CPU map provided by numactl\n"
           "if run without this previously, it is recommended to drop the system page cache before "
           "using this\n"
           "see https://github.com/ggml-org/llama.cpp/issues/1437"),
    Option("-dev --device", "<dev1,dev2,..>", "LLAMA_ARG_DEVICE", text("devices"),
           "comma-separated list of devices to use for offloading (none = don't offload)\n"
           "use --list-devices to see a list of available devices"),
    Option("--list-devices", "", "", None,
           "print list of available devices and exit", asks="devices"),
    Option("-ot --override-tensor", "<tensor name pattern>=<buffer type>,...", "LLAMA_ARG_OVERRIDE_TENSOR",
           override_tensor("tensor_buft_overrides"),
           "override tensor buffer type"),
    Option("-cmoe --cpu-moe", "", "LLAMA_ARG_CPU_MOE", cpu_moe("tensor_buft_overrides", counted=False),
           "keep all Mixture of Experts (MoE) weights in the CPU"),
    Option("-ncmoe --n-cpu-moe", "N", "LLAMA_ARG_N_CPU_MOE", cpu_moe("tensor_buft_overrides", counted=True),
           "keep the Mixture of Experts (MoE) weights of the first N layers in the CPU"),
    Option("-ngl --gpu-layers --n-gpu-layers", "N", "LLAMA_ARG_N_GPU_LAYERS", gpu_layers("n_gpu_layers"),
           "max. number of layers to store in VRAM, either an exact number, 'auto', or 'all' "
           "(default: auto)"),
    Option("-sm --split-mode", "{none,layer,row,tensor}", "LLAMA_ARG_SPLIT_MODE",
           choice("split_mode", "llama_split_mode", _SPLIT_MODES),
           "how to split the model across multiple GPUs, one of:\n"
           "- none: use one GPU only\n"
           "- layer (default): split layers and KV across GPUs (pipelined)\n"
           "- row: split weight across GPUs by rows (parallelized)\n"
           "- tensor: split weights and KV across GPUs (parallelized, EXPERIMENTAL)"),
    Option("-ts --tensor-split", "N0,N1,N2,...", "LLAMA_ARG_TENSOR_SPLIT", tensor_split(),
           "fraction of the model to offload to each GPU, comma-separated list of proportions, e.g. 3,1"),
    Option("-mg --main-gpu", "INDEX", "LLAMA_ARG_MAIN_GPU", option_integer("main_gpu"),
           "the GPU to use for the model (with split-mode = none), or for intermediate results and KV "
           "(with split-mode = row) (default: 0)"),
    Option("-fit --fit", "[on|off]", "LLAMA_ARG_FIT", on_off("fit_params"),
           "whether to adjust unset arguments to fit in device memory ('on' or 'off', default: 'on')"),
    Option("-fitt --fit-target", "MiB0,MiB1,MiB2,...", "LLAMA_ARG_FIT_TARGET", fit_target(),
           "target margin per device for --fit, comma-separated list of values, single value is "
           "broadcast across all devices, default: 1024"),
    Option("-fitc --fit-ctx", "N", "LLAMA_ARG_FIT_CTX", option_integer("fit_params_min_ctx"),
           "minimum ctx size that can be set by --fit option, default: 4096"),
    Option("--check-tensors", "", "", switch("check_tensors"),
           "check model tensor data for invalid values (default: false)"),
    Option("--op-offload | --no-op-offload", "", "", switch("no_op_offload", sets=False),
           "whether to offload host tensor operations to device (default: true)"),
    Option("--lora", "FNAME", "", lora(scaled=False),
           "path to LoRA adapter (use comma-separated values to load multiple adapters)"),
    Option("--lora-scaled", "FNAME:SCALE,...", "", lora(scaled=True),
           "path to LoRA adapter with user defined scaling (format: FNAME:SCALE,...)\n"
           "note: use comma-separated values"),
    Option("-m --model", "FNAME", "LLAMA_ARG_MODEL", text("model.path"),
           "model path to load"),
    Option("-v --verbose --log-verbose", "", "", read_into("verbosity", read=lambda _: 2**31 - 1),
           "Set verbosity level to infinity (i.e. log all messages, useful for debugging)"),
    Option("--offline", "", "LLAMA_ARG_OFFLINE", switch("offline"),
           "Offline mode: forces use of cache, prevents network access"),
    Option("-lv --verbosity --log-verbosity", "N", "LLAMA_ARG_LOG_VERBOSITY", option_integer("verbosity"),
           "Set the verbosity threshold. Messages with a higher verbosity will be ignored. Values:\n"
           " - 0: generic output\n"
           " - 1: error\n"
           " - 2: warning\n"
           " - 3: info\n"
           " - 4: trace (more info)\n"
           " - 5: debug\n"
           "(default: 3)\n"),
    _kv_type("--spec-draft-type-k -ctkd --cache-type-k-draft", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
             "speculative.draft.cache_type_k", "KV cache data type for K for the draft model"),
    _kv_type("--spec-draft-type-v -ctvd --cache-type-v-draft", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
             "speculative.draft.cache_type_v", "KV cache data type for V for the draft model"),
)

SAMPLING: tuple[Option, ...] = (
    Option("--samplers", "SAMPLERS", "", sampled("samplers", str, "SAMPLERS"),
           "samplers that will be used for generation in the order, separated by ';'\n"
           "(default: penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature)"),
    Option("-s --seed", "SEED", "", sampled("seed", unsigned),
           "RNG seed (default: -1, use random seed for -1)"),
    Option("--ignore-eos", "", "", switch("sampling.ignore_eos"),
           "ignore end of stream token and continue generating (implies --logit-bias EOS-inf)"),
    Option("--temp --temperature", "N", "LLAMA_ARG_TEMPERATURE", sampled("temp", at_least_zero, "TEMP"),
           "temperature (default: 0.80)"),
    Option("--top-k", "N", "LLAMA_ARG_TOP_K", sampled("top_k", integer, "TOP_K"),
           "top-k sampling (default: 40, 0 = disabled)"),
    Option("--top-p", "N", "LLAMA_ARG_TOP_P", sampled("top_p", number, "TOP_P"),
           "top-p sampling (default: 0.95, 1.0 = disabled)"),
    Option("--min-p", "N", "LLAMA_ARG_MIN_P", sampled("min_p", number, "MIN_P"),
           "min-p sampling (default: 0.05, 0.0 = disabled)"),
    Option("--top-nsigma --top-n-sigma", "N", "", sampled("top_n_sigma", number),
           "top-n-sigma sampling (default: -1.00, -1.0 = disabled)"),
    Option("--xtc-probability", "N", "", sampled("xtc_probability", number, "XTC_PROBABILITY"),
           "xtc probability (default: 0.00, 0.0 = disabled)"),
    Option("--xtc-threshold", "N", "", sampled("xtc_threshold", number, "XTC_THRESHOLD"),
           "xtc threshold (default: 0.10, 1.0 = disabled)"),
    Option("--typical --typical-p", "N", "", sampled("typ_p", number),
           "locally typical sampling, parameter p (default: 1.00, 1.0 = disabled)"),
    Option("--repeat-last-n", "N", "", sampled("penalty_last_n", at_least_minus_one, "PENALTY_LAST_N"),
           "last n tokens to consider for penalize (default: 64, 0 = disabled)"),
    Option("--repeat-penalty", "N", "LLAMA_ARG_REPEAT_PENALTY",
           sampled("penalty_repeat", number, "PENALTY_REPEAT"),
           "penalize repeat sequence of tokens (default: 1.00, 1.0 = disabled)"),
    Option("--presence-penalty", "N", "LLAMA_ARG_PRESENCE_PENALTY", sampled("penalty_present", number),
           "repeat alpha presence penalty (default: 0.00, 0.0 = disabled)"),
    Option("--frequency-penalty", "N", "LLAMA_ARG_FREQUENCY_PENALTY", sampled("penalty_freq", number),
           "repeat alpha frequency penalty (default: 0.00, 0.0 = disabled)"),
    Option("--dry-multiplier", "N", "", sampled("dry_multiplier", number),
           "set DRY sampling multiplier (default: 0.00, 0.0 = disabled)"),
    Option("--dry-base", "N", "", sampled("dry_base", number),
           "set DRY sampling base value (default: 1.75)"),
    Option("--dry-allowed-length", "N", "", sampled("dry_allowed_length", integer),
           "set allowed length for DRY sampling (default: 2)"),
    Option("--dry-penalty-last-n", "N", "", sampled("dry_penalty_last_n", at_least_minus_one),
           "set DRY penalty for the last n tokens (default: 64, 0 = disable)"),
    Option("--adaptive-target", "N", "", sampled("adaptive_target", number),
           "adaptive-p: select tokens near this probability (valid range 0.0 to 1.0; negative = "
           "disabled) (default: -1.00)\n"
           "[(more info)](https://github.com/ggml-org/llama.cpp/pull/17927)"),
    Option("--adaptive-decay", "N", "", sampled("adaptive_decay", number),
           "adaptive-p: decay rate for target adaptation over time. lower values are more reactive, "
           "higher values are more stable.\n"
           "(valid range 0.0 to 0.99) (default: 0.90)"),
    Option("--dynatemp-range", "N", "", sampled("dynatemp_range", number),
           "dynamic temperature range (default: 0.00, 0.0 = disabled)"),
    Option("--dynatemp-exp", "N", "", sampled("dynatemp_exponent", number),
           "dynamic temperature exponent (default: 1.00)"),
    Option("--mirostat", "N", "", sampled("mirostat", integer, "MIROSTAT"),
           "use Mirostat sampling.\n"
           "Top K, Nucleus and Locally Typical samplers are ignored if used. (default: 0, 0 = "
           "disabled, 1 = Mirostat, 2 = Mirostat 2.0)"),
    Option("--mirostat-lr", "N", "", sampled("mirostat_eta", number, "MIROSTAT_ETA"),
           "Mirostat learning rate, parameter eta (default: 0.10)"),
    Option("--mirostat-ent", "N", "", sampled("mirostat_tau", number, "MIROSTAT_TAU"),
           "Mirostat target entropy, parameter tau (default: 5.00)"),
    Option("--grammar", "GRAMMAR", "", grammar(file=False),
           "BNF-like grammar to constrain generations (see samples in grammars/ dir)"),
    Option("--grammar-file", "FNAME", "", grammar(file=True),
           "file to read grammar from"),
    Option("-bs --backend-sampling", "", "LLAMA_ARG_BACKEND_SAMPLING", switch("sampling.backend_sampling"),
           "enable backend sampling (experimental) (default: disabled)"),
)
# fmt: on
