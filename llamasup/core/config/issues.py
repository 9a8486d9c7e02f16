"""The errors of a configuration: where each one is, the value seen, and the values that are allowed."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from llamasup.core.settings.declaration import Place
from llamasup.core.system.text import printable
from llamasup.errors import ConfigInvalid

MAX_PATTERNS = 100
"""Each rule, and each pattern of a group, is matched against every model; there may be thousands."""
# More than a screen holds; a file of the wrong kind has an error in every line.
MAX_LISTED = 100
_MAX_SHOWN = 60
NOT_SHOWN = "(not shown: it may be a secret)"


class Issue(Struct, frozen=True, order=True):
    """One error. ``line`` counts from 1; 0 is the file as a whole. ``key`` as ``models.qwen.aliases[1]``, or
    "" if the error belongs to no key. ``more``: further lines, such as a table.
    """

    line: int
    key: str
    what: str
    more: tuple[str, ...] = ()

    def in_file(self, file: str) -> str:
        position = f"{file}:{self.line}" if self.line else file
        return printable(f"{position}: {self.key}: {self.what}" if self.key else f"{position}: {self.what}")


class ConfigIssues(ConfigInvalid):
    """All errors of one file. ``details`` has a line for each: ``FILE:LINE: key: what``."""

    def __init__(self, file: str, issues: tuple[Issue, ...]) -> None:
        self.file = file
        self.issues = tuple(sorted(set(issues)))
        listed = tuple(
            line
            for issue in self.issues[:MAX_LISTED]
            for line in (issue.in_file(file), *(f"  {printable(more)}" for more in issue.more))
        )
        unlisted = max(0, len(self.issues) - MAX_LISTED)
        count = "1 error" if len(self.issues) == 1 else f"{len(self.issues)} errors"
        super().__init__(
            f"{printable(file)} has {count}.",
            details=(*listed, f"… and {unlisted} more") if unlisted else listed,
        )


def issue_at(place: Place, what: str, lines: Mapping[Place, int]) -> Issue:
    """Make an issue at ``place``, or at the nearest key above it that the file contains."""
    while place and place not in lines:  # a single value for a list of one, for example
        place = place[:-1]
    return Issue(lines.get(place, 0), place_text(place), what)


def shown(text: str) -> str:
    """Quote a value of the file for an error, on one line and shortened."""
    cut = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
    return f"'{printable(cut)}'"


def place_text(place: Place) -> str:
    """Write a place as ``models.qwen.aliases[1]``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")
