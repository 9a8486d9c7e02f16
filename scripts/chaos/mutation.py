"""One-line faults of a Python source, and a random choice of them. Reads no file and runs nothing.

A fault changes behaviour: a swapped comparison, an off-by-one, a changed constant, a negated condition,
``and`` for ``or``, or a dropped call. Docstrings, annotations, imports, messages, logging, assertions,
``__repr__`` and code for other systems are left alone: no test here can notice a fault in them, or should.

``mutants.py`` applies the faults, and runs the tests.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["KINDS", "Fault", "applied", "chosen", "faults_of"]

KINDS = ("comparison", "off-by-one", "constant", "condition", "boolean", "dropped call")

_SWAPPED = {
    "==": "!=",
    "!=": "==",
    "<": ">",
    "<=": ">=",
    ">": "<",
    ">=": "<=",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
}
_BOUNDARY = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}

_LOGGERS = frozenset({"_log", "logging", "warnings"})
_TYPES = frozenset({"Literal", "Annotated", "Callable", "Final", "ClassVar", "TypeVar", "cast"})
_TEXTS_OF_PROGRAMS = frozenset({"__repr__", "__str__", "__rich_repr__"})
_OTHER_SYSTEMS = re.compile(r"\b(TYPE_CHECKING|sys\.platform|platform|__name__)\b")
_WORD = re.compile(r"""b?["'][\w./:-]+["']""")  # a key, not a message

_Spot = tuple[int, int, int]
"""Line, first column and end of a text within a line, in bytes."""


@dataclass(frozen=True)
class Fault:
    """One line of ``file`` that reads ``after`` in place of ``before``."""

    file: str
    line: int
    column: int
    kind: str
    before: str
    after: str

    @property
    def name(self) -> str:
        """Names the fault for as long as the file is unchanged."""
        return f"{self.file}:{self.line}:{self.column}:{self.kind.replace(' ', '-')}:{self._digest}"

    @property
    def _digest(self) -> str:
        """Tells faults at the same place apart, such as ``<`` → ``>`` and ``<`` → ``<=``."""
        return f"{sum(self.after.encode()) % 256:02x}"


def applied(fault: Fault, source: str) -> str:
    """``source`` with the fault. Raises ValueError if the line has changed since."""
    lines = source.splitlines(keepends=True)
    line = lines[fault.line - 1]
    if line.strip() != fault.before.strip():
        raise ValueError(f"{fault.name}: the line is {line!r}")
    lines[fault.line - 1] = fault.after + line[len(line.rstrip("\r\n")) :]
    return "".join(lines)


def faults_of(file: str, source: str) -> list[Fault]:
    """All faults that this module knows for the source, in the order of its lines."""
    lines = [line.encode() for line in source.splitlines()]
    found = []
    for kind, (number, begin, end), text in _changes(ast.parse(source), lines):
        line = lines[number - 1]
        after = (line[:begin] + text.encode() + line[end:]).decode()
        found.append(Fault(file, number, begin, kind, line.decode(), after))
    return sorted(found, key=lambda fault: (fault.line, fault.column, fault.kind, fault.after))


def chosen(faults: Sequence[Fault], count: int, *, seed: str, without: Collection[str] = ()) -> list[Fault]:
    """Choose as many faults of each kind, each in another file, drawn at random.

    ``without``: the names of faults that are not chosen. The next fault that is drawn takes the place. The
    other faults stay, unless one of them is in the same file.
    """
    kinds = [kind for kind in KINDS if any(fault.kind == kind for fault in faults)]
    picked: dict[str, Fault] = {}
    for number in range(count):
        kind = kinds[number % len(kinds)]
        candidates = [fault for fault in faults if fault.kind == kind]
        random.Random(f"{seed} {number}").shuffle(candidates)
        free = (fault for fault in candidates if fault.file not in picked and fault.name not in without)
        fault = next(free, None)
        if fault is not None:
            picked[fault.file] = fault
    return list(picked.values())


def _changes(tree: ast.Module, lines: Sequence[bytes]) -> Iterator[tuple[str, _Spot, str]]:
    """Kind, place and new text of each fault."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in _considered(tree):
        match node:
            case ast.Compare(left, [_], [right]):
                yield from _comparisons(left, right, lines)
            case ast.BoolOp(_, [first, second, *_]):
                yield from _between(first, second, {"and": "or", "or": "and"}, "boolean", lines)
            case ast.If(test) | ast.While(test) | ast.IfExp(test):
                yield from _negated(test, lines)
            case ast.Expr(ast.Call() | ast.Await(ast.Call())) if node.lineno == node.end_lineno:
                yield "dropped call", _spot(node), "pass"
            case ast.Constant():
                yield from _constants(node, parents, lines)


def _considered(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes in which a fault changes behaviour."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if name == "keywords" and isinstance(node, ast.ClassDef):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_alone(child):
                yield from _considered(child)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Raise() | ast.JoinedStr():
            return True
        case ast.Expr(ast.Constant()):  # a docstring
            return True
        case ast.FunctionDef(name):
            return name in _TEXTS_OF_PROGRAMS
        case ast.Assign([ast.Name(name)]):
            return name in ("__all__", "__slots__")
        case ast.If(test) | ast.IfExp(test):
            return bool(_OTHER_SYSTEMS.search(ast.unparse(test)))
        case ast.Call(function):
            return ast.unparse(function).split(".")[0] in _LOGGERS | _TYPES
        case ast.Expr(ast.Call(function)):
            return ast.unparse(function).split(".")[0] in _LOGGERS
        case ast.Subscript(ast.Name(name)):
            return name in _TYPES
    return False


def _comparisons(left: ast.expr, right: ast.expr, lines: Sequence[bytes]) -> Iterator[tuple[str, _Spot, str]]:
    yield from _between(left, right, _SWAPPED, "comparison", lines)
    yield from _between(left, right, _BOUNDARY, "off-by-one", lines)


def _between(
    left: ast.expr, right: ast.expr, changes: Mapping[str, str], kind: str, lines: Sequence[bytes]
) -> Iterator[tuple[str, _Spot, str]]:
    """Change the operator between two operands, if all is in one line."""
    number, begin, end = left.end_lineno, left.end_col_offset, right.col_offset
    if number is None or begin is None or number != right.lineno:
        return
    gap = lines[number - 1][begin:end].decode()
    operator = gap.strip(" ()")
    if operator in changes:
        yield kind, (number, begin, end), gap.replace(operator, changes[operator], 1)


def _negated(test: ast.expr, lines: Sequence[bytes]) -> Iterator[tuple[str, _Spot, str]]:
    if test.lineno != test.end_lineno or isinstance(test, ast.Constant):
        return
    number, begin, end = _spot(test)
    text = lines[number - 1][begin:end].decode()
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        # The operand, and with it parentheses around it.
        yield "condition", (number, begin, end), text.removeprefix("not").lstrip()
    else:
        yield "condition", (number, begin, end), f"not ({text})"


def _constants(
    node: ast.Constant, parents: Mapping[ast.AST, ast.AST], lines: Sequence[bytes]
) -> Iterator[tuple[str, _Spot, str]]:
    if node.lineno != node.end_lineno:
        return
    number, begin, end = _spot(node)
    text = lines[number - 1][begin:end].decode()
    match node.value:
        case bool(value):
            yield "constant", _spot(node), str(not value)
        case int(value):
            kind = "off-by-one" if _is_position(node, parents) else "constant"
            yield kind, _spot(node), str(value + 1)
        case float(value):
            yield "constant", _spot(node), str(value * 2 or 1.0)
        case str() | bytes() if _WORD.fullmatch(text) and _is_key(parents[node]):
            yield "constant", _spot(node), f"{text[:-1]}_{text[-1]}"


def _is_position(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether a number is an index, a bound of a slice or a range, or the 1 of ``x + 1``."""
    parent = parents[node]
    match parent:
        case ast.UnaryOp():
            return _is_position(parent, parents)
        case ast.Slice() | ast.Subscript() | ast.Call(ast.Name("range")):
            return True
        case ast.BinOp(_, ast.Add() | ast.Sub()):
            return isinstance(node, ast.Constant) and node.value == 1
    return False


def _is_key(parent: ast.AST) -> bool:
    """Whether a string is compared or looked up: other strings may be part of a message."""
    match parent:
        case ast.Compare() | ast.Subscript():
            return True
        case ast.Call(ast.Attribute(_, "get")):
            return True
    return False


def _spot(node: ast.expr | ast.stmt) -> _Spot:
    assert node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_col_offset
