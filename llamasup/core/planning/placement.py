"""Places the layers of a model on devices, and finds the free memory of the host and the devices."""

from __future__ import annotations

from collections.abc import Mapping

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.llama_server.argv_builder import CommandLine, ExtraArgs
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.llama_server.plan_limits import PlanLimits
from llamasup.core.planning.inputs import SizeInputs, out_of_range
from llamasup.core.planning.memory.estimate import FreeMemory
from llamasup.core.settings.model import Settings
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.process.environment import RuntimeKind

# The process without weights, KV cache and compute buffers: code, libraries, and Python for the embedded
# runtime. Resident after 64 tokens: 18 to 20 MiB, and 31 to 33 (b11434, 1 to 4 threads).
RUNTIME_BYTES: Mapping[RuntimeKind, int] = {"binary": 24 << 20, "embedded": 40 << 20}
# What a process takes on a CUDA device in addition to its buffers: the driver's context, the kernels, cuBLAS.
# 624 to 735 MB on an H100 (b11434, CUDA 13.0; docs/gpu.md).
_CUDA_PROCESS_BYTES = 736 << 20
# Address space that the process reserves in addition: libraries, and the arenas of its first threads (490 MiB
# with 8 threads, b11434). glibc can do without an arena, but not without a stack.
_RESERVED_BYTES = 512 << 20
_STACK_BYTES = 8 << 20
_THREADS_PER_CPU = 2  # one to compute, one for HTTP (--threads-http is the number of CPUs, less one)


def free_memory(
    capabilities: Capabilities, hardware: Hardware, extra_args: ExtraArgs, *, on_device: bool
) -> FreeMemory:
    """The free memory of the host, and of the used devices that have their own memory."""
    chosen = extra_args.value("--device")
    names = None if chosen is None else chosen.split(",")
    used = [
        device for device in capabilities.devices if on_device and (names is None or device.name in names)
    ]
    devices = [device for device in used if not device.shares_host_memory]
    return FreeMemory(
        host_free_bytes(hardware),
        sum(device.free_bytes for device in devices),
        len(devices),
        known=hardware.memory_total_bytes > 0,
        user_placed=bool(devices) and _is_user_placed(extra_args),
        names=tuple(device.name for device in used),
        driver_bytes=sum(_CUDA_PROCESS_BYTES for device in devices if device.is_cuda),
    )


def _is_user_placed(extra_args: ExtraArgs) -> bool:
    if extra_args.has("--no-kv-offload") and not extra_args.switch("--kv-offload"):
        return True
    return any(extra_args.has(flag) for flag in ("--n-cpu-moe", "--cpu-moe", "--override-tensor"))


def host_free_bytes(hardware: Hardware) -> int:
    """The host memory that a model may take: the free memory, within the limit on address space.

    That limit applies to each process separately, so llama-server may use all of it.
    """
    limit = hardware.address_space_limit_bytes
    if limit is None:
        return hardware.memory_available_bytes
    reserved = _RESERVED_BYTES + hardware.cpus_allowed * _THREADS_PER_CPU * _STACK_BYTES
    return min(hardware.memory_available_bytes, max(0, limit - reserved))


def decide_gpu_layers(inputs: SizeInputs, *, drafts: bool) -> int | None:
    """Choose the number of layers on devices. None: as many as fit.

    The build, or else llamasup (``memory/estimate.py``), counts how many fit. llamasup's count ignores the
    memory of a draft model (``drafts``), so with a draft model all layers are placed on devices.
    """
    capabilities, model, extra_args = inputs.capabilities, inputs.model, inputs.extra_args
    if not capabilities.devices or extra_args.value("--device") == "none":
        return 0
    asked = extra_args.value("--gpu-layers") or inputs.settings.gpu_layers
    if asked in (None, "auto"):
        if inputs.bounds.gpu_layers is not None:
            return inputs.bounds.gpu_layers
        return model.layers + 1 if drafts and not capabilities.knows("--fit") else None
    return int(asked) if str(asked).isdecimal() else model.layers + 1  # "all", and -1 of older builds


def give_gpu_layers(
    line: CommandLine,
    capabilities: Capabilities,
    model: ModelFacts,
    settings: Settings,
    bounds: PlanLimits,
    expected: int | None,
) -> None:
    """Add the user's number, or ``expected`` for a build that has devices but no ``--fit``.

    ``expected`` is None if the devices have no memory of their own: then all layers are placed on them.
    """
    option = capabilities.find("--gpu-layers")
    every = "all" if option is not None and "'all'" in option.description else "999"
    layers = settings.gpu_layers
    if isinstance(layers, int) and layers < 0:
        raise out_of_range("--gpu-layers", layers, "0 or more, auto, or all")
    if layers == 0 and option is None:
        line.leave_out("--gpu-layers", "this build has no device for layers", value="0")
    elif layers is not None and layers != "auto":
        value = every if layers == "all" else layers
        line.give("--gpu-layers", value, "set with --gpu-layers", asked="--gpu-layers")
    elif capabilities.devices and bounds.gpu_layers is not None:
        line.give(
            "--gpu-layers", bounds.gpu_layers, f"reduced from what the build fits by itself: {bounds.why}"
        )
    elif capabilities.devices and not capabilities.knows("--fit"):
        number, why = every, "this build uses the device only if the flag is passed"
        if expected is not None and expected <= model.layers:
            number = str(expected)
            why = f"the device holds about this many of {model.layers + 1} layers; this build has no --fit"
        line.give("--gpu-layers", number, why)
    else:
        fits = "llama-server fits the layers to its devices (--fit) only if no number is passed"
        line.leave_out("--gpu-layers", fits if capabilities.devices else "there is no device for layers")
