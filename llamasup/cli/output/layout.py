"""Lays text out in columns, and breaks it between words at the width of a terminal.

Lines to a pipe or a file are not broken, so that they can be searched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llamasup.core.system.text import display_width, printable

# The text of a narrower column begins on the next line instead.
_MIN_COLUMNS = 24
_INDENT = 4
_MIN_NAME = 16  # a shorter one is ambiguous


def stdout_columns() -> int | None:
    """Return the width of the terminal on standard output, and None without a terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


def cut_to(columns: int, text: str) -> str:
    """Cut ``text`` to ``columns`` columns: ``…`` replaces the middle of a longer one."""
    if display_width(text) <= columns:
        return text
    columns = max(0, columns - 1)
    return f"{_head(text, columns - columns // 2)}…{_head(text[::-1], columns // 2)[::-1]}"


def _head(text: str, columns: int) -> str:
    """The first characters of ``text`` that fit into ``columns``."""
    end = 0
    while end < len(text) and (columns := columns - display_width(text[end])) >= 0:
        end += 1
    return text[:end]


def table(rows: Sequence[Sequence[str]], *, indent: str = "  ", columns: int | None = None) -> str:
    """Columns aligned on the widest cell; the last one is broken to fit into ``columns``, if given."""
    widths = [max(map(display_width, cells)) for cells in zip(*(row[:-1] for row in rows), strict=True)]
    return "\n".join(
        hanging(indent + "".join(map(_padded, row, widths)), row[-1], columns=columns) for row in rows
    )


def fitted_table(rows: Sequence[Sequence[str]], optional: Sequence[str], columns: int | None) -> str:
    """A table with headings, whose first column is a name.

    One wider than ``columns`` gets shorter names, then loses the ``optional`` columns, in their order.
    """
    shown = table(rows, indent="")
    if columns is None or _width(shown) <= columns:
        return shown
    cut = [[cut_to(max(_MIN_NAME, columns // 3), name), *rest] for name, *rest in rows]
    for heading in ("", *optional):
        if heading:
            left_out = cut[0].index(heading)
            cut = [[*row[:left_out], *row[left_out + 1 :]] for row in cut]
        shown = table(cut, indent="")
        if _width(shown) <= columns:
            break
    return shown


def with_nodes(rows: Sequence[Sequence[str]], items: Sequence[Mapping[str, Any]]) -> Sequence[Sequence[str]]:
    """Add the column NODE to ``rows``, if one of the ``items`` is on another node.

    The first row has the headings, and each other row shows an item.
    """
    if not any(item.get("node") for item in items):
        return rows
    nodes = ("NODE", *(printable(str(item.get("node") or "-")) for item in items))
    return [(row[0], node, *row[1:]) for row, node in zip(rows, nodes, strict=True)]


def _width(text: str) -> int:
    return max(map(display_width, text.splitlines()))


def hanging(start: str, text: str, *, columns: int | None = None) -> str:
    """Join ``start`` and ``text``: further lines of ``text`` begin below its first one."""
    if columns is None or display_width(start + text) <= columns:
        return (start + text).rstrip()
    width = columns - display_width(start)
    if width >= _MIN_COLUMNS:
        first, *others = _broken(text, width)
        return f"\n{' ' * display_width(start)}".join([start + first, *others]).rstrip()
    margin = " " * (len(start) - len(start.lstrip()) + _INDENT)
    return "\n".join([start.rstrip(), *(margin + line for line in _broken(text, columns - len(margin)))])


def _broken(text: str, columns: int) -> Iterator[str]:
    """The lines of ``text``. A word longer than a line stays whole, so that a path can be copied."""
    line = ""
    for word in text.split(" "):
        if line and display_width(line) + 1 + display_width(word) > columns:
            yield line
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - display_width(cell) + 2)
