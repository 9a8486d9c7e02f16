"""The sizes of a plan and their memory: slots, context, KV cache, layers on devices, draft, projector.

``plan`` and ``inspect`` both choose sizes here, so that they report the same memory for a model.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.llama_server.argv_builder import CommandLine, ExtraArgs
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.llama_server.plan_limits import PlanLimits, adjustable_of
from llamasup.core.planning.context import Context, Reach, decide_context, reaches
from llamasup.core.planning.drafting import (
    Drafter,
    decide_drafter,
    draft_gpu_layers,
    draft_shape,
    shape_with_drafts,
)
from llamasup.core.planning.inputs import PlanInputs, out_of_range
from llamasup.core.planning.kv_type import KvCache, decide_kv_cache
from llamasup.core.planning.machine_flags import Checkpoints, decide_checkpoints
from llamasup.core.planning.measured.load_history import correction_for
from llamasup.core.planning.memory.estimate import Correction, FreeMemory, Load, MemoryEstimate, estimate
from llamasup.core.planning.memory.kv_cache import ContextShape
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.process.child import RuntimeKind

_RESERVE_BYTES = 1 << 30  # as --fit leaves free on each device (b11434)
_SHARE_LEFT = 1 / 8
# The user's flags that take or move memory: a load with them is no measurement for a load without.
_MOVE_MEMORY = frozenset(
    (
        *("--no-repack", "-nr", "--repack", "--no-kv-offload", "-nkvo", "--override-tensor", "-ot"),
        *("--n-cpu-moe", "-ncmoe", "--cpu-moe", "-cmoe", "--lora", "--lora-scaled", "--control-vector"),
        *("--device", "-dev", "--no-mmproj-offload", "--load-mode", "-lm", "--no-mmap", "--mlock"),
    )
)


class PlanSizes(Struct, frozen=True, kw_only=True):
    """The chosen sizes, and their memory."""

    model_class: ModelClass  # as it is served: --embedding after "--" makes a decoder an encoder
    context: Context
    kv: KvCache
    layers: int  # of the model
    gpu_layers: int | None  # 0: none; None: as many as the build fits to its devices
    drafter: Drafter | None
    shape: ContextShape
    draft_shape: ContextShape  # as the model's own if the draft's facts are unknown
    key: str  # everything that decides the sizes in memory
    correction: Correction
    memory: MemoryEstimate  # of a plan's sizes alone: without the prompt cache, which gets a part of the rest
    bounds: PlanLimits
    adjustable: frozenset[str]  # the options of llamasup whose values were not set by hand
    checkpoints: Checkpoints = Checkpoints()

    @property
    def parallel(self) -> int:
        return self.context.parallel

    @property
    def ctx_size(self) -> int:
        """The tokens that one request may use."""
        return self.context.per_request

    @property
    def ctx_size_of_slot(self) -> int:
        """The value of llamasup's ``--ctx-size``: the tokens of each request when all slots are busy."""
        return self.shape.ctx_total // self.parallel

    @property
    def kv_type(self) -> str:
        """The type of the KV cache: ``q8_0``, or ``q8_0/f16`` where K and V differ."""
        return self.kv.name

    @property
    def draft(self) -> str | None:
        """The draft as in ``DraftCounts``; None: without drafts."""
        return None if self.drafter is None else self.drafter.path or self.drafter.spec_type


def choose_sizes(inputs: PlanInputs) -> PlanSizes:
    """Choose sizes within the bounds, and estimate their memory.

    Raises UsageInvalid for an invalid setting, DraftMismatch for a draft of another model.
    """
    capabilities, model, prefers, shared = inputs.capabilities, inputs.model, inputs.prefers, inputs.shared
    settings, extra_args, projector = inputs.settings, inputs.extra_args, inputs.projector
    drafter = decide_drafter(inputs)
    if inputs.bounds.drafts_off and drafter is not None and drafter.path is None:
        drafter = None
    image_tokens = 0 if projector is None else projector.image_tokens
    layers = decide_gpu_layers(inputs, drafts=drafter is not None)
    on_device = layers != 0
    moved = tuple(
        (given.option.spellings[0], *given.values)
        for given in extra_args.options
        if given.option is not None and given.words[0] in _MOVE_MEMORY
    )
    if settings.adapters:
        moved += (settings.adapters,)

    def sized(wanted: str, reach: Reach | None = None) -> PlanSizes:
        context = decide_context(inputs, reach, image_tokens=image_tokens)
        kv = decide_kv_cache(inputs, wanted=wanted, on_device=on_device)
        shape = of_draft = _shape(capabilities, extra_args, context, kv)
        draft_load = None
        if drafter is not None:
            if drafter.facts is not None:
                of_draft = draft_shape(drafter.facts, shape)
                draft_layers = draft_gpu_layers(drafter.facts, extra_args, layers)
                draft_load = Load(drafter.facts, of_draft, draft_layers)
            shape = shape_with_drafts(shape, drafter, extra_args)
        attachments = (
            draft_load and (draft_load.model.file_bytes, draft_load.shape),
            projector and projector.file_bytes,
        )
        key = f"{shape} {layers} {attachments} {moved} {[each.name for each in capabilities.devices]}"
        correction = correction_for(inputs.history, inputs.runtime, key)
        memory = estimate(
            Load(model, shape, layers),
            free_memory(inputs, on_device=on_device),
            runtime_bytes=_RUNTIME_BYTES[inputs.kind],
            draft=draft_load,
            projector_bytes=0 if projector is None else projector.weights_bytes,
            projector_on_device=not extra_args.has("--no-mmproj-offload")
            or extra_args.switch("--mmproj-offload"),
            correction=correction,
        )
        return PlanSizes(
            model_class=inputs.serves,
            context=context,
            kv=kv,
            layers=model.layers,
            gpu_layers=layers,
            drafter=drafter,
            shape=shape,
            draft_shape=of_draft,
            key=key,
            correction=correction,
            memory=memory,
            bounds=inputs.bounds,
            adjustable=adjustable_of(settings, extra_args),
        )

    def smallest() -> tuple[str, PlanSizes]:
        if not on_device:
            return prefers.kv_type_on_cpu, sized(prefers.kv_type_on_cpu)
        *roomier, packed = prefers.kv_types_on_device
        for kv_type in () if shared else roomier:
            sizes = sized(kv_type)
            # A packed cache leaves room for more layers, unless their number is fixed.
            fixed = layers is not None and sizes.memory.free.devices > 0
            if (fixed or sizes.memory.gpu_layers == model.layers + 1) and not sizes.memory.lacks_device:
                return kv_type, sizes
        return packed, sized(packed)

    def with_checkpoints(sizes: PlanSizes) -> PlanSizes:
        """Add the checkpoints, which take a part of the remaining memory like the prompt cache."""
        found = decide_checkpoints(inputs, sizes.memory, sizes.shape)
        memory = sizes.memory.with_checkpoints(found.size_bytes)
        return replace(sizes, checkpoints=found, memory=memory)

    kv_type, least = smallest()
    for reach in reaches(inputs):
        longer = sized(kv_type, reach)
        # The whole context of the model may take what llama-server's defaults would take.
        whole = reach.per_request >= model.context_length
        left = 0.0 if whole else _SHARE_LEFT
        if _is_comfortable(longer.memory, least.memory, share_left=left, shared=shared):
            return with_checkpoints(longer)
        if whole and longer.memory.fits and not (on_device or shared):
            packed = sized("q8_0", reach)
            if _is_comfortable(packed.memory, least.memory, share_left=left, shared=shared):
                return with_checkpoints(packed)
    return with_checkpoints(least)


def _is_comfortable(
    memory: MemoryEstimate, least: MemoryEstimate, *, share_left: float, shared: bool
) -> bool:
    """Whether a longer context than that of ``least`` leaves enough memory to others, and moves no layers.

    ``share_left`` is a share of the free memory. ``shared`` is true if other models need the memory.
    """
    if not memory.free.known or not memory.fits:
        return False
    if shared and memory.context_bytes > max(least.context_bytes, memory.weights_bytes):
        return False
    free = memory.free
    free_bytes, left_bytes = free.host_bytes, free.host_bytes - memory.host_bytes
    device_left = free.device_bytes - memory.device_bytes
    if free.user_placed:
        free_bytes, left_bytes = memory.available_bytes, left_bytes + device_left
    elif memory.device_bytes > least.device_bytes and device_left < free.devices * _RESERVE_BYTES:
        return False
    keeps_layers = free.user_placed or memory.gpu_layers == least.gpu_layers
    is_enough = left_bytes >= max(_RESERVE_BYTES, share_left * free_bytes)
    return keeps_layers and (is_enough or memory.host_bytes <= least.host_bytes)


def _shape(capabilities: Capabilities, extra_args: ExtraArgs, context: Context, kv: KvCache) -> ContextShape:
    """Make the shape. Options that were added soon after a change show whether a build has that change."""
    return ContextShape(
        ctx_total=context.total,
        parallel=context.parallel,
        ubatch=context.ubatch,
        k_type=kv.k_type,
        v_type=kv.v_type,
        flash_attn=kv.flash in ("on", "auto"),
        unified=context.unified,
        swa_full=extra_args.switch("--swa-full") or not capabilities.knows("--swa-full"),
        mla_values=not capabilities.knows("--fit"),  # December 2025
        outputs_per_slot=1 if capabilities.knows("--load-mode") else None,  # July 2026; #23861 is of June
    )


# --- the free memory, and layers on devices -------------------------------------------------------


# The process without weights, KV cache and compute buffers: code, libraries, and Python for the embedded
# runtime. Resident after 64 tokens: 18 to 20 MiB, and 31 to 33 (b11434, 1 to 4 threads).
_RUNTIME_BYTES: Mapping[RuntimeKind, int] = {"binary": 24 << 20, "embedded": 40 << 20}
# What a process takes on a CUDA device in addition to its buffers: the driver's context, the kernels, cuBLAS.
# 624 to 735 MB on an H100 (b11434, CUDA 13.0; docs/gpu.md).
_CUDA_PROCESS_BYTES = 736 << 20
# Address space that the process reserves in addition: libraries, and the arenas of its first threads (490 MiB
# with 8 threads, b11434). glibc can do without an arena, but not without a stack.
_RESERVED_BYTES = 512 << 20
_STACK_BYTES = 8 << 20
_THREADS_PER_CPU = 2  # one to compute, one for HTTP (--threads-http is the number of CPUs, less one)


def free_memory(inputs: PlanInputs, *, on_device: bool) -> FreeMemory:
    """The free memory of the host, and of the used devices that have their own memory."""
    hardware, extra_args = inputs.hardware, inputs.extra_args
    chosen = extra_args.value("--device")
    names = None if chosen is None else chosen.split(",")
    listed = inputs.capabilities.devices if on_device else ()
    used = [device for device in listed if names is None or device.name in names]
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


def decide_gpu_layers(inputs: PlanInputs, *, drafts: bool) -> int | None:
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


def give_gpu_layers(line: CommandLine, inputs: PlanInputs, expected: int | None) -> None:
    """Add the user's number, or ``expected`` for a build that has devices but no ``--fit``.

    ``expected`` is None if the devices have no memory of their own: then all layers are placed on them.
    """
    capabilities, bounds = inputs.capabilities, inputs.bounds
    option = capabilities.find("--gpu-layers")
    every = "all" if option is not None and "'all'" in option.description else "999"
    layers = inputs.settings.gpu_layers
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
        if expected is not None and expected <= inputs.model.layers:
            number = str(expected)
            every_layer = inputs.model.layers + 1
            why = f"the device holds about this many of {every_layer} layers; this build has no --fit"
        line.give("--gpu-layers", number, why)
    else:
        fits = "llama-server fits the layers to its devices (--fit) only if no number is passed"
        line.leave_out("--gpu-layers", fits if capabilities.devices else "there is no device for layers")
