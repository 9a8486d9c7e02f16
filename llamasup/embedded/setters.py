"""General setters of attributes of ``CommonParams`` from text. ``rules.py`` has the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llamasup.embedded.option import ON, InvalidValue, Setter
from llamasup.embedded.values import (
    boolean,
    cpu_mask,
    cpu_range,
    existing_folder,
    file_text,
    integer,
    items,
    number,
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

    def read(value: str) -> bool:
        known = boolean(value)
        if known is None:
            raise InvalidValue(f"error: unknown value: '{value}' (on or off)")
        return known

    return read_into(path, read=read)


def choice(path: str, enumeration: str, members: Mapping[str, str]) -> Setter:
    """A value for each enumerator; the wheel may lack some."""

    def read(value: str) -> object:
        member = members.get(value)
        found = getattr(getattr(xllamacpp_module(), enumeration), member, None) if member else None
        if found is None:
            raise InvalidValue(f"invalid value: {value!r} (one of {', '.join(members)})")
        return found

    return read_into(path, read=read)


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
