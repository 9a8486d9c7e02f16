"""Chooses the KV cache types together with flash attention, because a packed V cache needs it."""

from __future__ import annotations

from msgspec import Struct

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.gguf.tensor_types import KV_CACHE_TYPES, kv_block
from llamasup.core.llama_server.argv_builder import CommandLine, asked_with
from llamasup.core.llama_server.help_text import Capabilities, Option
from llamasup.core.planning.inputs import PlanInputs
from llamasup.core.planning.memory.kv_cache import has_kv_cache
from llamasup.errors import UsageInvalid

# llama-server's synonyms (common/arg.cpp: is_truthy, is_falsey).
_FLASH_SYNONYMS = {"1": "on", "true": "on", "enabled": "on", "0": "off", "false": "off", "disabled": "off"}


class KvCache(Struct, frozen=True):
    """The cache types and flash attention. ``flash`` is None if the build has no such flag."""

    flash: str | None  # on, off, auto
    k_type: str
    v_type: str
    why_flash: str
    why_k: str
    why_v: str
    smaller: str | None = None
    """A type with less memory that the plan may use instead; None if the user set the type."""

    @property
    def name(self) -> str:
        """The type, or the types of K and V if they differ."""
        return self.k_type if self.k_type == self.v_type else f"{self.k_type}/{self.v_type}"


def decide_kv_cache(inputs: PlanInputs, *, wanted: str, on_device: bool) -> KvCache:
    """Choose the cache types and flash attention. The user and ``bounds`` override the type ``wanted``.

    Raises UsageInvalid for an impossible setting.
    """
    model, settings, extra_args = inputs.model, inputs.settings, inputs.extra_args
    flash, why_flash = _flash(inputs)
    flash_works = flash in ("on", "auto")
    asked = {}
    for flag in ("--cache-type-k", "--cache-type-v"):
        passed = extra_args.value(flag)
        asked[flag] = passed or settings.kv_type
        _check_type(inputs.capabilities, flag, asked[flag], flag if passed else "--kv-type")
    if not has_kv_cache(model):
        why = f"a {model.architecture} model has no KV cache"
        return KvCache(flash, "f16", "f16", why_flash, why, why)
    why_wanted = _WHY_PACKED if wanted != "f16" else _WHY_F16_ON_DEVICE if on_device else _WHY_F16
    if inputs.prefers.server_defaults:
        why_wanted = _SERVER_CHOICE
    if inputs.bounds.kv_type is not None:
        wanted, why_wanted = inputs.bounds.kv_type, inputs.bounds.why
    sides = [_cache_type(inputs, flag, given, wanted, why_wanted) for flag, given in asked.items()]
    (k_type, why_k), (v_type, why_v) = sides
    if kv_block(v_type) > 1 and not flash_works:
        why_v = "a quantised V cache needs flash attention, which " + (
            "is off" if flash == "off" else "this build does not have"
        )
        if asked["--cache-type-v"] is not None:
            raise UsageInvalid(
                f"the KV cache type {v_type} is not possible: {why_v}",
                remedy="use f16 for V, or leave flash attention on",
            )
        v_type = "f16"
    if flash == "auto" and kv_block(v_type) > 1 and settings.flash_attn is None and not extra_args.has("-fa"):
        flash, why_flash = "on", f"the {v_type} V cache needs flash attention"
    may_pack = model.known and flash_works and not any(asked.values()) and {k_type, v_type} == {"f16"}
    packed = may_pack and all(_cache_type(inputs, flag, None, "q8_0", "")[0] == "q8_0" for flag in asked)
    return KvCache(flash, k_type, v_type, why_flash, why_k, why_v, "q8_0" if packed else None)


def give_kv_cache(line: CommandLine, inputs: PlanInputs, kv: KvCache) -> None:
    """Add flash attention, and the cache types that differ from llama-server's default."""
    settings = inputs.settings
    option = inputs.capabilities.find("--flash-attn")
    asked = asked_with("--flash-attn", settings.flash_attn if settings.flash_attn == "on" else None)
    if option is not None and option.argument is None and kv.flash == "off":
        line.leave_out("--flash-attn", kv.why_flash)
    else:
        bare = option is None or option.argument is None
        # Without the bare switch, a packed V ends llama-server; builds with "auto" enable it by themselves.
        needed = bare and kv_block(kv.v_type) > 1
        line.give("--flash-attn", None if bare else kv.flash, kv.why_flash, asked=asked, essential=needed)
    sides = (("--cache-type-k", kv.k_type, kv.why_k), ("--cache-type-v", kv.v_type, kv.why_v))
    for flag, cache_type, why in sides:
        if cache_type == "f16" and (settings.kv_type != "f16" or not has_kv_cache(inputs.model)):
            line.leave_out(flag, f"f16 is the default: {why}")
        else:
            line.give(flag, cache_type, why, asked=asked_with("--kv-type", settings.kv_type))


_WHY_PACKED = "takes half the memory of f16, with nearly the same answers"
_SERVER_CHOICE = "llama-server's own choice"
_WHY_F16 = "on a CPU, a packed cache costs a third of the speed in long contexts"
_WHY_F16_ON_DEVICE = "all layers fit on the device with it, and a packed cache makes generation slower"


def _flash(inputs: PlanInputs) -> tuple[str | None, str]:
    settings, extra_args, bounds = inputs.settings, inputs.extra_args, inputs.bounds
    option = _accepted(inputs.capabilities, "--flash-attn")
    if option is None:
        return None, ""
    bare = option.argument is None
    if extra_args.has("--flash-attn"):
        value = extra_args.value("--flash-attn") or "on"
        return _FLASH_SYNONYMS.get(value, value), "set after --"
    if settings.flash_attn in ("on", "off"):
        return settings.flash_attn, f"set with --flash-attn {settings.flash_attn}"
    if bounds.flash_attn_off and settings.flash_attn is None:
        return "off", bounds.why
    if bare and not has_kv_cache(inputs.model):
        return "off", "this model has no KV cache"
    is_bare_default = bare and inputs.prefers.server_defaults
    if is_bare_default and settings.kv_type is None and not extra_args.has("--cache-type-v"):
        return "off", _SERVER_CHOICE
    if bare:
        return "on", "attention takes less memory, and a quantised V cache needs it"
    return "auto", "llama-server uses it where the device supports it"


def _cache_type(
    inputs: PlanInputs, flag: str, asked: str | None, wanted: str, why_wanted: str
) -> tuple[str, str]:
    model = inputs.model
    keys = flag == "--cache-type-k"
    lengths = (
        {model.key_length, model.key_length_swa} if keys else {model.value_length, model.value_length_swa}
    )
    if asked is not None:
        odd = [length for length in lengths if length % kv_block(asked)]
        if odd:
            raise UsageInvalid(
                f"the KV cache type {asked} packs blocks of {kv_block(asked)} values, which do not divide "
                f"this model's heads of {max(odd)}",
                remedy="use --kv-type f16",
            )
        return asked, "set with --kv-type"
    if wanted == "f16":
        return "f16", why_wanted
    option = _accepted(inputs.capabilities, flag)
    if option is None or (option.allowed and wanted not in option.allowed):
        return "f16", f"this build has no {wanted} KV cache"
    if inputs.serves is not ModelClass.DECODER:
        return "f16", f"the KV cache of {inputs.serves} models is small and short-lived"
    if any(length % kv_block(wanted) for length in lengths):
        packs = f"{wanted} packs blocks of {kv_block(wanted)} values"
        return "f16", f"{packs}, which do not divide heads of {max(lengths)}"
    return wanted, why_wanted


def _check_type(capabilities: Capabilities, flag: str, asked: str | None, given_as: str) -> None:
    option = _accepted(capabilities, flag)
    allowed = (option.allowed if option else ()) or tuple(KV_CACHE_TYPES)
    if asked is not None and asked not in allowed:
        raise UsageInvalid(
            f"{given_as} {asked!r} is not a KV cache type", remedy=f"use one of {', '.join(allowed)}"
        )


def _accepted(capabilities: Capabilities, spelling: str) -> Option | None:
    return capabilities.find(spelling) if capabilities.knows(spelling) else None
