"""Turns facts and settings into one command line and environment, with a reason for each flag (pure).

``_give_flags`` adds the flags in the order of the command line. ``plan`` never looks at the number of a
build, only at the flags that its ``--help`` lists. A flag that the build lacks is left out with a reason; if
the user's own setting needs it, ``plan`` raises an error. Reasons are clauses in lower case without a full
stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
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
from llamasup.core.planning.adapters import give_adapters
from llamasup.core.planning.context import give_context
from llamasup.core.planning.drafting import DRAFT_MODEL, drafting_off, give_drafter
from llamasup.core.planning.inputs import PlanInputs, Preferences, absolute_path
from llamasup.core.planning.kv_type import give_kv_cache
from llamasup.core.planning.machine_flags import (
    WHY_SPIN,
    decide_prompt_cache,
    decide_threads,
    give_checkpoints,
    give_lock,
    give_priority,
    give_threads,
    spin_settings,
    why_no_repack,
)
from llamasup.core.planning.measured.load_history import DraftCounts, LoadHistory, counts_for, runtime_id
from llamasup.core.planning.measured.tuned import Measured
from llamasup.core.planning.memory.kv_cache import has_kv_cache
from llamasup.core.planning.projectors import Pairing, give_projector, projector_loaded
from llamasup.core.planning.sizes import PlanSizes, choose_sizes, give_gpu_layers
from llamasup.core.settings.model import Settings
from llamasup.core.settings.names import names_of
from llamasup.core.system.hardware.devices import visible_gpus
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.process.child import WHY_SET, RuntimeKind, child_environment
from llamasup.errors import ModelInvalid, RuntimeMissing

_MIB = 1 << 20
_BARE_CONTEXT = 8192
_NO_LIMITS = PlanLimits()
_NO_HISTORY = LoadHistory()


class LaunchPlan(PlanSizes, frozen=True, kw_only=True):
    """The sizes of a plan with its command line and environment. ``memory`` includes the prompt cache."""

    argv: tuple[str, ...]  # the whole command line, the executable first
    env: Mapping[str, str]  # the child's whole environment
    env_reasons: Mapping[str, str]  # for the variables in env that are not the user's own
    secret_names: frozenset[str]  # names in env whose values are never shown
    reasons: tuple[Reason, ...]  # for every flag in argv, and for every flag that was left out
    address: Address  # where the child will listen
    api_key: str | None  # the child's own, for the proxy; None over a Unix socket
    checked: bool  # against the free memory; then the build's own warning about memory also counts
    slots: KeptSlots | None  # None: the contents of the slots are lost when the server ends
    nice: int | None = None  # None: llamasup's own
    reduced: tuple[Reduction, ...] = ()  # what is smaller than in the plan without limits
    draft_counts: DraftCounts | None = None  # of earlier processes with this draft
    ignores_sigpipe: bool = False
    workers: tuple[str, ...] = ()  # the RPC workers that it uses, as in the settings
    build: str = ""  # of llama-server
    warnings: tuple[tuple[str, str], ...] = ()  # message and remedy, for the user at the start
    measured: Measured | None = None  # the changes by ``llamasup tune`` that the plan contains

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
        """Whether the model drafts with its own layers, although the user did not request it."""
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


def plan(facts: PlanFacts) -> LaunchPlan:
    """Choose the command line and environment for this model, machine and build, with a reason for each flag.

    Raises UsageInvalid (an invalid setting, or one that the build does not support), ModelInvalid (a file
    that cannot be served by itself) and RuntimeMissing (a build that does not support this class of model).
    """
    refuse_unservable(facts.model, facts.model_path)
    if facts.bounds.bare:
        facts = replace(facts, settings=_bare_settings(facts.settings, facts.model))
    capabilities, settings, measured = facts.capabilities, facts.settings, facts.measured
    by_user = read_extra(capabilities, settings.extra)
    better = ExtraArgs() if measured is None else read_extra(capabilities, measured.changes.words)
    model, extra_args = facts.model, ExtraArgs((*better.options, *by_user.options))
    inputs = PlanInputs(
        *(capabilities, model, facts.hardware, settings, extra_args, facts.bounds),
        kind=facts.kind,
        runtime=runtime_id(facts.command, capabilities),
        draft=facts.draft,
        projector=projector_loaded(capabilities, model, settings, extra_args, facts.mmproj, facts.found),
        history=facts.history,
        shared=facts.shared,
    )
    sizes = choose_sizes(inputs)
    counts = None if sizes.draft is None else counts_for(facts.history.drafts, inputs.runtime, sizes.draft)
    cache_mib, why_cache = decide_prompt_cache(inputs, sizes.memory)
    line = CommandLine(
        facts.command,
        capabilities,
        by_user,
        only_asked=inputs.prefers.server_defaults,
        measured=better,
        why_measured="" if measured is None else measured.why,
    )
    keeps_slots = _give_flags(line, facts, inputs, sizes, (cache_mib, why_cache), counts)
    slots = None
    if keeps_slots and facts.slot_home is not None:
        slots = kept_slots(line, facts.slot_home, _slot_runtime(facts, inputs.runtime), sizes.parallel)

    env, why_env = _environment(facts, inputs.prefers)
    secret = key_variable(capabilities, facts.address, facts.api_key)
    cache_bytes = cache_mib * _MIB if capabilities.knows("--cache-ram") else 0
    chosen = structs.asdict(sizes) | {"memory": sizes.memory.with_prompt_cache(cache_bytes)}
    return LaunchPlan(
        **chosen,
        argv=line.argv,
        env=env,
        env_reasons=why_env,
        secret_names=frozenset() if secret is None else frozenset({secret}),
        reasons=line.reasons,
        address=facts.address,
        api_key=None if isinstance(facts.address, UnixAddress) else facts.api_key,
        checked=settings.check_memory and not inputs.prefers.server_defaults,
        nice=settings.nice,
        draft_counts=counts,
        measured=measured,
        workers=facts.workers.addresses,
        build=capabilities.version,
        warnings=(
            *warnings_of(facts.workers),
            *filter(None, [sizes.context.cut, unknown_warning(facts.model), unused_gpu_warning(facts)]),
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


def _slot_runtime(facts: PlanFacts, runtime: str) -> str:
    """Name the build for saved slots. A rebuild of the same commit can read slots of the earlier build."""
    if not names_commit(facts.capabilities.version):
        return runtime
    return runtime_id(facts.command, replace(facts.capabilities, build=""))


def _environment(facts: PlanFacts, prefers: Preferences) -> tuple[dict[str, str], dict[str, str]]:
    """Choose the variables of the child, with the reasons of those that are not the user's own."""
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
    spin = spin_settings(env, prefers)
    env |= spin
    why |= dict.fromkeys(spin, WHY_SPIN)
    variable = key_variable(facts.capabilities, facts.address, facts.api_key)
    if variable is not None and facts.api_key is not None:
        env[variable] = facts.api_key
        why[variable] = "other users of this machine can reach the port"
    return env, why


# --- the flags -----------------------------------------------------------------------------------


def _give_flags(
    line: CommandLine,
    facts: PlanFacts,
    inputs: PlanInputs,
    sizes: PlanSizes,
    prompt_cache: tuple[int, str],
    draft_counts: DraftCounts | None,
) -> bool:
    """Add all flags and their reasons, in the order of the command line. Returns whether slots are saved."""
    settings, serves, hardware = inputs.settings, inputs.serves, inputs.hardware
    threads = decide_threads(inputs)
    on_device = sizes.gpu_layers != 0
    cache_mib, why_cache = prompt_cache
    no_repack = why_no_repack(inputs, sizes.memory, budget_bytes=cache_mib * _MIB)

    _give_model(line, facts)
    give_address(line, facts.capabilities, facts.address, facts.api_key, facts.api_key_file)
    give_workers(line, facts.workers)
    give_purpose(line, inputs)
    give_context(line, settings, sizes.context)
    give_kv_cache(line, inputs, sizes.kv)
    give_threads(line, settings, threads)
    give_priority(line, hardware, threads, draft=sizes.drafter is not None)
    give_gpu_layers(line, inputs, sizes.memory.gpu_layers)
    give_lock(line, inputs, sizes.memory, on_device=on_device, repacks=no_repack is None)
    line.give("--cache-ram", cache_mib, why_cache, otherwise="this build has no prompt cache")
    give_checkpoints(line, sizes.checkpoints)
    if no_repack is not None:
        line.give("--no-repack", None, no_repack)
    _give_drafts(line, inputs, sizes, draft_counts)
    give_projector(line, inputs, facts.found)
    adapts = give_adapters(line, inputs)
    if serves is ModelClass.DECODER and inputs.model.chat_template.present:
        why = "applies the model's own chat template, tool calls included"
        otherwise = "this build has only the usual chat templates built in, and reads no others"
        line.give("--jinja", None, why, otherwise=otherwise)
    line.give("--metrics", None, "llamasup reads progress and token counts from /metrics")
    why = "llamasup reads the state of each slot from /slots"
    line.give("--slots", None, why, otherwise="this build always has it")
    unified = sizes.context.unified
    keeps = give_slot_folder(line, settings, serves, facts.slot_home, unified=unified, adapts=adapts)
    give_size_log(line, inputs.capabilities, measured=sizes.correction.measured)
    line.append_extra()
    return keeps


def _give_model(line: CommandLine, facts: PlanFacts) -> None:
    path = absolute_path("model", facts.model_path)
    why = "the requested model" + ("" if facts.model.known else f"; {UNKNOWN}")
    line.give("--model", path, why, essential=True)
    alias = facts.settings.alias
    why = "set with --alias" if alias else "the file's name, so that answers contain no path"
    # A build without this flag is no error: clients ask llamasup for the model, and llamasup knows the name.
    line.give("--alias", names_of(path, alias).name, why, essential=True)


def _give_drafts(line: CommandLine, inputs: PlanInputs, sizes: PlanSizes, counts: DraftCounts | None) -> None:
    capabilities = inputs.capabilities
    if sizes.drafter is not None:
        give_drafter(
            line,
            capabilities,
            sizes.drafter,
            sizes.draft_shape,
            memory_bytes=sizes.memory.draft_bytes,
            on_device=sizes.gpu_layers != 0,
            counts=counts,
        )
    elif sizes.bounds.drafts_off:
        line.leave_out("--spec-type", sizes.bounds.why, value="draft-mtp")
    elif inputs.settings.draft_model is not None:
        off = drafting_off(capabilities, inputs.extra_args)
        line.leave_out(capabilities.knows(*DRAFT_MODEL) or DRAFT_MODEL[0], f"{off} uses no draft model")


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


# --- the class of the model -----------------------------------------------------------------------


UNKNOWN = "llamasup does not know its architecture, so it plans for full attention in each layer"

_REMEDIES = {
    ModelClass.PROJECTOR: "pass it as --mmproj together with the model that it belongs to",
    ModelClass.LORA: "pass it after -- as --lora FILE together with the model that it was trained for",
    ModelClass.DRAFT: "it drafts for another model: serve that model with this file as --draft-model",
    ModelClass.VOCAB: "get the file with the weights; this file has only the tokenizer",
    ModelClass.OTHER: "give the .gguf file of a language model",
}
_KINDS = {
    ModelClass.PROJECTOR: "a multimodal projector",
    ModelClass.LORA: "a LoRA adapter",
    ModelClass.DRAFT: "a draft head",
    ModelClass.VOCAB: "a vocabulary without weights",
}


def refuse_unservable(model: ModelFacts, path: str) -> None:
    """Raise ModelInvalid for a file that cannot be served by itself."""
    if model.model_class in _REMEDIES:
        kind = _KINDS.get(model.model_class, model.contents)
        raise ModelInvalid(
            f"{PurePath(path).name} is {kind}, not a model that can be served",
            remedy=_REMEDIES[model.model_class],
        )


def unknown_warning(model: ModelFacts) -> tuple[str, str] | None:
    """Return the warning and its remedy for a model of an unknown architecture."""
    if model.known:
        return None
    return (
        f"llamasup does not know the architecture {model.architecture!r}: llama-server decides whether it "
        "can load the model, and the memory is an estimate for full attention in each layer.",
        "For a longer context, use --ctx-size. A newer llamasup may know the architecture.",
    )


def unused_gpu_warning(facts: PlanFacts) -> tuple[str, str] | None:
    """Return the warning and its remedy for a GPU that this build of llama-server cannot use."""
    unused = visible_gpus(facts.hardware.gpu_drivers, facts.environ)
    if facts.capabilities.devices or not unused or facts.settings.gpu_layers == 0:
        return None
    return (
        f"This llama-server cannot use the {unused[0]} GPU of this machine: the CPU computes.",
        "Install a build for it: llamasup runtime install",
    )


def give_purpose(line: CommandLine, inputs: PlanInputs) -> None:
    """Enable embedding or reranking; without the flag their endpoints answer 501.

    Raises RuntimeMissing if the build cannot rerank.
    """
    if inputs.serves is ModelClass.ENCODER:
        line.give("--embedding", None, "this model computes embeddings", essential=True)
        if inputs.model.pooling in (None, "none"):
            # /v1/embeddings refuses pooling "none", llama-server's default for a file without a pooling type.
            pooling = "last" if has_kv_cache(inputs.model) else "mean"
            why = f"the file has no pooling type; {pooling} is usual for such a model"
            line.give("--pooling", pooling, why, essential=True)
    elif inputs.serves is ModelClass.RERANKER:
        _give_reranking(line, inputs.capabilities)


def _give_reranking(line: CommandLine, capabilities: Capabilities) -> None:
    why = "this model scores documents against a query"
    pooling = capabilities.find("--pooling")
    if capabilities.knows("--rerank"):
        # Without --embedding, because builds from October 2024 to mid-2025 rerank only then.
        line.give("--rerank", None, why, essential=True)
    elif pooling is not None and "rank" in pooling.allowed:
        line.give("--embedding", None, why, essential=True)
        line.give("--pooling", "rank", "one score for each pair of query and document", essential=True)
    else:
        raise RuntimeMissing(
            f"the model is a reranker, and this llama-server ({capabilities.version}) cannot rerank",
            remedy="use a build with --rerank (October 2024 or later), selected with --runtime",
        )
