"""Valid names of models, patterns of names, and the names of ``--alias``."""

from __future__ import annotations

import re
from pathlib import PurePath

import msgspec

from llamasup.errors import UsageInvalid

MAX_LETTERS = 256
"""Longer names are invalid, and expensive to compare."""

NAME = r"[A-Za-z0-9._/:@+-]+"
FORBIDDEN = re.compile(r"[^A-Za-z0-9._/:@+-]+")
_PART = re.compile(r"-\d{5}-of-\d{5}$")  # llama_split_path of llama.cpp


def why_not_a_name(name: str) -> str:
    """Say why a name is invalid. Empty: it is valid."""
    if not name:
        return "is empty"
    if len(name) > MAX_LETTERS:
        return f"has {len(name)} characters, and {MAX_LETTERS} are allowed"
    if (bad := FORBIDDEN.search(name)) is not None:
        return f"contains {bad[0][:8]!r}; allowed are letters, digits and . _ / : @ + -"
    if ".." in name:
        return "contains '..', like a path that leads out of a folder"
    if name.startswith("/"):
        return "begins with '/', like an absolute path"
    return ""


def why_not_an_alias(name: str) -> str:
    """Say why a further name is invalid. Empty: it is valid. It names no file, so it may have any letters."""
    if is_pattern(name):
        return "is a pattern, not a name"
    if not name or len(name) > MAX_LETTERS:
        return why_not_a_name(name)
    if bad := next((letter for letter in name if not letter.isprintable()), ""):
        return f"contains {bad!r}, which is not printable"
    return "" if name == name.strip() else "begins or ends with a space"


def is_pattern(name: str) -> bool:
    return "*" in name or "?" in name


class Names(msgspec.Struct, frozen=True):
    """The names of one model: its ``name`` in answers, and its ``aliases``."""

    name: str
    aliases: tuple[str, ...] = ()


def names_of(model_path: str, alias: str | None) -> Names:
    """Read the names of ``--alias``, separated by commas; else use the file's name without part number.

    Raises UsageInvalid for an empty name.
    """
    if alias is None:
        stem = _PART.sub("", PurePath(model_path).stem)
        # For llama-server a comma ends the name.
        return Names(stem.replace(",", "_").strip() or "model")
    names = [name.strip() for name in alias.split(",")]
    if not all(names):
        raise UsageInvalid(
            f"--alias {alias!r} has an empty name", remedy="give one name, or several with a comma between"
        )
    first, *others = dict.fromkeys(names)
    return Names(first, tuple(others))
