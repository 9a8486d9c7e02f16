"""Parses YAML text into a tree of nodes with line numbers, within bounds, and reads the texts of its scalars.

Scalars stay text: ``080`` is not a number. ``${NAME}`` in them stands for an environment variable, and
``${NAME:-text}`` for the text if the variable is unset or empty.

The tree is built from the parser's events, so that depth and size are checked while the tree grows. Aliases
(``*name``) are refused: a few lines of them can expand to billions of values, and ``defaults`` and rules hold
the settings that models share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from msgspec import Struct, field

from llamasup.core.config.issues import ConfigIssues, Issue, place_text, shown
from llamasup.core.settings.declaration import Place
from llamasup.core.settings.kinds import InvalidValue

# 1,000 models that use every key of a model take 600 kB and 50,000 values.
MAX_BYTES = 1 << 20
_MAX_NODES = 100_000
_MAX_KEY = 512  # a model's name has at most 256 characters
_MAX_DEPTH = 16  # the deepest valid value is at level 4
_TOO_DEEP = f"more than {_MAX_DEPTH} nested levels"

_MAX_DIGITS = 18  # of a whole number; not all of 19 fit into 64 bits
_JSON_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_REFERENCE = re.compile(r"\$(\$(?=\{))|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}|\$\{")

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Scalar(Struct, frozen=True):
    """One value. A ``plain`` value has no quotes, so it can be a number, a boolean or null."""

    line: int
    text: str
    plain: bool

    @property
    def is_null(self) -> bool:
        return self.plain and self.text in ("", "~", "null", "Null", "NULL")


class Items(Struct, frozen=True):
    line: int
    items: list[Node] = field(default_factory=list)


class Entry(Struct, frozen=True):
    key: str
    line: int
    node: Node


class Table(Struct, frozen=True):
    """A mapping; each key occurs once."""

    line: int
    entries: list[Entry] = field(default_factory=list)


Node = Scalar | Items | Table


def parse(content: bytes, file: str, size_bytes: int) -> tuple[Node | None, list[Issue]]:
    """Return the root of the only document (None: the file is empty), and the keys that occur twice.

    ``size_bytes``: the size of the file. If it is above ``MAX_BYTES``, nothing is parsed. Raises ConfigIssues
    if the file is not YAML or exceeds a bound.
    """
    if size_bytes > MAX_BYTES:
        raise _refused(file, 0, f"the file has {size_bytes} bytes; a config has at most {MAX_BYTES}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise _refused(file, line, f"the byte 0x{byte:02x} is not UTF-8; save the file as UTF-8") from None
    parser = _Parser(yaml.parse(text, Loader=_LOADER), file)
    try:
        return parser.document(), parser.issues
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = "; ".join(filter(None, (error.problem, error.context)))
        # libyaml 0.2.6 (PyYAML 6.0.4) reads ahead and stops at a depth of its own.
        too_deep = "maximum nesting depth" in what
        message = _TOO_DEEP if too_deep else f"invalid YAML: {what}{_tab(text, mark)}"
        raise _refused(file, _line(mark), message) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _refused(file, line, f"invalid YAML: {error.reason}") from None
    except (ValueError, OverflowError) as error:  # \U00110000 in PyYAML's own parser
        raise _refused(file, 0, f"invalid YAML: {error}") from None


def scalars_of(node: Node, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield the texts of a tree, with their places."""
    match node:
        case Scalar(text=text):
            yield place, text
        case Items(items=items):
            for number, item in enumerate(items):
                yield from scalars_of(item, (*place, number))
        case Table(entries=entries):
            for entry in entries:
                yield from scalars_of(entry.node, (*place, entry.key))


# --- texts of scalars ---------------------------------------------------------------------------------


def plain_value(text: str) -> Any:
    """Read the value of a text without quotes: a number, a switch, null, or else the text itself.

    Raises InvalidValue for a number that is too large.
    """
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    found = _JSON_NUMBER.fullmatch(text)
    if found is None:
        return text
    whole, fraction, exponent = found.groups()
    if fraction or exponent:
        number = float(text)
        if math.isfinite(number):
            return number
    elif len(whole.lstrip("-")) <= _MAX_DIGITS:
        return int(whole)
    raise InvalidValue("the number is too large; put it in quotes if it is text")


class InvalidReference(Exception):
    """A reference that cannot be replaced; the text gives the reason and the remedy."""


def has_reference(text: str) -> bool:
    """Whether ``expanded`` reads the environment, or fails."""
    return any(found[1] is None for found in _REFERENCE.finditer(text))


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """Replace the variables in ``text``; their values are not expanded again. ``$${`` is a literal ``${``.

    Raises InvalidReference.
    """

    def value(found: re.Match[str]) -> str:
        escape, name, default = found.groups()
        if escape:
            return "$"
        if name is None:
            raise InvalidReference("invalid variable after '${'; write it as ${HOME}, or a literal ${ as $${")
        known = environ.get(name)
        if default is not None:
            return known or default
        if known is None:
            raise InvalidReference(
                f"the environment variable {name} is not set; set it, or write a default: ${{{name}:-value}}"
            )
        return known

    return _REFERENCE.sub(value, text)


# --- the parser -----------------------------------------------------------------------------------------


def _refused(file: str, line: int, what: str, place: Place = ()) -> ConfigIssues:
    return ConfigIssues(file, (Issue(line, place_text(place), what),))


def _line(mark: Any) -> int:
    return mark.line + 1 if mark is not None else 0


def _tab(text: str, mark: yaml.Mark | None) -> str:
    if mark is not None:
        line = text.split("\n")[mark.line : mark.line + 1]
        if line and "\t" in line[0][: len(line[0]) - len(line[0].lstrip())]:
            return " (the line begins with a tab: indent with spaces)"
    return ""


class _Parser:
    def __init__(self, events: Iterator[yaml.Event], file: str) -> None:
        self._events = events
        self._file = file
        self._count = 0
        self.issues: list[Issue] = []

    def document(self) -> Node | None:
        root: Node | None = None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._refused(event, (), "a second document begins here; a config has one")
            elif isinstance(event, yaml.NodeEvent):
                root = self._node(event, ())
        return root

    def _node(self, event: Any, place: Place) -> Node:
        line = _line(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            what = f"invalid alias *{event.anchor}: aliases are not supported"
            remedy = "put settings that models share into defaults, or into a rule such as 'qwen*'"
            raise self._refused(event, place, f"{what}; {remedy}")
        if event.tag is not None and event.tag != "!":
            what = f"invalid tag {shown(event.tag)}: tags are not supported; remove it"
            raise self._refused(event, place, what)
        self._count += 1
        if self._count > _MAX_NODES:
            raise self._refused(event, (), f"more than {_MAX_NODES} values; a config has at most that many")
        if isinstance(event, yaml.ScalarEvent):
            return Scalar(line, event.value, plain=event.style in (None, ""))
        if len(place) >= _MAX_DEPTH:
            raise self._refused(event, (), _TOO_DEEP)
        if isinstance(event, yaml.SequenceStartEvent):
            items = Items(line)
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                items.items.append(self._node(item, (*place, len(items.items))))
            return items
        return self._table(line, place)

    def _table(self, line: int, place: Place) -> Table:
        table = Table(line)
        lines: dict[str, int] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                raise self._refused(event, place, "invalid key: expected text, found a list or a mapping")
            key = self._node(event, place)
            assert isinstance(key, Scalar)  # aliases are refused
            if len(key.text) > _MAX_KEY:
                what = f"invalid key of {len(key.text)} characters; a key has at most {_MAX_KEY}"
                raise self._refused(event, place, what)
            at = (*place, key.text)
            value = self._node(next(self._events), at)
            if key.text in lines:
                what = f"duplicate key, first in line {lines[key.text]}; keep one of them"
                self.issues.append(Issue(key.line, place_text(at), what))
            else:
                lines[key.text] = key.line
                table.entries.append(Entry(key.text, key.line, value))
        return table

    def _refused(self, event: yaml.Event, place: Place, what: str) -> ConfigIssues:
        return _refused(self._file, _line(event.start_mark), what, place)
