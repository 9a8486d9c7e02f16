"""From facts to one command line: what to start, with which environment, and why.

``plan`` is pure. It never looks at a build's number: only at what that build's own ``--help`` lists. What a
build cannot do is left out and said; what the user asked for and the build cannot do is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from llamasup.core.address import Address, UnixAddress
from llamasup.core.capabilities import Capabilities
from llamasup.core.child_env import RuntimeKind, child_environment
from llamasup.core.context_memory import ContextShape, has_kv_cache
from llamasup.core.drafting import draft_shape, give_draft
from llamasup.core.errors import ModelInvalid, RuntimeMissing, UsageInvalid
from llamasup.core.flags import ByHand, CommandLine, Reason, read_extra
from llamasup.core.hardware import Hardware
from llamasup.core.memory import MemoryEstimate, estimate
from llamasup.core.model_facts import ModelClass, ModelFacts
from llamasup.core.naming import names_of
from llamasup.core.settings import Settings
from llamasup.core.tuning import (
    KvCache,
    cache_ram_mib,
    decide_context,
    decide_kv_cache,
    decide_threads,
    why_no_lock,
    why_no_priority,
)

__all__ = ["LaunchPlan", "Reason", "child_address_kind", "needs_key_file", "plan", "plan_as_json"]


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
    api_key: str | None = None,
    api_key_file: str | None = None,
) -> LaunchPlan:
    """The command line and environment that suit this model, machine and build, with a reason for each flag.

    Paths (``model_path``, and ``draft_model`` and ``mmproj`` of ``settings``) are absolute. ``draft`` and
    ``mmproj`` are the facts of those two files. ``api_key`` is for a child on TCP;
    ``api_key_file`` holds it where ``needs_key_file``.

    Raises UsageInvalid (a setting that cannot be meant, or that the build lacks), ModelInvalid (a file that
    is not to be served by itself) and RuntimeMissing (a build that cannot do what the model is for).
    """
    _refuse_what_is_no_model(model, model_path)
    if mmproj is not None:
        _refuse_what_is_no_projector(mmproj, settings.mmproj or "")
    by_hand = read_extra(capabilities, settings.extra)
    serves = _served_as(model, by_hand)
    context = decide_context(model, serves, settings, by_hand)
    kv = decide_kv_cache(capabilities, model, serves, settings, by_hand)
    threads = decide_threads(hardware, settings, by_hand)
    on_device = _uses_device(capabilities, settings, by_hand)
    shape = ContextShape(
        ctx_total=context.total,
        parallel=context.parallel,
        ubatch=context.ubatch,
        k_type=kv.k_type,
        v_type=kv.v_type,
        flash_attn=kv.flash in ("on", "auto"),
        unified=context.unified,
    )
    pair = None if draft is None else (draft, draft_shape(draft, shape))
    # On a Mac the devices' memory is the host's.
    devices = capabilities.devices if on_device and hardware.platform != "darwin" else ()
    memory = estimate(
        model,
        shape,
        available_bytes=hardware.memory_available_bytes + sum(each.free_bytes for each in devices),
        physical_bytes=hardware.memory_total_bytes + sum(each.total_bytes for each in devices),
        draft=pair,
        beside_bytes=0 if mmproj is None else mmproj.weights_bytes,
    )

    line = CommandLine(command, capabilities, by_hand)
    line.give("--model", _absolute("model", model_path), "the model asked for")
    _name(line, settings, model_path)
    env_key = _address(line, capabilities, address, api_key, api_key_file)
    _purpose(line, capabilities, model, serves)
    line.give("--ctx-size", context.total, context.why_total)
    line.give("--parallel", context.parallel, context.why_parallel)
    line.give("--cont-batching", None, "requests join and leave a running batch", otherwise=_NOT_NEEDED)
    line.give("--batch-size", context.batch, context.why_batch)
    line.give("--ubatch-size", context.ubatch, context.why_batch)
    _attention(line, capabilities, model, settings, kv)
    line.give("--threads", threads.generation, threads.why, asked=_asked("--threads", settings.threads))
    line.give("--threads-batch", threads.batch, "as many as for generation: both wait on the same cores")
    drafts = pair is not None or by_hand.has("--model-draft")
    _priority(line, why_no_priority(hardware, threads, draft=drafts))
    _device_layers(line, capabilities, settings)
    _lock(line, capabilities, why_no_lock(hardware, memory, on_device=on_device))
    budget_mib, why_budget = cache_ram_mib(memory, serves, hardware)
    line.give("--cache-ram", budget_mib, why_budget, otherwise="this build keeps no prompts in host memory")
    if pair is not None:
        if settings.draft_model is None:
            raise ValueError("draft holds the facts of settings.draft_model, which is not set")
        draft_path = _absolute("draft_model", settings.draft_model)
        give_draft(line, capabilities, pair[0], draft_path, pair[1], on_device=on_device)
    if settings.mmproj is not None:
        line.give(
            "--mmproj", _absolute("mmproj", settings.mmproj), "the projector asked for", asked="--mmproj"
        )
    if serves is ModelClass.DECODER and model.chat_template.present:
        line.give("--jinja", None, "the model's own chat template, tools included", otherwise=_NO_JINJA)
    line.give("--metrics", None, "progress and token counts are read there")
    line.give("--slots", None, "what each slot is doing is read there", otherwise="this build has it on")
    line.append_by_hand()

    env = child_environment(
        environ,
        kind=kind,
        platform=hardware.platform,
        config_home=config_home,
        library_path=library_path,
    )
    if env_key is not None and api_key is not None:
        env[env_key] = api_key
    return LaunchPlan(
        argv=line.argv,
        env=env,
        secret_names=frozenset() if env_key is None else frozenset({env_key}),
        reasons=line.reasons,
        memory=memory,
        address=address,
        ctx_size=context.per_request,
        parallel=context.parallel,
        kv_type=kv.name,
        model_class=serves,
        api_key=None if isinstance(address, UnixAddress) else api_key,
    )


def plan_as_json(
    plan: LaunchPlan, *, model: str, path: str, kind: RuntimeKind, version: str
) -> dict[str, Any]:
    """The plan as ``llamasup plan --json`` prints it. Holds no secret."""
    memory = plan.memory
    return {
        "model": model,
        "runtime": {"path": path, "kind": kind, "version": version},
        "argv": list(plan.argv),
        "env": plan.env_shown,
        "reasons": [
            {"flag": each.flag, "value": each.value, "reason": each.reason, "passed": each.passed}
            for each in plan.reasons
        ],
        "memory": {
            "weights_bytes": memory.weights_bytes,
            "kv_bytes": memory.kv_bytes,
            "compute_bytes": memory.compute_bytes,
            "total_bytes": memory.total_bytes,
            "available_bytes": memory.available_bytes,
            "fits": memory.fits,
        },
    }


# --- the model and what it is for ----------------------------------------------------------------

_NOT_NEEDED = "this build does so by itself"
_NO_JINJA = "this build knows the usual chat templates by name, and reads no others"

_NO_MODEL = {
    ModelClass.PROJECTOR: "give it as --mmproj beside the model that it belongs to",
    ModelClass.LORA: "give it after -- as --lora FILE beside the model that it was trained for",
    ModelClass.DRAFT: "it drafts for another model: serve that one, with this after -- as --spec-draft-model",
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


def _refuse_what_is_no_projector(mmproj: ModelFacts, path: str) -> None:
    if mmproj.model_class is not ModelClass.PROJECTOR:
        raise UsageInvalid(
            f"--mmproj {PurePath(path).name} is of class {mmproj.model_class}, and has to be a projector",
            remedy="give the mmproj file that was published with the model",
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
        line.give("--embedding", None, "this model gives embeddings")
        if model.pooling in (None, "none"):
            # /v1/embeddings refuses pooling "none", which is llama-server's choice where the file has none.
            pooling = "mean" if not has_kv_cache(model) else "last"
            line.give("--pooling", pooling, f"the file names no pooling; {pooling} is usual for its kind")
    elif serves is ModelClass.RERANKER:
        pooling_option = capabilities.find("--pooling")
        if capabilities.knows("--rerank"):
            # Alone: builds from October 2024 to mid-2025 rerank only "without --embedding".
            line.give("--rerank", None, "this model scores documents against a query")
        elif pooling_option is not None and "rank" in pooling_option.allowed:
            line.give("--embedding", None, "this model scores documents against a query")
            line.give("--pooling", "rank", "a score for each pair")
        else:
            raise RuntimeMissing(
                f"this llama-server ({capabilities.version}) cannot rerank, and the model is a reranker",
                remedy="use a build that has --rerank (October 2024 or later) with --runtime",
            )


def _name(line: CommandLine, settings: Settings, model_path: str) -> None:
    name = names_of(model_path, settings.alias).name
    why = "asked for with --alias" if settings.alias else "the file's name, so that answers carry no path"
    # Not an error where the build lacks it: it is llamasup that knows the model by this name.
    line.give("--alias", name, why)


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
        line.give("--host", address.path, "a Unix socket in a private folder: no port for others to find")
        line.give("--port", 0, "has no meaning for a socket; given because the default is changing")
        return None
    line.give("--host", address.host, "loopback only")
    line.give("--port", address.port, "a free port, known before the start")
    if api_key is None:
        return None
    if not needs_key_file(capabilities):
        option = capabilities.find("--api-key")
        return option.env if option is not None else None
    if api_key_file is None:
        raise ValueError("this build takes its API key from a file only: see needs_key_file")
    line.give("--api-key-file", api_key_file, "other users of this machine could reach the port")
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


def _uses_device(capabilities: Capabilities, settings: Settings, by_hand: ByHand) -> bool:
    layers = by_hand.value("--gpu-layers") or str(settings.gpu_layers)
    return bool(capabilities.devices) and layers != "0" and by_hand.value("--device") != "none"


def _device_layers(line: CommandLine, capabilities: Capabilities, settings: Settings) -> None:
    """By hand, or all of them in a build that has devices but cannot fit layers to them by itself."""
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
    elif capabilities.devices and not capabilities.knows("--fit"):
        line.give("--gpu-layers", every, "this build leaves the device unused unless told otherwise")
    else:
        fits = "llama-server fits layers to its devices (--fit), and gives up on that if told a number"
        line.leave_out(
            "--gpu-layers", fits if capabilities.devices else "there is no device to put layers on"
        )


def _asked(option: str, setting: object) -> str | None:
    return option if setting is not None else None
