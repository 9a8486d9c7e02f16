"""The draft of a config: its values, and comments about where they came from (pure)."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final

import yaml

from llamasup.core.config.issues import Issue, place_text
from llamasup.core.settings.declaration import Place
from llamasup.core.settings.names import FORBIDDEN, MAX_LETTERS
from llamasup.core.system.text import printable

_WIDTH: Final = 110
_SECRET: Final = re.compile("KEY|TOKEN(?!S)|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


class _Dumper(yaml.SafeDumper):
    """Writes each text on one line, and each value where it is used."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = None if data.splitlines() == [data] else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def flow(value: Any) -> str:
    """Write a value as YAML on one line."""
    dump = partial(yaml.dump, Dumper=_Dumper, default_flow_style=True, width=float("inf"))
    return str(dump([value], allow_unicode=True, sort_keys=False))[1:-2]


def is_secret(name: str) -> bool:
    """Whether the value of a variable, an option or a key with this name may be a secret."""
    return _SECRET.search(name) is not None


def literal(text: str) -> str:
    """Write a text so that a config reads it unchanged: ``${`` begins a variable."""
    return text.replace("${", "$${")


def valid_name(name: str) -> str:
    """Return the name of a model in the characters that names have."""
    return re.sub(r"\.{2,}", ".", FORBIDDEN.sub("-", name))[:MAX_LETTERS].strip("-./") or "model"


class Draft:
    """Collects the values of a config and the comments at their places. Owned by one import."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self._notes: list[tuple[Place, str]] = []

    def put(self, place: Place, value: Any, note: str = "") -> None:
        """Set the value of a key, and comment on it."""
        node: Any = self.config
        for section in place[:-1]:
            node = node.setdefault(section, {})
        node[place[-1]] = value
        if note:
            self.note(place, note)

    def add(self, place: Place, values: Sequence[str], note: str = "") -> None:
        """Add to the list at a place."""
        before: Any = self.config
        for part in place:
            before = before.get(part, {})
        if values:
            self.put(place, list(dict.fromkeys((*before, *values))), note)

    def note(self, place: Place, text: str) -> None:
        """Comment on a place, or on what contains it if the config does not have the place."""
        self._notes.append((place, text))

    def text(self) -> str:
        """Write the config, with each comment above the line that it is about."""
        comments: dict[Place, list[str]] = {}
        entries = {place for place, _ in _places(self.config) if all(isinstance(part, str) for part in place)}
        for place, note in self._notes:
            while place and place not in entries:
                place = place[:-1]
            comments.setdefault(place, []).append(note)
        lines = (*_comments(comments.get((), ()), ""), *_lines(self.config, (), comments))
        return "\n".join(lines) + "\n"

    def checked(self, check: Callable[[str], Sequence[Issue]]) -> tuple[str, Sequence[Issue]]:
        """Leave out what ``check`` refuses. Returns the text, and the issues that belong to no value."""
        while True:  # a value that is left out may leave others without their meaning
            issues = check(text := self.text())
            found = {place_text(place): (place, holder) for place, holder in _places(self.config)}
            wrong = {issue.key: issue.what for issue in issues if issue.key in found}
            if not wrong:
                return text, issues
            rows = [(*found[key], why) for key, why in wrong.items()]
            for place, holder, why in sorted(rows, key=itemgetter(0), reverse=True):  # last items first
                key = f"{place[-1]}: " if isinstance(holder, dict) else ""
                self.note(place[:-1], f"{key}{flow(holder.pop(place[-1]))} → left out: {why}")


def _places(node: Any, at: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield the place of each value in a tree, and the mapping or list that holds the value."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, list) else ())
    for key, value in pairs:
        yield (*at, key), node
        yield from _places(value, (*at, key))


def _lines(section: dict[str, Any], at: Place, comments: dict[Place, list[str]]) -> Iterator[str]:
    indent = "  " * len(at)
    for key, value in section.items():
        yield from () if at else ("",)
        yield from _comments(comments.get((*at, key), ()), indent)
        is_section = value and isinstance(value, dict)
        yield f"{indent}{flow(str(key))}:{'' if is_section else f' {flow(value)}'}"
        if is_section:
            yield from _lines(value, (*at, key), comments)


def _comments(notes: Sequence[str], indent: str) -> Iterator[str]:
    first, then = f"{indent}# ", f"{indent}#   "
    wrapper = textwrap.TextWrapper(_WIDTH, first, then, break_long_words=False, break_on_hyphens=False)
    for note in notes:
        yield from wrapper.wrap(printable(note))
