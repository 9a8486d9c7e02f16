"""Setters of options that set several attributes or accept only some values.

They do what llama.cpp does in ``common/arg.cpp`` (b11434); where a choice looks odd, it is llama-server's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llamasup.embedded.option import ON, InvalidValue, Setter
from llamasup.embedded.setters import get_attribute, read_into, sampled, set_attribute, xllamacpp_module
from llamasup.embedded.values import file_text, integer, items, number, three_way


def ctx_size() -> Setter:
    def apply(params: Any, value: str) -> None:
        params.n_ctx = integer(value)
        if params.n_ctx == 0 and hasattr(params, "fit_params_min_ctx"):
            params.fit_params_min_ctx = -1  # UINT32_MAX in llama.cpp: an explicit 0 forbids fit to shrink it

    return Setter(("n_ctx",), apply)


def parallel() -> Setter:
    def read(value: str) -> int:
        slots = integer(value)
        if slots == 0:
            raise InvalidValue("error: invalid value for n_parallel: 0 (-1 = auto)")
        return slots

    return read_into("n_parallel", read=read)


def gpu_layers(path: str) -> Setter:
    return read_into(path, read=lambda value: {"auto": -1, "all": -2}.get(value) or integer(value))


def flash_attn() -> Setter:
    def read(value: str) -> object:
        wanted = three_way(value)
        member = "AUTO" if wanted is None else "ENABLED" if wanted else "DISABLED"
        return getattr(xllamacpp_module().llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{member}")

    return read_into("flash_attn_type", read=read)


def rope_scale() -> Setter:
    def read(value: str) -> float:
        factor = number(value)
        if factor == 0:
            raise InvalidValue("invalid value: 0")
        return 1.0 / factor

    return read_into("rope_freq_scale", read=read)


def tensor_split() -> Setter:
    def apply(params: Any, value: str) -> None:
        shares = [number(part) for part in value.replace("/", ",").split(",")]
        devices = len(params.tensor_split)
        if len(shares) > devices:
            raise InvalidValue(f"got {len(shares)} input configs, but system only has {devices} devices")
        params.tensor_split = shares + [0.0] * (devices - len(shares))

    return Setter(("tensor_split",), apply)


def fit_target() -> Setter:
    def apply(params: Any, value: str) -> None:
        margins = [integer(part) * 1024 * 1024 for part in value.replace("/", ",").split(",")]
        current = list(params.fit_params_target)
        if len(margins) > len(current):
            raise InvalidValue(f"got {len(margins)} values, but there are at most {len(current)} devices")
        one_for_all = len(margins) == 1
        params.fit_params_target = (
            margins * len(current) if one_for_all else margins + current[len(margins) :]
        )

    return Setter(("fit_params_target",), apply)


def override_tensor(path: str) -> Setter:
    def apply(params: Any, value: str) -> None:
        earlier = get_attribute(params, path)
        set_attribute(params, path, f"{earlier},{value}" if earlier else value)

    return Setter((path,), apply)


_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # llama.cpp's LLM_FFN_EXPS_REGEX


def cpu_moe(path: str, *, counted: bool) -> Setter:
    """Expert weights stay in the CPU's buffers: all of them, or those of the first N layers."""

    def apply(params: Any, value: str) -> None:
        layers = integer(value) if counted else 0
        if layers < 0:
            raise InvalidValue(f"invalid value: {value}")
        wanted = (
            [rf"blk\.{layer}{_EXPERTS}=CPU" for layer in range(layers)] if counted else [f"{_EXPERTS}=CPU"]
        )
        earlier = get_attribute(params, path)
        set_attribute(params, path, ",".join([earlier, *wanted] if earlier else wanted))

    return Setter((path,), apply)


def lora(*, scaled: bool) -> Setter:
    def apply(params: Any, value: str) -> None:
        adapters = list(params.lora_adapters)
        for part in items(value):
            path, colon, scale = part.rpartition(":") if scaled else (part, ":", "1.0")
            if not colon:
                raise InvalidValue("lora-scaled format: FNAME:SCALE")
            adapters.append(xllamacpp_module().CommonAdapterLoraInfo(path, number(scale)))
        params.lora_adapters = adapters

    return Setter(("lora_adapters",), apply)


def cors_origins() -> Setter:
    def apply(params: Any, value: str) -> None:
        params.cors_origins = value
        if hasattr(params, "cors_origins_explicit"):
            params.cors_origins_explicit = True

    return Setter(("cors_origins",), apply)


SPECULATIVE_TYPES = (
    "none", "draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark", "ngram-simple",
    "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache",
)  # fmt: skip


def speculative_types() -> Setter:
    """Types separated by commas; ``draft-simple`` is ``COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE``."""

    def read(value: str) -> list[object]:
        found: list[object] = []
        for word in value.split(","):
            name = f"COMMON_SPECULATIVE_TYPE_{word.upper().replace('-', '_')}"
            member = getattr(xllamacpp_module().common_speculative_type, name, None)
            if word not in SPECULATIVE_TYPES or member is None:
                raise InvalidValue(f"unknown speculative type: {word}")
            found.append(member)
        return found

    return read_into("speculative.types", read=read)


def draft_sampling() -> Setter:
    def read(value: str) -> bool:
        if value not in ("greedy", "probabilistic"):
            raise InvalidValue(f"invalid value: {value!r} (greedy or probabilistic)")
        return value == "probabilistic"

    return read_into("speculative.draft.probabilistic", read=read)


def verbose() -> Setter:
    return read_into("verbosity", read=lambda _: 2**31 - 1)


def samplers() -> Setter:
    """Names separated by semicolons; xllamacpp ignores unknown names, llama.cpp warns on stderr."""
    return sampled("samplers", str, "SAMPLERS")


def at_least_zero(value: str) -> float:
    return max(number(value), 0.0)


def at_least_minus_one(value: str) -> int:
    count = integer(value)
    if count < -1:
        raise InvalidValue(f"error: invalid value: {count} (-1 or more)")
    return count


def keys_file() -> Setter:
    """One key per line, without blank lines and those that start with a hash."""

    def apply(params: Any, value: str) -> None:
        lines = [line.strip() for line in file_text(value).splitlines()]
        params.api_keys = [*params.api_keys, *(line for line in lines if line and line[0] != "#")]

    return Setter(("api_keys",), apply)


def timeout() -> Setter:
    return read_into("timeout_read", "timeout_write", read=integer)


def rerank() -> Setter:
    def apply(params: Any, value: str) -> None:
        if value == ON:
            params.embedding = True
            params.pooling_type = xllamacpp_module().llama_pooling_type.LLAMA_POOLING_TYPE_RANK

    return Setter(("embedding", "pooling_type"), apply)


def template_kwargs() -> Setter:
    def apply(params: Any, value: str) -> None:
        try:
            given = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidValue(f"not JSON: {error}") from None
        if not isinstance(given, dict):
            raise InvalidValue(f"not a JSON object: {value}")
        _add_template_kwargs(params, given)

    return Setter(("default_template_kwargs",), apply)


def reasoning() -> Setter:
    def apply(params: Any, value: str) -> None:
        wanted = three_way(value)
        params.enable_reasoning = -1 if wanted is None else int(wanted)
        if wanted is not None:
            _add_template_kwargs(params, {"enable_thinking": wanted})

    return Setter(("enable_reasoning", "default_template_kwargs"), apply)


def _add_template_kwargs(params: Any, given: Mapping[str, object]) -> None:
    dumped = {
        key: json.dumps(value, ensure_ascii=False, separators=(",", ":")) for key, value in given.items()
    }
    params.default_template_kwargs = {**params.default_template_kwargs, **dumped}


def sleep_idle() -> Setter:
    def read(value: str) -> int:
        seconds = integer(value)
        if seconds == 0 or seconds < -1:
            raise InvalidValue("invalid value: cannot be 0 or less than -1")
        return seconds

    return read_into("sleep_idle_seconds", read=read)


def grammar(*, file: bool) -> Setter:
    return _grammar("COMMON_GRAMMAR_TYPE_USER", file_text if file else str)


def _grammar(kind: str, read: Callable[[str], str]) -> Setter:
    def apply(params: Any, value: str) -> None:
        wheel = xllamacpp_module()
        params.sampling.grammar = wheel.CommonGrammar(getattr(wheel.common_grammar_type, kind), read(value))

    return Setter(("sampling.grammar",), apply)
