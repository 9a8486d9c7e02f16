"""From facts to one command line: what to start, with which environment, and why.

``plan`` is pure. It never looks at a build's number: only at what that build's own ``--help`` lists. What a
build cannot do is left out and said; what the user asked for and the build cannot do is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from llamasup.core.address import Address, UnixAddress
from llamasup.core.bounds import Bounds
from llamasup.core.capabilities import Capabilities
from llamasup.core.child_env import RuntimeKind, child_environment
from llamasup.core.context_choice import Context, decide_context
from llamasup.core.context_memory import ContextShape, has_kv_cache
from llamasup.core.drafting import (
    decide_drafter,
    draft_gpu_layers,
    draft_shape,
    give_drafter,
    shape_with_drafts,
)
from llamasup.core.errors import ModelInvalid, RuntimeMissing
from llamasup.core.experience import Experience, correction_of
from llamasup.core.flags import ByHand, CommandLine, Reason, read_extra
from llamasup.core.hardware import Hardware
from llamasup.core.kv_choice import KvCache, decide_kv_cache
from llamasup.core.memory import Correction, Load, MemoryEstimate, estimate
from llamasup.core.model_facts import ModelClass, ModelFacts
from llamasup.core.naming import names_of
from llamasup.core.placement import RUNTIME_BYTES, decide_gpu_layers, give_gpu_layers, room_for
from llamasup.core.profiles import preferences
from llamasup.core.projectors import Pairing, give_projector, refuse_wrong_projector
from llamasup.core.settings import Settings
from llamasup.core.tuning import (
    decide_prompt_cache,
    decide_threads,
    spin_settings,
    why_no_lock,
    why_no_priority,
)

__all__ = ["LaunchPlan", "Reason", "child_address_kind", "needs_key_file", "plan", "runtime_id"]


_MIB = 1 << 20
_NO_BOUNDS = Bounds()
_NO_EXPERIENCE = Experience()


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    argv: tuple[str, ...]  # the whole command line, the executable first
    env: Mapping[str, str]  # the child's whole environment
    secret_names: frozenset[str]  # names in env whose values are never shown
    reasons: tuple[Reason, ...]  # for every flag in argv, and for what was left out
    memory: MemoryEstimate
    address: Address  # where the child will listen
    ctx_size: int  # tokens that one request may use
    parallel: int
    kv_type: str  # "q8_0"; "q8_0/f16" where K and V differ
    model_class: ModelClass  # what it is served as: --embedding after "--" makes a decoder an encoder
    api_key: str | None  # the child's own, for the proxy; None over a Unix socket
    key: str  # what decides the sizes in memory; plans with the same key take the same
    correction: Correction
    shape: ContextShape
    layers: int  # that the model has
    flash_attn: str | None
    gpu_layers: int | None  # 0: none; None: as many as the build fits to its devices
    smaller_kv_type: str | None  # one that takes less memory and may be used
    bounds: Bounds
    checked: bool  # against the memory that is free; the build's own warning about it counts then
    adjustable: frozenset[str]  # the options of llamasup whose values were not set by hand

    @property
    def ctx_size_of_slot(self) -> int:
        """What ``--ctx-size`` of llamasup means: tokens for each request when all slots are busy."""
        return self.shape.ctx_total // self.parallel

    @property
    def env_shown(self) -> dict[str, str]:
        """The environment as it may be printed."""
        return {name: "***" if name in self.secret_names else value for name, value in self.env.items()}


def child_address_kind(capabilities: Capabilities, *, platform: str) -> Literal["unix", "tcp"]:
    """Where a child of this build should listen: on a Unix socket wherever it can (X5)."""
    return "unix" if capabilities.unix_sockets and platform != "win32" else "tcp"


def needs_key_file(capabilities: Capabilities) -> bool:
    """Whether this build takes an API key from a file only, not from its environment (2024-08 does)."""
    option = capabilities.find("--api-key")
    return option is None or option.removed or option.env is None


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
    bounds: Bounds = _NO_BOUNDS,
    experience: Experience = _NO_EXPERIENCE,
) -> LaunchPlan:
    """The command line and environment that suit this model, machine and build, with a reason for each flag.

    Paths (``model_path``, and ``draft_model`` and ``mmproj`` of ``settings``) are absolute. ``draft`` and
    ``mmproj`` are the facts of those two files, given so or after ``--``; ``found`` is the projector beside
    the model where none was given. ``api_key`` is for a child on TCP; ``api_key_file`` holds it where
    ``needs_key_file``. ``bounds`` keep the plan small, and ``experience`` is
    what earlier loads of this model took.

    Raises UsageInvalid (a setting that cannot be meant, or that the build lacks), ModelInvalid (a file that
    is not to be served by itself) and RuntimeMissing (a build that cannot do what the model is for).
    """
    _refuse_what_is_no_model(model, model_path)
    by_hand = read_extra(capabilities, settings.extra)
    prefers = preferences(settings.profile)
    serves = _served_as(model, by_hand)
    if mmproj is not None:
        refuse_wrong_projector(model, mmproj, by_hand.value("--mmproj") or settings.mmproj or "")
    elif found is not None and found.projector is not None:
        mmproj = found.projector.facts
    drafter = decide_drafter(capabilities, model, serves, settings, by_hand, draft)
    context = decide_context(
        model, serves, settings, by_hand, prefers, bounds, can_share=bool(capabilities.knows("--kv-unified"))
    )
    threads = decide_threads(hardware, settings, by_hand)
    layers = decide_gpu_layers(capabilities, model, settings, by_hand, bounds)
    on_device = layers != 0
    kv = decide_kv_cache(capabilities, model, serves, settings, by_hand, prefers, bounds, on_device=on_device)
    shape = _shape(context, kv)
    drafts = None if drafter is None else drafter.facts
    pair = None if drafts is None else (drafts, draft_shape(drafts, shape))
    shape = shape if drafter is None else shape_with_drafts(shape, drafter, by_hand)
    key = _key(shape, layers, pair, mmproj)
    correction = correction_of(experience, runtime_id(command, capabilities), key)
    memory = estimate(
        Load(model, shape, layers),
        room_for(capabilities, hardware, by_hand, on_device=on_device),
        runtime_bytes=RUNTIME_BYTES[kind],
        draft=None if pair is None else Load(*pair, draft_gpu_layers(pair[0], by_hand, layers)),
        projector_bytes=0 if mmproj is None else mmproj.weights_bytes,
        projector_on_device=not by_hand.has("--no-mmproj-offload") or by_hand.switch("--mmproj-offload"),
        correction=correction,
    )
    budget_mib, why_budget = decide_prompt_cache(memory, serves, by_hand, prefers)

    line = CommandLine(command, capabilities, by_hand, only_asked=settings.profile == "plain")
    line.give("--model", _absolute("model", model_path), "the model asked for", essential=True)
    _name(line, settings, model_path)
    env_key = _address(line, capabilities, address, api_key, api_key_file)
    _purpose(line, capabilities, model, serves)
    line.give("--ctx-size", context.total, context.why_total, asked=_asked("--ctx-size", settings.ctx_size))
    line.give(
        "--parallel", context.parallel, context.why_parallel, asked=_asked("--parallel", settings.parallel)
    )
    line.give("--cont-batching", None, "requests join and leave a running batch", otherwise=_NOT_NEEDED)
    if context.unified and prefers.shared_cells:
        line.give("--kv-unified", None, "slots share the context: a long request may take what others leave")
    line.give("--batch-size", context.batch, context.why_batch)
    line.give("--ubatch-size", context.ubatch, context.why_batch)
    _attention(line, capabilities, model, settings, kv)
    line.give("--threads", threads.generation, threads.why, asked=_asked("--threads", settings.threads))
    line.give("--threads-batch", threads.batch, "as many as for generation: both wait on the same cores")
    _priority(line, why_no_priority(hardware, threads, draft=drafter is not None))
    give_gpu_layers(line, capabilities, settings, bounds)
    _lock(line, capabilities, why_no_lock(hardware, model, memory, prefers, on_device=on_device))
    line.give("--cache-ram", budget_mib, why_budget, otherwise="this build keeps no prompts in host memory")
    if not prefers.checkpoints:
        line.give("--ctx-checkpoints", 0, "states of earlier points in a prompt take memory")
    if not prefers.repack:
        line.give("--no-repack", None, "weights that are rewritten for the CPU are a second copy of them")
    if drafter is not None:
        give_drafter(
            line,
            capabilities,
            drafter,
            shape if pair is None else pair[1],
            memory_bytes=sum(
                part.total_bytes for part in memory.parts if part.name.startswith("draft model: ")
            ),
            on_device=on_device,
        )
    give_projector(line, settings, found)
    if serves is ModelClass.DECODER and model.chat_template.present:
        line.give("--jinja", None, "the model's own chat template, tools included", otherwise=_NO_JINJA)
    line.give("--metrics", None, "progress and token counts are read there")
    line.give("--slots", None, "what each slot is doing is read there", otherwise="this build has it on")
    _sizes(line, capabilities, measured=correction.measured)
    line.append_by_hand()

    env = child_environment(
        environ,
        kind=kind,
        platform=hardware.platform,
        config_home=config_home,
        library_path=library_path,
    )
    env |= spin_settings(env, prefers)
    if env_key is not None and api_key is not None:
        env[env_key] = api_key
    return LaunchPlan(
        argv=line.argv,
        env=env,
        secret_names=frozenset() if env_key is None else frozenset({env_key}),
        reasons=line.reasons,
        memory=memory.with_prompt_cache(budget_mib * _MIB if capabilities.knows("--cache-ram") else 0),
        address=address,
        ctx_size=context.per_request,
        parallel=context.parallel,
        kv_type=kv.name,
        model_class=serves,
        api_key=None if isinstance(address, UnixAddress) else api_key,
        key=key,
        correction=correction,
        shape=shape,
        layers=model.layers,
        flash_attn=kv.flash,
        gpu_layers=layers,
        smaller_kv_type=kv.smaller,
        bounds=bounds,
        checked=settings.check_memory and not prefers.own_choice,
        adjustable=_adjustable(settings, by_hand),
    )


# --- the model and what it is for ----------------------------------------------------------------

_NOT_NEEDED = "this build does so by itself"
_NO_JINJA = "this build knows the usual chat templates by name, and reads no others"

_NO_MODEL = {
    ModelClass.PROJECTOR: "give it as --mmproj beside the model that it belongs to",
    ModelClass.LORA: "give it after -- as --lora FILE beside the model that it was trained for",
    ModelClass.DRAFT: "it drafts for another model: serve that one, with this as --draft-model",
    ModelClass.VOCAB: "get the file with the weights: this one has only the tokenizer",
}
_WHAT_IT_IS = {
    ModelClass.PROJECTOR: "a multimodal projector",
    ModelClass.LORA: "a LoRA adapter",
    ModelClass.DRAFT: "a draft head",
    ModelClass.VOCAB: "a vocabulary without weights",
}


def _refuse_what_is_no_model(model: ModelFacts, path: str) -> None:
    if model.model_class in _NO_MODEL:
        raise ModelInvalid(
            f"{PurePath(path).name} is {_WHAT_IT_IS[model.model_class]}, not a model that can be served",
            remedy=_NO_MODEL[model.model_class],
        )


def _served_as(model: ModelFacts, by_hand: ByHand) -> ModelClass:
    if by_hand.switch("--rerank"):
        return ModelClass.RERANKER
    if by_hand.switch("--embedding"):
        return ModelClass.RERANKER if by_hand.value("--pooling") == "rank" else ModelClass.ENCODER
    return model.model_class


def _purpose(line: CommandLine, capabilities: Capabilities, model: ModelFacts, serves: ModelClass) -> None:
    """Embedding and reranking have to be switched on; their endpoints answer 501 otherwise."""
    if serves is ModelClass.ENCODER:
        line.give("--embedding", None, "this model gives embeddings", essential=True)
        if model.pooling in (None, "none"):
            # /v1/embeddings refuses pooling "none", which is llama-server's choice where the file has none.
            pooling = "mean" if not has_kv_cache(model) else "last"
            line.give(
                "--pooling",
                pooling,
                f"the file names no pooling; {pooling} is usual for its kind",
                essential=True,
            )
    elif serves is ModelClass.RERANKER:
        pooling_option = capabilities.find("--pooling")
        if capabilities.knows("--rerank"):
            # Alone: builds from October 2024 to mid-2025 rerank only "without --embedding".
            line.give("--rerank", None, "this model scores documents against a query", essential=True)
        elif pooling_option is not None and "rank" in pooling_option.allowed:
            line.give("--embedding", None, "this model scores documents against a query", essential=True)
            line.give("--pooling", "rank", "a score for each pair", essential=True)
        else:
            raise RuntimeMissing(
                f"this llama-server ({capabilities.version}) cannot rerank, and the model is a reranker",
                remedy="use a build that has --rerank (October 2024 or later) with --runtime",
            )


def _name(line: CommandLine, settings: Settings, model_path: str) -> None:
    name = names_of(model_path, settings.alias).name
    why = "asked for with --alias" if settings.alias else "the file's name, so that answers carry no path"
    # Not an error where the build lacks it: it is llamasup that knows the model by this name.
    line.give("--alias", name, why, essential=True)


# --- where it listens ----------------------------------------------------------------------------


def _address(
    line: CommandLine,
    capabilities: Capabilities,
    address: Address,
    api_key: str | None,
    api_key_file: str | None,
) -> str | None:
    """Host, port and key. The name of the environment variable that has to carry the key, if one does."""
    if isinstance(address, UnixAddress):
        line.give(
            "--host",
            address.path,
            "a Unix socket in a private folder: no port for others to find",
            essential=True,
        )
        line.give(
            "--port", 0, "has no meaning for a socket; given because the default is changing", essential=True
        )
        return None
    line.give("--host", address.host, "loopback only", essential=True)
    line.give("--port", address.port, "a free port, known before the start", essential=True)
    if api_key is None:
        return None
    if not needs_key_file(capabilities):
        option = capabilities.find("--api-key")
        return option.env if option is not None else None
    if api_key_file is None:
        raise ValueError("this build takes its API key from a file only: see needs_key_file")
    line.give(
        "--api-key-file", api_key_file, "other users of this machine could reach the port", essential=True
    )
    return None


def _absolute(setting: str, path: str) -> str:
    """An absolute path cannot be read as a flag. Resolving is an effect, and the caller's."""
    if not PurePath(path).is_absolute():
        raise ValueError(f"the path of {setting} must be absolute here: {path!r}")
    return path


# --- attention, memory, priority -----------------------------------------------------------------


def _attention(
    line: CommandLine, capabilities: Capabilities, model: ModelFacts, settings: Settings, kv: KvCache
) -> None:
    option = capabilities.find("--flash-attn")
    asked = _asked("--flash-attn", settings.flash_attn if settings.flash_attn == "on" else None)
    if option is not None and option.argument is None and kv.flash == "off":
        line.leave_out("--flash-attn", kv.why_flash)
    else:
        bare = option is None or option.argument is None
        line.give("--flash-attn", None if bare else kv.flash, kv.why_flash, asked=asked)
    sides = (("--cache-type-k", kv.k_type, kv.why_k), ("--cache-type-v", kv.v_type, kv.why_v))
    for flag, cache_type, why in sides:
        if cache_type == "f16" and (settings.kv_type != "f16" or not has_kv_cache(model)):
            line.leave_out(flag, f"f16 as by default: {why}")
        else:
            line.give(flag, cache_type, why, asked=_asked("--kv-type", settings.kv_type))


def _priority(line: CommandLine, why_not: str | None) -> None:
    if why_not is not None:
        line.leave_out("--prio", why_not, value="2")
    else:
        line.give("--prio", 2, "compute threads go before everything else; a CPU stays free for the rest")


def _lock(line: CommandLine, capabilities: Capabilities, why_not: str | None) -> None:
    """``--mlock`` until September 2026 (#28334), ``--load-mode mmap+mlock`` since July 2026 (#20834)."""
    mode = capabilities.find("--load-mode")
    flag, value = "--mlock", None
    if not capabilities.knows("--mlock") and mode is not None and "mmap+mlock" in mode.allowed:
        flag, value = "--load-mode", "mmap+mlock"
    if why_not is not None:
        line.leave_out(flag, why_not, value=value)
    else:
        line.give(flag, value, "the weights stay in memory, whatever else runs")


# --- what later plans of this model learn from ---------------------------------------------------


def runtime_id(command: Sequence[str], capabilities: Capabilities) -> str:
    """Which build a lesson was learnt with."""
    return f"{' '.join(command)} {capabilities.version}"


def _shape(context: Context, kv: KvCache) -> ContextShape:
    return ContextShape(
        ctx_total=context.total,
        parallel=context.parallel,
        ubatch=context.ubatch,
        k_type=kv.k_type,
        v_type=kv.v_type,
        flash_attn=kv.flash in ("on", "auto"),
        unified=context.unified,
    )


def _key(
    shape: ContextShape,
    layers: int | None,
    draft: tuple[ModelFacts, ContextShape] | None,
    mmproj: ModelFacts | None,
) -> str:
    beside = (draft and (draft[0].file_bytes, draft[1]), mmproj and mmproj.file_bytes)
    return f"{shape} {layers} {beside}"


def _adjustable(settings: Settings, by_hand: ByHand) -> frozenset[str]:
    """The options that a smaller plan may change: those not set by hand, here or after ``--``."""
    passed: Mapping[str, tuple[object, tuple[str, ...]]] = {
        "--parallel": (settings.parallel, ("--parallel",)),
        "--ctx-size": (settings.ctx_size, ("--ctx-size",)),
        "--kv-type": (settings.kv_type, ("--cache-type-k", "--cache-type-v")),
        "--flash-attn": (settings.flash_attn, ("--flash-attn",)),
        "--gpu-layers": (None if settings.gpu_layers == "auto" else settings.gpu_layers, ("--gpu-layers",)),
    }
    if settings.profile == "plain":
        return frozenset()
    return frozenset(
        option
        for option, (setting, flags) in passed.items()
        if setting is None and not any(by_hand.has(flag) for flag in flags)
    )


def _sizes(line: CommandLine, capabilities: Capabilities, *, measured: bool) -> None:
    """Sizes are logged one level up since 2026, thirty more lines for each request: only where needed."""
    option = capabilities.find("--verbosity")
    if option is None or "4: trace" not in option.description:
        return
    if measured:
        line.leave_out("--verbosity", "what this plan takes has been measured", value="4")
    else:
        line.give(
            "--verbosity", 4, "the first load of this plan logs its sizes, for later plans to start from"
        )


def _asked(option: str, setting: object) -> str | None:
    return option if setting is not None else None
