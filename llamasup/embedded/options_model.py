"""llama-server's "common params", second half: the model file, its memory and devices, the log."""

from __future__ import annotations

from llamasup.embedded.option import Option
from llamasup.embedded.rules import (
    cpu_moe,
    fit_target,
    gpu_layers,
    lora,
    override_tensor,
    tensor_split,
    verbose,
)
from llamasup.embedded.setters import choice, on_off, option_integer, switch, text
from llamasup.embedded.values import KV_TYPES

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

# Two lines an option; the formatter would make it twelve.
# fmt: off
MODEL: tuple[Option, ...] = (
    Option("-ctk --cache-type-k", "TYPE", "LLAMA_ARG_CACHE_TYPE_K",
           choice("cache_type_k", "ggml_type", KV_TYPES),
           "KV cache data type for K\n"
           "allowed values: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1 (default: f16)"),
    Option("-ctv --cache-type-v", "TYPE", "LLAMA_ARG_CACHE_TYPE_V",
           choice("cache_type_v", "ggml_type", KV_TYPES),
           "KV cache data type for V\n"
           "allowed values: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1 (default: f16)"),
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
    Option("-v --verbose --log-verbose", "", "", verbose(),
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
    Option("--spec-draft-type-k -ctkd --cache-type-k-draft", "TYPE", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
           choice("speculative.draft.cache_type_k", "ggml_type", KV_TYPES),
           "KV cache data type for K for the draft model\n"
           "allowed values: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1 (default: f16)"),
    Option("--spec-draft-type-v -ctvd --cache-type-v-draft", "TYPE", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
           choice("speculative.draft.cache_type_v", "ggml_type", KV_TYPES),
           "KV cache data type for V for the draft model\n"
           "allowed values: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1 (default: f16)"),
)
# fmt: on
