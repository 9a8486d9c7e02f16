"""YAML text → a tree of nodes that know their lines, within bounds. Nothing is interpreted: ``080`` is text.

From the parser's events, not from its trees: depth and size are bounded while they grow, and what is not
wanted is refused where it stands. Aliases (``*name``) are refused altogether: a few lines of them can mean
billions of values, and what models share has its place in ``defaults`` and in rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import yaml

from llamasup.config.issues import ConfigIssues, Issue, Place, place_text, shown

__all__ = ["MAX_BYTES", "Entry", "Items", "Node", "Scalar", "Table", "parse"]

# 1,000 models with every key that a model can have take 600 kB, and ten times this is no config any more.
MAX_BYTES = 1 << 20
_MAX_NODES = 100_000  # the same 1,000 models have 50,000
_MAX_KEY = 512  # a model's name has 256 letters at most
_MAX_DEPTH = 16  # the deepest value that means anything is at 4

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Scalar:
    """``plain``: without quotes, so that it may mean a number, a truth value or nothing."""

    line: int
    text: str
    plain: bool

    @property
    def is_nothing(self) -> bool:
        return self.plain and self.text in ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True, slots=True)
class Items:
    line: int
    items: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    line: int
    node: Node


@dataclass(frozen=True, slots=True)
class Table:
    """No key is in it twice."""

    line: int
    entries: list[Entry] = field(default_factory=list)


Node = Scalar | Items | Table


def parse(content: bytes, file: str, size_bytes: int) -> tuple[Node | None, list[Issue]]:
    """The root of the one document (None: there is none), and the keys that are given twice.

    ``size_bytes``: of all of it; of more than ``MAX_BYTES`` nothing is looked at. Raises ConfigIssues for
    what is no YAML, or more than is taken.
    """
    if size_bytes > MAX_BYTES:
        raise _refused(file, 0, f"it has {size_bytes} bytes, and a config may have {MAX_BYTES}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise _refused(file, line, f"the byte 0x{byte:02x} is not UTF-8; save the file as UTF-8") from None
    builder = _Builder(file)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = "; ".join(filter(None, (error.problem, error.context)))
        raise _refused(
            file, mark.line + 1 if mark else 0, f"this is no YAML: {what}{_tab(text, mark)}"
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _refused(file, line, f"this is no YAML: {error.reason}") from None
    except (ValueError, OverflowError) as error:  # \U00110000 in PyYAML's own parser
        raise _refused(file, 0, f"this is no YAML: {error}") from None
    return builder.root, builder.issues


def _refused(file: str, line: int, what: str) -> ConfigIssues:
    return ConfigIssues(file, (Issue(line, "", what),))


def _tab(text: str, mark: yaml.Mark | None) -> str:
    if mark is not None:
        line = text.split("\n")[mark.line : mark.line + 1]
        if line and "\t" in line[0][: len(line[0]) - len(line[0].lstrip())]:
            return " (the line begins with a tab: indent with spaces)"
    return ""


@dataclass(slots=True)
class _Open:
    """A list or a mapping whose end has not come yet; ``key`` waits for its value."""

    node: Items | Table
    place: Place
    key: tuple[str, int] | None = None
    lines: dict[str, int] = field(default_factory=dict)


class _Builder:
    def __init__(self, file: str) -> None:
        self._file = file
        self.root: Node | None = None
        self.issues: list[Issue] = []
        self._open: list[_Open] = []
        self._count = 0
        self._documents = 0

    def take(self, event: yaml.Event) -> None:
        mark = event.start_mark
        line = mark.line + 1 if mark is not None else 0
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise _refused(self._file, line, "a second document begins here; a config is one")
            case yaml.AliasEvent():
                raise _refused(
                    self._file,
                    line,
                    f"{self._where()}the alias *{event.anchor} stands for what is said elsewhere, which a "
                    "config cannot; what models share belongs into defaults, or into a rule such as 'qwen*'",
                )
            case yaml.ScalarEvent():
                self._refuse_tag(event, line)
                self._add(Scalar(line, event.value, plain=event.style in (None, "")), line)
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                self._refuse_tag(event, line)
                node = Items(line) if isinstance(event, yaml.SequenceStartEvent) else Table(line)
                place = self._place()
                self._add(node, line)
                self._open.append(_Open(node, place))
                if len(self._open) > _MAX_DEPTH:
                    raise _refused(self._file, line, f"more than {_MAX_DEPTH} levels in one another")
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                self._open.pop()
            case _:
                pass

    def _add(self, node: Node, line: int) -> None:
        self._count += 1
        if self._count > _MAX_NODES:
            raise _refused(
                self._file, line, f"more than {_MAX_NODES} values, and a config may have that many"
            )
        if not self._open:
            self.root = node
            return
        top = self._open[-1]
        if isinstance(top.node, Items):
            top.node.items.append(node)
        elif top.key is None:
            if not isinstance(node, Scalar):
                raise _refused(
                    self._file, line, f"{self._where()}a key has to be text, not a list or a mapping"
                )
            if len(node.text) > _MAX_KEY:
                what = f"{self._where()}a key has {len(node.text)} letters, and at most {_MAX_KEY}"
                raise _refused(self._file, line, what)
            top.key = (node.text, line)
        else:
            (key, key_line), top.key = top.key, None
            first = top.lines.get(key)
            if first is None:
                top.lines[key] = key_line
                top.node.entries.append(Entry(key, key_line, node))
            else:
                twice = f"is given twice, first in line {first}; keep one of them"
                self.issues.append(Issue(key_line, place_text((*top.place, key)), twice))

    def _refuse_tag(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, line: int) -> None:
        if event.tag is not None and event.tag != "!":
            raise _refused(self._file, line, f"{self._where()}the tag {shown(event.tag)}; a config has none")

    def _place(self) -> Place:
        """Of the value that comes next."""
        if not self._open:
            return ()
        top = self._open[-1]
        if isinstance(top.node, Items):
            return (*top.place, len(top.node.items))
        return (*top.place, top.key[0]) if top.key else top.place

    def _where(self) -> str:
        place = place_text(self._place())
        return f"{place}: " if place else ""
