"""How a key of the config is declared: what it takes, and what it means."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from llamasup.config.kinds import ScalarKind

__all__ = ["FilePath", "Key", "Kind", "Many", "Named", "Section"]


@dataclass(frozen=True, slots=True)
class FilePath:
    """A path: absolute once it is read, from the config's folder on. ``literal``: words that are none."""

    what: str = "a path"
    literal: tuple[str, ...] = ()
    hidden: bool = False
    """A key pasted where its file belongs must not be shown."""
    as_text: bool = False


@dataclass(frozen=True, slots=True)
class Many:
    """A list of one kind; a single value stands for a list of it, if ``or_one``."""

    kind: ScalarKind | FilePath
    or_one: bool = True


@dataclass(frozen=True, slots=True)
class Section:
    """Keys of their own."""

    keys: type[msgspec.Struct]


@dataclass(frozen=True, slots=True)
class Named:
    """Values by names that the file chooses. ``pattern``: the names may have wildcards."""

    of: Section | Many
    pattern: bool = False


Kind = ScalarKind | FilePath | Many | Section | Named


@dataclass(frozen=True, slots=True)
class Key:
    """What a key takes and means; ``default`` says what holds without it, where the field's own does not."""

    kind: Kind
    about: str
    default: str = ""
