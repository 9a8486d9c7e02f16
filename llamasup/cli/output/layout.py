"""Text in columns and within the width of a terminal, broken between words.

In a pipe or a file lines are not broken, so that they can be searched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from llamasup.system.text import display_width

__all__ = ["cut_to", "hanging", "stdout_columns", "table"]

# The text of a narrower column begins on the next line instead.
_MIN_COLUMNS = 24
_STEP_IN = 4


def stdout_columns() -> int | None:
    """The width of the terminal on standard output; None without one."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


def cut_to(columns: int, text: str) -> str:
    """``text`` in at most ``columns`` columns: ``…`` replaces the middle of a longer one."""
    if display_width(text) <= columns:
        return text
    room = max(0, columns - 1)
    return f"{_head(text, room - room // 2)}…{_head(text[::-1], room // 2)[::-1]}"


def _head(text: str, columns: int) -> str:
    """The first letters of ``text`` that fit into ``columns``."""
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


def hanging(start: str, text: str, *, columns: int | None = None) -> str:
    """``start`` and ``text``, whose further lines begin below its first one."""
    if columns is None or display_width(start + text) <= columns:
        return (start + text).rstrip()
    room = columns - display_width(start)
    if room >= _MIN_COLUMNS:
        return f"\n{' ' * display_width(start)}".join(_lines(text, room, first=start)).rstrip()
    margin = " " * (len(start) - len(start.lstrip()) + _STEP_IN)
    return "\n".join([start.rstrip(), *(margin + line for line in _lines(text, columns - len(margin)))])


def _lines(text: str, room: int, first: str = "") -> list[str]:
    lines = list(_broken(text, room))
    return [first + lines[0], *lines[1:]]


def _broken(text: str, room: int) -> Iterator[str]:
    """A word that is longer than a line stays whole: a path is to be copied."""
    line = ""
    for word in text.split(" "):
        if line and display_width(line) + 1 + display_width(word) > room:
            yield line
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - display_width(cell) + 2)
