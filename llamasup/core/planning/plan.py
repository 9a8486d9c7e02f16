"""Turns facts and settings into one command line and environment, with a reason for each flag (pure).

``plan`` never looks at the number of a build, only at the flags that its ``--help`` lists. A flag that the
build lacks is left out with a reason; if the user's own setting needs it, ``plan`` raises an error. Reasons
are clauses in lower case without a full stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from msgspec import Struct, structs
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.http.address import Address, UnixAddress
from llamasup.core.llama_server.argv_builder import CommandLine, ExtraArgs, Reason, read_extra
from llamasup.core.llama_server.help_text import Capabilities, names_commit
from llamasup.core.llama_server.memory_log import give_size_log
from llamasup.core.llama_server.plan_limits import PlanLimits, Reduction
from llamasup.core.llama_server.rpc.workers import NO_WORKERS, Workers, give_workers, warnings_of
from llamasup.core.llama_server.slots.policy import KeptSlots, SlotHome, give_slot_folder, kept_slots
from llamasup.core.planning.adapters import give_adapters
from llamasup.core.planning.checkpoints import give_checkpoints
from llamasup.core.planning.child_address import give_address
from llamasup.core.planning.context import give_context
from llamasup.core.planning.drafting import DRAFT_MODEL, drafting_off, give_drafter
from llamasup.core.planning.inputs import preferences
from llamasup.core.planning.kv_type import give_kv_cache
from llamasup.core.planning.machine_flags import (
    WHY_SPIN,
    decide_prompt_cache,
    decide_threads,
    give_lock,
    give_priority,
    give_threads,
    spin_settings,
    why_no_lock,
    why_no_priority,
    why_no_repack,
)
from llamasup.core.planning.measured.draft_acceptance import DraftCounts, counts_for
from llamasup.core.planning.measured.load_history import LoadHistory, runtime_id
from llamasup.core.planning.measured.tuned import Measured
from llamasup.core.planning.memory.estimate import Correction, MemoryEstimate
from llamasup.core.planning.memory.kv_cache import ContextShape
from llamasup.core.planning.model_class_rules import UNKNOWN, give_purpose, refuse_unservable, unknown_warning
from llamasup.core.planning.placement import give_gpu_layers
from llamasup.core.planning.projectors import Pairing, give_projector, projector_loaded
from llamasup.core.planning.sizes import choose_sizes
from llamasup.core.settings.model import Settings
from llamasup.core.settings.names import names_of
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.process.environment import WHY_SET, RuntimeKind, child_environment

__all__ = ["LaunchPlan", "Reason", "plan"]


_MIB = 1 << 20
_BARE_CONTEXT = 8192
_NO_LIMITS = PlanLimits()
_NO_HISTORY = LoadHistory()


class LaunchPlan(Struct, frozen=True):
    argv: tuple[str, ...]  # the whole command line, the executable first
    env: Mapping[str, str]  # the child's whole environment
    env_reasons: Mapping[str, str]  # for the variables in env that are not the user's own
    secret_names: frozenset[str]  # names in env whose values are never shown
    reasons: tuple[Reason, ...]  # for every flag in argv, and for every flag that was left out
    memory: MemoryEstimate
    address: Address  # where the child will listen
    ctx_size: int  # tokens that one request may use
    least_ctx_size: (
        int | None
    )  # tokens of a slot that the profile asks for; None: a slot has no more than these
    parallel: int
    image_tokens: int  # of the largest image, which must fit in one micro-batch; 0: any micro-batch does
    kv_type: str  # "q8_0"; "q8_0/f16" where K and V differ
    model_class: ModelClass  # as it is served: --embedding after "--" makes a decoder an encoder
    api_key: str | None  # the child's own, for the proxy; None over a Unix socket
    key: str  # everything that decides the sizes in memory
    correction: Correction
    shape: ContextShape
    layers: int  # of the model
    flash_attn: str | None
    gpu_layers: int | None  # 0: none; None: as many as the build fits to its devices
    smaller_kv_type: str | None  # a type that takes less memory and may be used
    bounds: PlanLimits
    checked: bool  # against the free memory; then the build's own warning about memory counts too
    adjustable: frozenset[str]  # the options of llamasup whose values were not set by hand
    slots: KeptSlots | None  # None: the contents of the slots are lost when the server ends
    nice: int | None = None  # None: that of llamasup
    reduced: tuple[Reduction, ...] = ()  # what is smaller than in the plan without limits
    draft: str | None = None  # as in ``DraftCounts``; None: without drafts
    draft_counts: DraftCounts | None = None  # of earlier processes with this draft
    ignores_sigpipe: bool = False
    workers: tuple[str, ...] = ()  # the RPC workers that it uses, as in the settings
    build: str = ""  # of llama-server
    warnings: tuple[tuple[str, str], ...] = ()  # message and remedy, for the user at the start
    measured: Measured | None = None  # the changes by ``llamasup tune`` that the plan contains

    @property
    def ctx_size_of_slot(self) -> int:
        """The value of llamasup's ``--ctx-size``: the tokens of each request when all slots are busy."""
        return self.shape.ctx_total // self.parallel

    @property
    def shared_ctx_size(self) -> int:
        """The tokens of one context that all slots share; 0: each slot has its own."""
        return self.shape.ctx_total if self.shape.unified and self.parallel > 1 else 0

    @property
    def has_own_flags(self) -> bool:
        """Whether llamasup adds flags that are not needed."""
        return "--profile" in self.adjustable

    @property
    def drafts_itself(self) -> bool:
        """Whether the model drafts with its own layers, and the user did not ask for it."""
        return self.draft == "draft-mtp" and "--spec-type" in self.adjustable

    @property
    def device(self) -> str:
        """The devices that compute: ``CPU``, ``CUDA0,CUDA1``, or ``CUDA0+CPU`` if layers are split."""
        names = self.memory.free.names
        on_device = self.gpu_layers if self.memory.gpu_layers is None else self.memory.gpu_layers
        if not names or on_device == 0:
            return "CPU"
        is_split = on_device is not None and on_device <= self.layers  # the output is one more
        return ",".join(names) + ("+CPU" if is_split else "")

    @property
    def env_shown(self) -> dict[str, str]:
        """The environment as it may be printed."""
        return {name: "***" if name in self.secret_names else value for name, value in self.env.items()}


def plan(
    *,
    command: tuple[str, ...],
    kind: RuntimeKind,
    capabilities: Capabilities,
    model: ModelFacts,
    model_path: str,
    hardware: Hardware,
    settings: Settings,
    address: Address,
    environ: Mapping[str, str],
    config_home: str,
    library_path: str | None = None,
    draft: ModelFacts | None = None,
    mmproj: ModelFacts | None = None,
    found: Pairing | None = None,
    api_key: str | None = None,
    api_key_file: str | None = None,
    bounds: PlanLimits = _NO_LIMITS,
    history: LoadHistory = _NO_HISTORY,
    shared: bool = False,
    slot_home: SlotHome | None = None,
    measured: Measured | None = None,
    workers: Workers = NO_WORKERS,
) -> LaunchPlan:
    """Choose the command line and environment for this model, machine and build, with a reason for each flag.

    Paths (``model_path``, and ``draft_model`` and ``mmproj`` of ``settings``) are absolute. ``draft`` and
    ``mmproj`` are the facts of those two files, set by option or after ``--``; ``found`` is the projector in
    the model's folder if none is set. ``api_key`` is for a child on TCP; ``api_key_file`` holds it if
    ``needs_key_file``. ``bounds`` limit the sizes, and ``history`` holds the measurements of earlier loads.
    ``shared``: other models need the spare memory. ``slot_home``: the folder for saved slots, if any.
    ``measured``: changes that replace the plan's own choices. ``workers``: the RPC workers, whose devices are
    among those of ``capabilities``.

    Raises UsageInvalid (an invalid setting, or one that the build does not support), ModelInvalid (a file
    that cannot be served by itself) and RuntimeMissing (a build that does not support this class of model).
    """
    refuse_unservable(model, model_path)
    if bounds.bare:
        # A context that fits where the planned one did.
        smallest = min(model.context_length, _BARE_CONTEXT) or _BARE_CONTEXT
        settings = structs.replace(
            settings,
            profile="plain",
            ctx_size=settings.ctx_size or smallest,
            parallel=settings.parallel or 1,
        )
    by_user = read_extra(capabilities, settings.extra)
    better = ExtraArgs() if measured is None else read_extra(capabilities, measured.changes.words)
    extra_args = ExtraArgs((*better.options, *by_user.options))
    runtime = runtime_id(command, capabilities)
    # A rebuild of the same commit can read the slots that the earlier build saved.
    is_identified = names_commit(capabilities.version)
    slot_runtime = runtime_id(command, replace(capabilities, build="")) if is_identified else runtime
    prefers = preferences(settings.profile)
    sizes = choose_sizes(
        capabilities,
        model,
        hardware,
        settings,
        extra_args,
        kind=kind,
        runtime=runtime,
        draft=draft,
        projector=projector_loaded(capabilities, model, settings, extra_args, mmproj, found),
        bounds=bounds,
        history=history,
        shared=shared,
    )
    serves, drafter, memory, on_device = sizes.serves, sizes.drafter, sizes.memory, sizes.gpu_layers != 0
    threads = decide_threads(hardware, settings, extra_args)
    budget_mib, why_budget = decide_prompt_cache(
        capabilities, memory, serves, extra_args, prefers, shared=shared
    )
    no_repack = why_no_repack(hardware, model, memory, extra_args, prefers, budget_bytes=budget_mib * _MIB)
    no_lock = why_no_lock(hardware, model, memory, prefers, on_device=on_device, repacks=no_repack is None)

    line = CommandLine(
        command,
        capabilities,
        by_user,
        only_asked=prefers.server_defaults,
        measured=better,
        why_measured="" if measured is None else measured.why,
    )
    why = "the requested model" + ("" if model.known else f"; {UNKNOWN}")
    line.give("--model", _absolute("model", model_path), why, essential=True)
    _name(line, settings, model_path)
    key_variable = give_address(line, capabilities, address, api_key, api_key_file)
    give_workers(line, workers)
    give_purpose(line, capabilities, model, serves)
    give_context(line, settings, sizes.context)
    give_kv_cache(line, capabilities, model, settings, sizes.kv)
    give_threads(line, settings, threads)
    give_priority(line, why_no_priority(hardware, threads, draft=drafter is not None))
    give_gpu_layers(line, capabilities, model, settings, sizes.bounds, memory.gpu_layers)
    give_lock(line, capabilities, no_lock, extra_args)
    line.give("--cache-ram", budget_mib, why_budget, otherwise="this build has no prompt cache")
    give_checkpoints(line, sizes.checkpoints)
    if no_repack is not None:
        line.give("--no-repack", None, no_repack)
    draft_name = None if drafter is None else drafter.path or drafter.spec_type
    counts = None if draft_name is None else counts_for(history.drafts, runtime, draft_name)
    if drafter is not None:
        give_drafter(
            line,
            capabilities,
            drafter,
            sizes.draft_shape,
            memory_bytes=memory.draft_bytes,
            on_device=on_device,
            counts=counts,
        )
    elif sizes.bounds.drafts_off:
        line.leave_out("--spec-type", sizes.bounds.why, value="draft-mtp")
    elif settings.draft_model is not None:
        off = drafting_off(capabilities, extra_args)
        line.leave_out(capabilities.knows(*DRAFT_MODEL) or DRAFT_MODEL[0], f"{off} uses no draft model")
    give_projector(line, serves, settings, found, hardware.has_ffmpeg)
    adapts = give_adapters(line, capabilities, settings, extra_args)
    if serves is ModelClass.DECODER and model.chat_template.present:
        why = "applies the model's own chat template, tool calls included"
        line.give("--jinja", None, why, otherwise=_NO_JINJA)
    line.give("--metrics", None, "llamasup reads progress and token counts from /metrics")
    why = "llamasup reads the state of each slot from /slots"
    line.give("--slots", None, why, otherwise="this build always has it")
    keeps_slots = give_slot_folder(
        line, settings, serves, slot_home, unified=sizes.context.unified, adapts=adapts
    )
    give_size_log(line, capabilities, measured=sizes.correction.measured)
    line.append_extra()

    env = child_environment(
        environ,
        kind=kind,
        platform=hardware.platform,
        config_home=config_home,
        library_path=library_path,
    )
    why_env = {name: why for name, why in WHY_SET.items() if name in env}
    if measured is not None:
        env |= dict(measured.changes.env)
        why_env |= dict.fromkeys(dict(measured.changes.env), measured.why)
    spin = spin_settings(env, prefers)
    env |= spin
    why_env |= dict.fromkeys(spin, WHY_SPIN)
    if key_variable is not None and api_key is not None:
        env[key_variable] = api_key
        why_env[key_variable] = "other users of this machine can reach the port"
    return LaunchPlan(
        argv=line.argv,
        env=env,
        env_reasons=why_env,
        secret_names=frozenset() if key_variable is None else frozenset({key_variable}),
        reasons=line.reasons,
        memory=memory.with_prompt_cache(budget_mib * _MIB if capabilities.knows("--cache-ram") else 0),
        address=address,
        ctx_size=sizes.context.per_request,
        least_ctx_size=sizes.least_ctx_size,
        parallel=sizes.parallel,
        image_tokens=sizes.context.image_tokens,
        kv_type=sizes.kv_type,
        model_class=serves,
        api_key=None if isinstance(address, UnixAddress) else api_key,
        key=sizes.key,
        correction=sizes.correction,
        shape=sizes.shape,
        layers=model.layers,
        flash_attn=sizes.kv.flash,
        gpu_layers=sizes.gpu_layers,
        smaller_kv_type=sizes.smaller_kv_type,
        bounds=sizes.bounds,
        checked=settings.check_memory and not prefers.server_defaults,
        adjustable=sizes.adjustable,
        nice=settings.nice,
        draft=draft_name,
        draft_counts=counts,
        measured=measured,
        workers=workers.addresses,
        build=capabilities.version,
        warnings=(*warnings_of(workers), *filter(None, [sizes.context.cut, unknown_warning(model)])),
        slots=kept_slots(line, slot_home, slot_runtime, sizes.parallel)
        if keeps_slots and slot_home is not None
        else None,
    )


_NO_JINJA = "this build has only the usual chat templates built in, and reads no others"


def _name(line: CommandLine, settings: Settings, model_path: str) -> None:
    name = names_of(model_path, settings.alias).name
    why = "set with --alias" if settings.alias else "the file's name, so that answers contain no path"
    # A build without it is no error: clients ask llamasup for the model, and llamasup knows the name.
    line.give("--alias", name, why, essential=True)


def _absolute(setting: str, path: str) -> str:
    """A path with a root cannot be read as a flag. The caller resolves it, because that is an effect."""
    if not PurePath(path).root:
        raise ValueError(f"the path of {setting} must be absolute here: {path!r}")
    return path
