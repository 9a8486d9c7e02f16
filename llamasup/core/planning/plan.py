"""Turns facts and settings into one command line and environment, with a reason for each flag (pure).

``_STEPS`` lists the flags in the order of the command line. ``plan`` never looks at the number of a build,
only at the flags that its ``--help`` lists. A flag that the build lacks is left out with a reason; if the
user's own setting needs it, ``plan`` raises an error. Reasons are clauses in lower case without a full stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct, structs
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.http.address import Address, UnixAddress
from llamasup.core.llama_server.argv_builder import CommandLine, ExtraArgs, Reason, read_extra
from llamasup.core.llama_server.help_text import Capabilities, names_commit
from llamasup.core.llama_server.log_lines import give_size_log
from llamasup.core.llama_server.plan_limits import PlanLimits, Reduction
from llamasup.core.llama_server.rpc.workers import NO_WORKERS, Workers, give_workers, warnings_of
from llamasup.core.llama_server.slots.policy import KeptSlots, SlotHome, give_slot_folder, kept_slots
from llamasup.core.planning.adapters import give_adapters, loads_adapters
from llamasup.core.planning.context import give_context
from llamasup.core.planning.drafting import DRAFT_MODEL, drafting_off, give_drafter
from llamasup.core.planning.inputs import Preferences, absolute_path, preferences
from llamasup.core.planning.kv_type import give_kv_cache
from llamasup.core.planning.machine_flags import (
    WHY_SPIN,
    Threads,
    decide_prompt_cache,
    decide_threads,
    give_checkpoints,
    give_lock,
    give_priority,
    give_threads,
    spin_settings,
    why_no_lock,
    why_no_priority,
    why_no_repack,
)
from llamasup.core.planning.measured.load_history import DraftCounts, LoadHistory, counts_for, runtime_id
from llamasup.core.planning.measured.tuned import Measured
from llamasup.core.planning.memory.estimate import Correction, MemoryEstimate
from llamasup.core.planning.memory.kv_cache import ContextShape
from llamasup.core.planning.model_class_rules import UNKNOWN, give_purpose, refuse_unservable, unknown_warning
from llamasup.core.planning.projectors import Pairing, give_projector, projector_loaded
from llamasup.core.planning.sizes import PlanSizes, choose_sizes, give_gpu_layers
from llamasup.core.settings.model import Settings
from llamasup.core.settings.names import names_of
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.process.child import WHY_SET, RuntimeKind, child_environment

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
    least_ctx_size: int | None  # tokens of a slot that the profile asks for; None: a slot has no more
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
    nice: int | None = None  # None: llamasup's own
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


class PlanFacts(Struct, frozen=True, kw_only=True):
    """Everything that decides a plan. Paths (also in ``settings``) are absolute."""

    command: tuple[str, ...]
    kind: RuntimeKind
    capabilities: Capabilities  # with the devices of the RPC workers
    model: ModelFacts
    model_path: str
    hardware: Hardware
    settings: Settings
    address: Address  # where the child will listen
    environ: Mapping[str, str]
    config_home: str
    library_path: str | None = None
    draft: ModelFacts | None = None  # of the draft model, set by option or after ``--``
    mmproj: ModelFacts | None = None  # of the projector, set by option or after ``--``
    found: Pairing | None = None  # the projector in the model's folder, if none is set
    api_key: str | None = None  # for a child on TCP
    api_key_file: str | None = None  # holds the key if ``needs_key_file``
    bounds: PlanLimits = _NO_LIMITS  # limit the sizes
    history: LoadHistory = _NO_HISTORY  # the measurements of earlier loads
    shared: bool = False  # other models need the spare memory
    slot_home: SlotHome | None = None  # the folder for saved slots, if any
    measured: Measured | None = None  # changes that replace the plan's own choices
    workers: Workers = NO_WORKERS


class _Choices(Struct, frozen=True):
    """The facts, and the choices on which several flags depend."""

    facts: PlanFacts
    by_user: ExtraArgs
    measured: ExtraArgs
    extra_args: ExtraArgs  # both
    prefers: Preferences
    runtime: str
    sizes: PlanSizes
    threads: Threads
    budget_mib: int  # of the prompt cache
    why_budget: str
    no_repack: str | None  # the reason why the weights are not repacked for the CPU
    no_lock: str | None  # the reason why the weights are not locked in memory
    draft_name: str | None
    draft_counts: DraftCounts | None


def plan(facts: PlanFacts) -> LaunchPlan:
    """Choose the command line and environment for this model, machine and build, with a reason for each flag.

    Raises UsageInvalid (an invalid setting, or one that the build does not support), ModelInvalid (a file
    that cannot be served by itself) and RuntimeMissing (a build that does not support this class of model).
    """
    refuse_unservable(facts.model, facts.model_path)
    if facts.bounds.bare:
        facts = replace(facts, settings=_bare_settings(facts.settings, facts.model))
    chosen = _choose(facts)
    capabilities, settings, sizes, measured = facts.capabilities, facts.settings, chosen.sizes, facts.measured
    line = CommandLine(
        facts.command,
        capabilities,
        chosen.by_user,
        only_asked=chosen.prefers.server_defaults,
        measured=chosen.measured,
        why_measured="" if measured is None else measured.why,
    )
    for step in _STEPS:
        step(line, chosen)
    keeps_slots = give_slot_folder(
        line,
        settings,
        sizes.serves,
        facts.slot_home,
        unified=sizes.context.unified,
        adapts=loads_adapters(capabilities, settings, chosen.extra_args),
    )
    give_size_log(line, capabilities, measured=sizes.correction.measured)
    line.append_extra()
    slots = None
    if keeps_slots and facts.slot_home is not None:
        slots = kept_slots(line, facts.slot_home, _slot_runtime(chosen), sizes.parallel)

    env, why_env = _environment(chosen)
    secret = key_variable(capabilities, facts.address, facts.api_key)
    return LaunchPlan(
        argv=line.argv,
        env=env,
        env_reasons=why_env,
        secret_names=frozenset() if secret is None else frozenset({secret}),
        reasons=line.reasons,
        memory=sizes.memory.with_prompt_cache(
            chosen.budget_mib * _MIB if capabilities.knows("--cache-ram") else 0
        ),
        address=facts.address,
        ctx_size=sizes.context.per_request,
        least_ctx_size=sizes.least_ctx_size,
        parallel=sizes.parallel,
        image_tokens=sizes.context.image_tokens,
        kv_type=sizes.kv_type,
        model_class=sizes.serves,
        api_key=None if isinstance(facts.address, UnixAddress) else facts.api_key,
        key=sizes.key,
        correction=sizes.correction,
        shape=sizes.shape,
        layers=facts.model.layers,
        flash_attn=sizes.kv.flash,
        gpu_layers=sizes.gpu_layers,
        smaller_kv_type=sizes.smaller_kv_type,
        bounds=sizes.bounds,
        checked=settings.check_memory and not chosen.prefers.server_defaults,
        adjustable=sizes.adjustable,
        nice=settings.nice,
        draft=chosen.draft_name,
        draft_counts=chosen.draft_counts,
        measured=measured,
        workers=facts.workers.addresses,
        build=capabilities.version,
        warnings=(
            *warnings_of(facts.workers),
            *filter(None, [sizes.context.cut, unknown_warning(facts.model)]),
        ),
        slots=slots,
    )


def _bare_settings(settings: Settings, model: ModelFacts) -> Settings:
    smallest = min(model.context_length, _BARE_CONTEXT) or _BARE_CONTEXT  # it fits where the planned one did
    return structs.replace(
        settings,
        profile="plain",
        ctx_size=settings.ctx_size or smallest,
        parallel=settings.parallel or 1,
    )


def _choose(facts: PlanFacts) -> _Choices:
    capabilities, model, hardware, settings = facts.capabilities, facts.model, facts.hardware, facts.settings
    by_user = read_extra(capabilities, settings.extra)
    better = ExtraArgs() if facts.measured is None else read_extra(capabilities, facts.measured.changes.words)
    extra_args = ExtraArgs((*better.options, *by_user.options))
    runtime = runtime_id(facts.command, capabilities)
    prefers = preferences(settings.profile)
    sizes = choose_sizes(
        capabilities,
        model,
        hardware,
        settings,
        extra_args,
        kind=facts.kind,
        runtime=runtime,
        draft=facts.draft,
        projector=projector_loaded(capabilities, model, settings, extra_args, facts.mmproj, facts.found),
        bounds=facts.bounds,
        history=facts.history,
        shared=facts.shared,
    )
    drafter, memory, on_device = sizes.drafter, sizes.memory, sizes.gpu_layers != 0
    threads = decide_threads(hardware, settings, extra_args)
    budget_mib, why_budget = decide_prompt_cache(
        capabilities, memory, sizes.serves, extra_args, prefers, shared=facts.shared
    )
    no_repack = why_no_repack(hardware, model, memory, extra_args, prefers, budget_bytes=budget_mib * _MIB)
    no_lock = why_no_lock(hardware, model, memory, prefers, on_device=on_device, repacks=no_repack is None)
    draft_name = None if drafter is None else drafter.path or drafter.spec_type
    counts = None if draft_name is None else counts_for(facts.history.drafts, runtime, draft_name)
    return _Choices(
        *(facts, by_user, better, extra_args, prefers, runtime, sizes, threads),
        *(budget_mib, why_budget, no_repack, no_lock, draft_name, counts),
    )


def _slot_runtime(chosen: _Choices) -> str:
    """Name the build for saved slots. A rebuild of the same commit can read slots of the earlier build."""
    capabilities = chosen.facts.capabilities
    if not names_commit(capabilities.version):
        return chosen.runtime
    return runtime_id(chosen.facts.command, replace(capabilities, build=""))


def _environment(chosen: _Choices) -> tuple[dict[str, str], dict[str, str]]:
    """Choose the variables of the child, with the reasons of those that are not the user's own."""
    facts = chosen.facts
    env = child_environment(
        facts.environ,
        kind=facts.kind,
        platform=facts.hardware.platform,
        config_home=facts.config_home,
        library_path=facts.library_path,
    )
    why = {name: reason for name, reason in WHY_SET.items() if name in env}
    if facts.measured is not None:
        changed = dict(facts.measured.changes.env)
        env |= changed
        why |= dict.fromkeys(changed, facts.measured.why)
    spin = spin_settings(env, chosen.prefers)
    env |= spin
    why |= dict.fromkeys(spin, WHY_SPIN)
    variable = key_variable(facts.capabilities, facts.address, facts.api_key)
    if variable is not None and facts.api_key is not None:
        env[variable] = facts.api_key
        why[variable] = "other users of this machine can reach the port"
    return env, why


# --- the flags -----------------------------------------------------------------------------------


def _give_model(line: CommandLine, chosen: _Choices) -> None:
    model, path = chosen.facts.model, absolute_path("model", chosen.facts.model_path)
    line.give(
        "--model", path, "the requested model" + ("" if model.known else f"; {UNKNOWN}"), essential=True
    )
    alias = chosen.facts.settings.alias
    why = "set with --alias" if alias else "the file's name, so that answers contain no path"
    # A build without this flag is no error: clients ask llamasup for the model, and llamasup knows the name.
    line.give("--alias", names_of(path, alias).name, why, essential=True)


def _give_prompt_cache(line: CommandLine, chosen: _Choices) -> None:
    line.give("--cache-ram", chosen.budget_mib, chosen.why_budget, otherwise="this build has no prompt cache")


def _give_no_repack(line: CommandLine, chosen: _Choices) -> None:
    if chosen.no_repack is not None:
        line.give("--no-repack", None, chosen.no_repack)


def _give_drafts(line: CommandLine, chosen: _Choices) -> None:
    sizes, capabilities = chosen.sizes, chosen.facts.capabilities
    if sizes.drafter is not None:
        give_drafter(
            line,
            capabilities,
            sizes.drafter,
            sizes.draft_shape,
            memory_bytes=sizes.memory.draft_bytes,
            on_device=sizes.gpu_layers != 0,
            counts=chosen.draft_counts,
        )
    elif sizes.bounds.drafts_off:
        line.leave_out("--spec-type", sizes.bounds.why, value="draft-mtp")
    elif chosen.facts.settings.draft_model is not None:
        off = drafting_off(capabilities, chosen.extra_args)
        line.leave_out(capabilities.knows(*DRAFT_MODEL) or DRAFT_MODEL[0], f"{off} uses no draft model")


def _give_chat_template(line: CommandLine, chosen: _Choices) -> None:
    if chosen.sizes.serves is ModelClass.DECODER and chosen.facts.model.chat_template.present:
        why = "applies the model's own chat template, tool calls included"
        otherwise = "this build has only the usual chat templates built in, and reads no others"
        line.give("--jinja", None, why, otherwise=otherwise)


def _give_monitoring(line: CommandLine, _: _Choices) -> None:
    line.give("--metrics", None, "llamasup reads progress and token counts from /metrics")
    why = "llamasup reads the state of each slot from /slots"
    line.give("--slots", None, why, otherwise="this build always has it")


def _give_priority(line: CommandLine, chosen: _Choices) -> None:
    drafts = chosen.sizes.drafter is not None
    give_priority(line, why_no_priority(chosen.facts.hardware, chosen.threads, draft=drafts))


def _give_gpu_layers(line: CommandLine, chosen: _Choices) -> None:
    facts, sizes = chosen.facts, chosen.sizes
    give_gpu_layers(
        line, facts.capabilities, facts.model, facts.settings, sizes.bounds, sizes.memory.gpu_layers
    )


_STEPS: tuple[Callable[[CommandLine, _Choices], None], ...] = (
    _give_model,
    lambda line, chosen: give_address(
        line, chosen.facts.capabilities, chosen.facts.address, chosen.facts.api_key, chosen.facts.api_key_file
    ),
    lambda line, chosen: give_workers(line, chosen.facts.workers),
    lambda line, chosen: give_purpose(
        line, chosen.facts.capabilities, chosen.facts.model, chosen.sizes.serves
    ),
    lambda line, chosen: give_context(line, chosen.facts.settings, chosen.sizes.context),
    lambda line, chosen: give_kv_cache(
        line, chosen.facts.capabilities, chosen.facts.model, chosen.facts.settings, chosen.sizes.kv
    ),
    lambda line, chosen: give_threads(line, chosen.facts.settings, chosen.threads),
    _give_priority,
    _give_gpu_layers,
    lambda line, chosen: give_lock(line, chosen.facts.capabilities, chosen.no_lock, chosen.extra_args),
    _give_prompt_cache,
    lambda line, chosen: give_checkpoints(line, chosen.sizes.checkpoints),
    _give_no_repack,
    _give_drafts,
    lambda line, chosen: give_projector(
        line, chosen.sizes.serves, chosen.facts.settings, chosen.facts.found, chosen.facts.hardware.has_ffmpeg
    ),
    lambda line, chosen: give_adapters(
        line, chosen.facts.capabilities, chosen.facts.settings, chosen.extra_args
    ),
    _give_chat_template,
    _give_monitoring,
)
"""The flags in the order of the command line. Each step adds its flags and their reasons from the choices."""


# --- the address of the child ---------------------------------------------------------------------


def child_address_kind(capabilities: Capabilities, *, platform: str) -> Literal["unix", "tcp"]:
    """The kind of address for a child of this build: a Unix socket if possible."""
    return "unix" if capabilities.unix_sockets and platform != "win32" else "tcp"


def needs_key_file(capabilities: Capabilities) -> bool:
    """Whether this build reads an API key only from a file, not from its environment (as 2024-08 does)."""
    return _variable(capabilities) is None


def key_variable(capabilities: Capabilities, address: Address, api_key: str | None) -> str | None:
    """Return the environment variable for the key of a child on TCP, if the build reads one."""
    return None if isinstance(address, UnixAddress) or api_key is None else _variable(capabilities)


def give_address(
    line: CommandLine,
    capabilities: Capabilities,
    address: Address,
    api_key: str | None,
    api_key_file: str | None,
) -> None:
    """Add host, port and key. ``key_variable`` has the key if the build reads one from its environment."""
    if isinstance(address, UnixAddress):
        why = "a Unix socket in a private folder, which other users cannot reach"
        line.give("--host", address.path, why, essential=True)
        why = "has no effect with a Unix socket; passed because its default is changing"
        line.give("--port", 0, why, essential=True)
        return
    line.give("--host", address.host, "only this machine can connect", essential=True)
    line.give("--port", address.port, "a free port, chosen before the start", essential=True)
    if api_key is not None and needs_key_file(capabilities):
        if api_key_file is None:
            raise ValueError("this build takes its API key from a file only: see needs_key_file")
        why = "other users of this machine can reach the port"
        line.give("--api-key-file", api_key_file, why, essential=True)


def _variable(capabilities: Capabilities) -> str | None:
    option = capabilities.find("--api-key")
    return None if option is None or option.removed else option.env
