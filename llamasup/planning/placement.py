"""Where a model goes: layers on devices, and how much room there is there and on the host."""

from __future__ import annotations

from collections.abc import Mapping

from llamasup.errors import UsageInvalid
from llamasup.gguf.facts import ModelFacts
from llamasup.llama_server.capabilities import Capabilities
from llamasup.llama_server.flags import CommandLine, ExtraArgs
from llamasup.llama_server.plan_limits import PlanLimits
from llamasup.llama_server.settings import Settings
from llamasup.planning.memory.estimate import Room
from llamasup.system.hardware.facts import Hardware
from llamasup.system.process.environment import RuntimeKind

__all__ = ["RUNTIME_BYTES", "decide_gpu_layers", "give_gpu_layers", "host_room_bytes", "room_for"]

# What the process takes beside weights, KV cache and compute buffers: code, libraries, the server itself, and
# Python for the embedded one. Resident after 64 tokens: 18 to 20 MiB, and 31 to 33 (b11434, 1 to 4 threads).
RUNTIME_BYTES: Mapping[RuntimeKind, int] = {"binary": 24 << 20, "embedded": 40 << 20}
# Address space that it reserves besides what it uses: libraries, and the arenas of its first threads (490 MiB
# with 8 threads, b11434). Where an arena cannot be had glibc does without; each stack has to be there.
_RESERVED_BYTES = 512 << 20
_STACK_BYTES = 8 << 20
_THREADS_PER_CPU = 2  # one that computes, one for HTTP (--threads-http is the number of CPUs, less one)


def room_for(
    capabilities: Capabilities, hardware: Hardware, extra_args: ExtraArgs, *, on_device: bool
) -> Room:
    """What is free on the host, and on those devices that will be used and have memory of their own."""
    chosen = extra_args.value("--device")
    names = None if chosen is None else chosen.split(",")
    used = [each for each in capabilities.devices if on_device and (names is None or each.name in names)]
    devices = [each for each in used if not each.shares_host_memory]
    return Room(
        host_room_bytes(hardware),
        sum(each.free_bytes for each in devices),
        len(devices),
        known=hardware.memory_total_bytes > 0,
        placed_by_hand=bool(devices) and _placed_by_hand(extra_args),
        names=tuple(each.name for each in used),
    )


def _placed_by_hand(extra_args: ExtraArgs) -> bool:
    if extra_args.has("--no-kv-offload") and not extra_args.switch("--kv-offload"):
        return True
    return any(extra_args.has(flag) for flag in ("--n-cpu-moe", "--cpu-moe", "--override-tensor"))


def host_room_bytes(hardware: Hardware) -> int:
    """Memory of the host that a model may take: what is free, and what may be mapped.

    The limit on address space counts for each process by itself: all of it is llama-server's.
    """
    limit = hardware.address_space_limit_bytes
    if limit is None:
        return hardware.memory_available_bytes
    reserved = _RESERVED_BYTES + hardware.cpus_allowed * _THREADS_PER_CPU * _STACK_BYTES
    return min(hardware.memory_available_bytes, max(0, limit - reserved))


def decide_gpu_layers(
    capabilities: Capabilities,
    model: ModelFacts,
    settings: Settings,
    extra_args: ExtraArgs,
    bounds: PlanLimits,
    *,
    drafts: bool,
) -> int | None:
    """Layers that will be on devices; None: as many as fit there, by the build's own count or by ours.

    Ours is without the room for a draft model (``drafts``): then all of them, or the plan is refused.
    """
    if not capabilities.devices or extra_args.value("--device") == "none":
        return 0
    asked = extra_args.value("--gpu-layers") or settings.gpu_layers
    if asked in (None, "auto"):
        if bounds.gpu_layers is not None:
            return bounds.gpu_layers
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
    """By hand, or the ``expected`` ones in a build that has devices but cannot fit layers to them by itself.

    ``expected`` is None where devices have no memory of their own: then all of them.
    """
    option = capabilities.find("--gpu-layers")
    every = "all" if option is not None and "'all'" in option.description else "999"
    layers = settings.gpu_layers
    if isinstance(layers, int) and layers < 0:
        raise UsageInvalid(f"--gpu-layers {layers} is out of range", remedy="give 0 or more, auto, or all")
    if layers == 0 and option is None:
        line.leave_out("--gpu-layers", "this build has no device to put layers on", value="0")
    elif layers is not None and layers != "auto":
        value = every if layers == "all" else layers
        line.give("--gpu-layers", value, "asked for with --gpu-layers", asked="--gpu-layers")
    elif capabilities.devices and bounds.gpu_layers is not None:
        line.give("--gpu-layers", bounds.gpu_layers, f"fewer than fit by the build's own count: {bounds.why}")
    elif capabilities.devices and not capabilities.knows("--fit"):
        layers_said, why = every, "this build leaves the device unused unless told otherwise"
        if expected is not None and expected <= model.layers:
            layers_said = str(expected)
            why = f"the device holds as many of {model.layers + 1} by our estimate; this build does not count"
        line.give("--gpu-layers", layers_said, why)
    else:
        fits = "llama-server fits layers to its devices (--fit), and gives up on that if told a number"
        line.leave_out(
            "--gpu-layers", fits if capabilities.devices else "there is no device to put layers on"
        )
