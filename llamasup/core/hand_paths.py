"""Which words after ``--`` are paths, so that they mean the same in a child that runs in another folder."""

from __future__ import annotations

import re
from collections.abc import Callable

from llamasup.core.capabilities import Capabilities, Option
from llamasup.core.flags import read_extra

__all__ = ["with_absolute_paths"]

# The placeholders of llama-server's help: FNAME, FILE, PATH, DIR, FNAME:SCALE,..., JINJA_TEMPLATE_FILE.
_IS_PATH = re.compile(r"(?<![A-Z])(?:FNAME|FILE|PATH|DIR)(?![A-Z])")
_SCALE = re.compile(r":[-+]?[\d.]+$")


def with_absolute_paths(
    capabilities: Capabilities, extra: tuple[str, ...], resolve: Callable[[str], str]
) -> tuple[str, ...]:
    """The user's llama-server arguments with ``resolve`` applied to every path in them.

    Whether a path exists is not asked: llama-server then names the place that was meant.
    Raises UsageInvalid as ``read_extra`` does.
    """
    words: list[str] = []
    for flag in read_extra(capabilities, extra).flags:
        words.append(flag.spelling)
        for value, placeholder in zip(flag.values, flag.option.argument_words, strict=True):
            is_path = _IS_PATH.search(placeholder) is not None
            words.append(_resolved(value, placeholder, flag.option, resolve) if is_path else value)
    return tuple(words)


def _resolved(value: str, placeholder: str, option: Option, resolve: Callable[[str], str]) -> str:
    several = placeholder.endswith(",...") or "comma-separated" in option.description
    return ",".join(
        _one(part, resolve, scaled=":SCALE" in placeholder)
        for part in (value.split(",") if several else [value])
    )


def _one(path: str, resolve: Callable[[str], str], *, scaled: bool) -> str:
    scale = _SCALE.search(path) if scaled else None
    name, rest = (path[: scale.start()], scale[0]) if scale else (path, "")
    return resolve(name) + rest if name else path
