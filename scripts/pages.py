"""Replace the text between two marks in a page of the docs, and format Markdown tables."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

Marks = tuple[str, str]


def marks_of(name: str, command: str, *, python: bool = False) -> Marks:
    """The lines around the part ``name`` of a page, or of a Python class: the first names the command."""
    if python:
        return f"    # {name}: {command}", f"    # end of {name}"
    return f"<!-- {name}: {command} -->", f"<!-- end of {name} -->"


def renewed(page: str, marks: Marks, text: str) -> str:
    """``page`` with ``text`` on separate lines between the marks. Raises ValueError if it has no marks."""
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f"the marks {' and '.join(marks)} are missing")
    return f"{before}{begin}\n{text}\n{end}{after}"


def keep_current(path: Path, marks: Marks | None, text: str, check: bool, command: str) -> int:
    """Update a page or, with ``check``, only compare it. Without marks, the text is the whole file.

    Returns the exit code: 1 stale, 2 no marks. ``command`` is what updates the page.
    """
    page = path.read_text("utf-8") if path.exists() else ""
    try:
        new = text if marks is None else renewed(page, marks, text)
    except ValueError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    if new == page:
        return 0
    if check:
        print(f"{path} is stale: run {command}", file=sys.stderr)
        return 1
    path.write_text(new, "utf-8")
    return 0


def aligned_table(cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are also aligned in its source; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def deciles_table(rows: Mapping[str, Sequence[float]], digits: int = 0) -> str:
    """A Markdown table of each row's median and its first and last decile."""
    cells = [["", "median", "10 %", "90 %"]]
    for name, values in rows.items():
        deciles = statistics.quantiles(values, n=10)
        figures = (statistics.median(values), deciles[0], deciles[-1])
        cells.append([name, *(f"{figure:.{digits}f}".rjust(6) for figure in figures)])
    return aligned_table(cells)


def side_by_side(columns: Mapping[str, Mapping[str, str]]) -> str:
    """A Markdown table with a column for each run, and a row for each figure that a run has."""
    rows = dict.fromkeys(row for column in columns.values() for row in column)
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    cells = ((row, " | ".join(column.get(row, "–") for column in columns.values())) for row in rows)
    return "\n".join([*lines, *(f"| {row} | {values} |" for row, values in cells)])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, with the lowest and the highest value."""
    middle, least, most = (
        f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return middle if least == most else f"{middle} ({least}–{most})"
