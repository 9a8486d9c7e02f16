"""The sizes of a plan and their memory: slots, context, KV cache, layers, draft, projector.

``plan`` and ``inspect`` both choose sizes here, so that they report the same memory for a model.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.llama_server.argv_builder import ExtraArgs
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.llama_server.plan_limits import PlanLimits, adjustable_of
from llamasup.core.planning.checkpoints import Checkpoints, decide_checkpoints
from llamasup.core.planning.context import Context, Reach, decide_context, longest_context, reaches
from llamasup.core.planning.drafting import (
    Drafter,
    decide_drafter,
    draft_gpu_layers,
    draft_shape,
    shape_with_drafts,
)
from llamasup.core.planning.inputs import SizeInputs, preferences
from llamasup.core.planning.kv_type import KvCache, decide_kv_cache
from llamasup.core.planning.measured.load_history import LoadHistory, correction_for
from llamasup.core.planning.memory.estimate import Correction, Load, MemoryEstimate, estimate
from llamasup.core.planning.memory.kv_cache import ContextShape
from llamasup.core.planning.model_class_rules import served_as
from llamasup.core.planning.placement import RUNTIME_BYTES, decide_gpu_layers, free_memory
from llamasup.core.settings.model import Settings
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.process.environment import RuntimeKind

_NO_LIMITS = PlanLimits()
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
_NO_HISTORY = LoadHistory()


class PlanSizes(Struct, frozen=True):
    """The chosen sizes. ``memory`` excludes the prompt cache, which gets a part of the spare memory."""

    serves: ModelClass  # --embedding after "--" makes a decoder an encoder
    context: Context
    kv: KvCache
    gpu_layers: int | None  # 0: none; None: as many as the build fits to its devices
    drafter: Drafter | None
    shape: ContextShape
    draft_shape: ContextShape  # as the model's own if the draft's facts are unknown
    key: str  # everything that decides the sizes in memory
    correction: Correction
    memory: MemoryEstimate
    bounds: PlanLimits
    adjustable: frozenset[str]  # the options of llamasup whose values were not set by hand
    checkpoints: Checkpoints = Checkpoints()

    @property
    def parallel(self) -> int:
        return self.context.parallel

    @property
    def ctx_size_of_slot(self) -> int:
        return self.shape.ctx_total // self.context.parallel

    @property
    def least_ctx_size(self) -> int | None:
        return self.context.least_of_slot

    @property
    def kv_type(self) -> str:
        return self.kv.name

    @property
    def smaller_kv_type(self) -> str | None:
        return self.kv.smaller


def choose_sizes(
    capabilities: Capabilities,
    model: ModelFacts,
    hardware: Hardware,
    settings: Settings,
    extra_args: ExtraArgs,
    *,
    kind: RuntimeKind,
    runtime: str = "",
    draft: ModelFacts | None = None,
    projector: ModelFacts | None = None,
    bounds: PlanLimits = _NO_LIMITS,
    history: LoadHistory = _NO_HISTORY,
    shared: bool = False,
) -> PlanSizes:
    """Choose sizes within ``bounds`` and estimate their memory. ``history`` names the build ``runtime``.

    ``shared`` is true if other models need the spare memory of the devices.

    Raises UsageInvalid for an invalid setting, DraftMismatch for a draft of another model.
    """
    prefers = preferences(settings.profile)
    if not model.known:
        prefers = replace(prefers, grows=False, kv_type_on_cpu="f16", kv_types_on_device=("f16",))
    if prefers.server_defaults:
        bounds = PlanLimits(bare=bounds.bare, why=bounds.why if bounds.bare else "")  # it chooses the sizes
    serves = served_as(model, extra_args)
    model = replace(model, context_length=longest_context(capabilities, model, extra_args))
    drafter = decide_drafter(capabilities, model, serves, settings, extra_args, draft)
    if bounds.drafts_off and drafter is not None and drafter.path is None:
        drafter = None
    image_tokens = 0 if projector is None else projector.image_tokens
    inputs = SizeInputs(capabilities, model, serves, settings, extra_args, prefers, bounds)
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
        correction = correction_for(history, runtime, key)
        memory = estimate(
            Load(model, shape, layers),
            free_memory(capabilities, hardware, extra_args, on_device=on_device),
            runtime_bytes=RUNTIME_BYTES[kind],
            draft=draft_load,
            projector_bytes=0 if projector is None else projector.weights_bytes,
            projector_on_device=not extra_args.has("--no-mmproj-offload")
            or extra_args.switch("--mmproj-offload"),
            correction=correction,
        )
        adjustable = adjustable_of(settings, extra_args)
        return PlanSizes(
            *(serves, context, kv, layers, drafter, shape, of_draft),
            *(key, correction, memory, bounds, adjustable),
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
        found = decide_checkpoints(inputs, sizes.memory, sizes.shape, shared=shared)
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
