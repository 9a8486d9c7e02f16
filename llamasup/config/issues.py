"""What is wrong with a configuration: where, what was seen, and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llamasup.errors import ConfigInvalid
from llamasup.system.text import printable

__all__ = [
    "MAX_PATTERNS",
    "MAX_TOLD",
    "NOT_SHOWN",
    "ConfigIssues",
    "Issue",
    "Place",
    "mistake_at",
    "place_text",
    "shown",
]

Place = tuple[str | int, ...]
"""A key by the keys above it, and by its number in a list: ``("models", "qwen", "aliases", 1)``."""

MAX_PATTERNS = 100
"""Each rule, and each pattern of a group, is tried on every model, of which there may be thousands."""
# More than a screen holds; a file of the wrong kind has one in every line.
MAX_TOLD = 100
_MAX_SHOWN = 60
NOT_SHOWN = "what is there (not shown: it may be a secret)"


@dataclass(frozen=True, slots=True, order=True)
class Issue:
    """``line`` counts from 1; 0: the file as a whole. ``key`` as ``models.qwen.aliases[1]``; "": none."""

    line: int
    key: str
    what: str
    """The value seen, and what is allowed."""
    more: tuple[str, ...] = ()
    """Lines of its own, such as a table."""

    def in_file(self, file: str) -> str:
        place = f"{file}:{self.line}" if self.line else file
        return printable(f"{place}: {self.key}: {self.what}" if self.key else f"{place}: {self.what}")


class ConfigIssues(ConfigInvalid):
    """Every mistake of one file; each is a line of ``details`` too, as ``FILE:LINE: key: what``."""

    def __init__(self, file: str, issues: tuple[Issue, ...]) -> None:
        self.file = file
        self.issues = tuple(sorted(set(issues)))
        told = tuple(
            line
            for each in self.issues[:MAX_TOLD]
            for line in (each.in_file(file), *(f"  {printable(more)}" for more in each.more))
        )
        left = max(0, len(self.issues) - MAX_TOLD)
        count = "one mistake" if len(self.issues) == 1 else f"{len(self.issues)} mistakes"
        super().__init__(
            f"{printable(file)} has {count}.", details=(*told, f"… and {left} more") if left else told
        )


def mistake_at(place: Place, what: str, lines: Mapping[Place, int]) -> Issue:
    """At the key of ``place``, or at the nearest one above it that the file gives."""
    while place and place not in lines:  # one value for a list of one, say
        place = place[:-1]
    return Issue(lines.get(place, 0), place_text(place), what)


def shown(text: str) -> str:
    """A value of the file as an error shows it: on one line, and not all of a long one."""
    cut = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
    return f"'{printable(cut)}'"


def place_text(place: Place) -> str:
    """``models.qwen.aliases[1]``."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place).removeprefix(".")
