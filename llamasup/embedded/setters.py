"""Makes setters, which set attributes of ``CommonParams`` from the text of an option.

They do what llama.cpp does in ``common/arg.cpp`` (b11434); where a choice looks odd, it is llama-server's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llamasup.embedded.option import (
    ON,
    InvalidValue,
    Setter,
    boolean,
    cpu_mask,
    cpu_range,
    existing_folder,
    file_text,
    integer,
    items,
    number,
    three_way,
    unsigned,
)


def xllamacpp_module() -> Any:
    import xllamacpp  # late: 50 ms

    return xllamacpp


def get_attribute(params: Any, path: str) -> Any:
    for name in path.split("."):
        params = getattr(params, name)
    return params


def set_attribute(params: Any, path: str, value: object) -> None:
    *owners, name = path.split(".")
    for owner in owners:
        params = getattr(params, owner)
    try:
        setattr(params, name, value)
    except (OverflowError, ValueError) as error:
        raise InvalidValue(str(error)) from None


def read_into(*paths: str, read: Callable[[str], object]) -> Setter:
    def apply(params: Any, value: str) -> None:
        for path in paths:
            set_attribute(params, path, read(value))

    return Setter(paths, apply)


# --- general shapes ------------------------------------------------------------------------------


def option_integer(*paths: str) -> Setter:
    return read_into(*paths, read=integer)


def option_number(path: str) -> Setter:
    return read_into(path, read=number)


def positive(path: str) -> Setter:
    """A number that llama.cpp reads without sign (polling levels, 0|1)."""
    return read_into(path, read=unsigned)


def text(path: str) -> Setter:
    return read_into(path, read=str)


def contents(path: str) -> Setter:
    """Read the file that the value names."""
    return read_into(path, read=file_text)


def folder(path: str) -> Setter:
    return read_into(path, read=existing_folder)


def switch(path: str, *more: str, sets: bool = True) -> Setter:
    """A switch. Its own spelling sets the attribute to ``sets``, a negation to the opposite."""
    return read_into(path, *more, read=lambda value: (value == ON) is sets)


def on_off(path: str) -> Setter:
    """A boolean option with a value: ``--fit off``, ``--cpu-strict 1``."""
    return read_into(path, read=_on_or_off)


def _on_or_off(value: str) -> bool:
    known = boolean(value)
    if known is None:
        raise InvalidValue(f"error: unknown value: '{value}' (on or off)")
    return known


def choice(path: str, enumeration: str, names: str, *, prefix: str = "") -> Setter:
    """A value for each enumerator; the wheel may lack some.

    ``names`` are the values, as ``VALUE=MEMBER`` if the member of the ``enumeration`` has another name.
    ``prefix`` begins the names of the members, if the name of the enumeration does not.
    """
    members = {value: member or value for value, _, member in (name.partition("=") for name in names.split())}

    def read(value: str) -> object:
        found = _member(enumeration, members[value], prefix) if value in members else None
        if found is None:
            raise InvalidValue(f"invalid value: {value!r} (one of {', '.join(members)})")
        return found

    return read_into(path, read=read)


def _member(enumeration: str, name: str, prefix: str = "") -> Any:
    """Return the member of the wheel's enumeration; None if this wheel lacks it."""
    member = re.sub(r"\W", "_", f"{prefix or enumeration}_{name}").upper()
    return getattr(getattr(xllamacpp_module(), enumeration), member, None)


def replace_items(path: str) -> Setter:
    return read_into(path, read=items)


def add_items(path: str) -> Setter:
    """Values that accumulate over repetitions, like llama-server's aliases and keys."""

    def apply(params: Any, value: str) -> None:
        current = get_attribute(params, path)
        stripped = [part.strip() for part in items(value)]
        set_attribute(
            params, path, current | set(stripped) if isinstance(current, set) else [*current, *stripped]
        )

    return Setter((path,), apply)


def sampled(path: str, read: Callable[[str], object], bit: str = "") -> Setter:
    """A sampling default. ``bit`` marks it as the user's, so that the model file's does not replace it."""

    def apply(params: Any, value: str) -> None:
        set_attribute(params, f"sampling.{path}", read(value))
        if bit and hasattr(params.sampling, "user_sampling_config"):
            flags = getattr(xllamacpp_module(), "common_params_sampling_config", None)
            flag = getattr(flags, f"COMMON_PARAMS_SAMPLING_CONFIG_{bit}", 0)
            params.sampling.user_sampling_config |= int(flag)

    return Setter((f"sampling.{path}",), apply)


def affinity(path: str, *, given: str) -> Setter:
    """CPUs by ``mask`` or by ``range``; both may be given and add up."""
    read = cpu_mask if given == "mask" else cpu_range

    def apply(params: Any, value: str) -> None:
        cpus = get_attribute(params, path)
        cpus.cpumask = [old or new for old, new in zip(cpus.cpumask, read(value), strict=True)]
        cpus.mask_valid = True

    return Setter((f"{path}.cpumask", f"{path}.mask_valid"), apply)


# --- values that only some options have ------------------------------------------------------------------


def slots(value: str) -> int:
    count = integer(value)
    if count == 0:
        raise InvalidValue("error: invalid value for n_parallel: 0 (-1 = auto)")
    return count


def gpu_layers(value: str) -> int:
    return {"auto": -1, "all": -2}.get(value) or integer(value)


def flash_attention(value: str) -> object:
    wanted = three_way(value)
    return _member("llama_flash_attn_type", {None: "auto", True: "enabled", False: "disabled"}[wanted])


def rope_scale(value: str) -> float:
    factor = number(value)
    if factor == 0:
        raise InvalidValue("invalid value: 0")
    return 1.0 / factor


SPECULATIVE_TYPES = (
    "none", "draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark", "ngram-simple",
    "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache",
)  # fmt: skip


def speculative_types(value: str) -> list[object]:
    """Types separated by commas; ``draft-simple`` is ``COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE``."""
    found: list[object] = []
    for word in value.split(","):
        member = _member("common_speculative_type", word)
        if word not in SPECULATIVE_TYPES or member is None:
            raise InvalidValue(f"unknown speculative type: {word}")
        found.append(member)
    return found


def is_probabilistic(value: str) -> bool:
    if value not in ("greedy", "probabilistic"):
        raise InvalidValue(f"invalid value: {value!r} (greedy or probabilistic)")
    return value == "probabilistic"


def at_least_zero(value: str) -> float:
    return max(number(value), 0.0)


def at_least_minus_one(value: str) -> int:
    count = integer(value)
    if count < -1:
        raise InvalidValue(f"error: invalid value: {count} (-1 or more)")
    return count


def idle_seconds(value: str) -> int:
    seconds = integer(value)
    if seconds == 0 or seconds < -1:
        raise InvalidValue("invalid value: cannot be 0 or less than -1")
    return seconds


# --- options that set several attributes, or depend on their value before ---------------------------------


def set_ctx_size(params: Any, value: str) -> None:
    params.n_ctx = integer(value)
    if params.n_ctx == 0 and hasattr(params, "fit_params_min_ctx"):
        params.fit_params_min_ctx = -1  # UINT32_MAX in llama.cpp: an explicit 0 forbids fit to shrink it


def set_tensor_split(params: Any, value: str) -> None:
    shares = [number(part) for part in value.replace("/", ",").split(",")]
    devices = len(params.tensor_split)
    if len(shares) > devices:
        raise InvalidValue(f"got {len(shares)} input configs, but system only has {devices} devices")
    params.tensor_split = shares + [0.0] * (devices - len(shares))


def set_fit_target(params: Any, value: str) -> None:
    margins = [integer(part) * 1024 * 1024 for part in value.replace("/", ",").split(",")]
    current = list(params.fit_params_target)
    if len(margins) > len(current):
        raise InvalidValue(f"got {len(margins)} values, but there are at most {len(current)} devices")
    one_for_all = len(margins) == 1
    params.fit_params_target = margins * len(current) if one_for_all else margins + current[len(margins) :]


def override_tensor(path: str) -> Setter:
    def apply(params: Any, value: str) -> None:
        earlier = get_attribute(params, path)
        set_attribute(params, path, f"{earlier},{value}" if earlier else value)

    return Setter((path,), apply)


_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # llama.cpp's LLM_FFN_EXPS_REGEX


def cpu_moe(path: str, *, counted: bool) -> Setter:
    """Keep the expert weights in the CPU's buffers: all of them, or only in the first N layers."""

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


def set_cors_origins(params: Any, value: str) -> None:
    params.cors_origins = value
    if hasattr(params, "cors_origins_explicit"):
        params.cors_origins_explicit = True


def add_keys_of_file(params: Any, value: str) -> None:
    """Read one key per line. Blank lines and lines that start with a hash are ignored."""
    lines = [line.strip() for line in file_text(value).splitlines()]
    params.api_keys = [*params.api_keys, *(line for line in lines if line and line[0] != "#")]


def set_rerank(params: Any, value: str) -> None:
    if value == ON:
        params.embedding = True
        params.pooling_type = xllamacpp_module().llama_pooling_type.LLAMA_POOLING_TYPE_RANK


def add_template_kwargs(params: Any, value: str) -> None:
    try:
        given = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"not JSON: {error}") from None
    if not isinstance(given, dict):
        raise InvalidValue(f"not a JSON object: {value}")
    _add_template_kwargs(params, given)


def set_reasoning(params: Any, value: str) -> None:
    wanted = three_way(value)
    params.enable_reasoning = -1 if wanted is None else int(wanted)
    if wanted is not None:
        _add_template_kwargs(params, {"enable_thinking": wanted})


def _add_template_kwargs(params: Any, given: Mapping[str, object]) -> None:
    dumped = {
        key: json.dumps(value, ensure_ascii=False, separators=(",", ":")) for key, value in given.items()
    }
    params.default_template_kwargs = {**params.default_template_kwargs, **dumped}


def grammar(*, file: bool) -> Setter:
    read = file_text if file else str

    def apply(params: Any, value: str) -> None:
        wheel = xllamacpp_module()
        kind = wheel.common_grammar_type.COMMON_GRAMMAR_TYPE_USER
        params.sampling.grammar = wheel.CommonGrammar(kind, read(value))

    return Setter(("sampling.grammar",), apply)
