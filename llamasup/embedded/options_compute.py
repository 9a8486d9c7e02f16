"""llama-server's "common params", first half: threads, context, attention, RoPE."""

from __future__ import annotations

from llamasup.embedded.option import Option
from llamasup.embedded.rules import ctx_size, flash_attn, rope_scale
from llamasup.embedded.setters import (
    affinity,
    choice,
    on_off,
    option_integer,
    option_number,
    positive,
    switch,
)
from llamasup.embedded.values import PRIORITIES

_ROPE_SCALINGS = {
    "none": "LLAMA_ROPE_SCALING_TYPE_NONE",
    "linear": "LLAMA_ROPE_SCALING_TYPE_LINEAR",
    "yarn": "LLAMA_ROPE_SCALING_TYPE_YARN",
}

# Two lines an option; the formatter would make it twelve.
# fmt: off
COMPUTE: tuple[Option, ...] = (
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
)
# fmt: on
