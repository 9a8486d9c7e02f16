"""What scripts write into pages of docs/: between two marks, and nothing else of the page."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["keep_current", "renewed", "write_between"]

Marks = tuple[str, str]


def renewed(page: str, marks: Marks, text: str) -> str:
    """``page`` with ``text`` on lines of its own between the marks. Raises ValueError where it has none."""
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f"there are no {' and '.join(marks)}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def write_between(path: Path, marks: Marks, text: str) -> None:
    """Ends the script where the page has no place for it."""
    try:
        path.write_text(renewed(path.read_text("utf-8"), marks, text), "utf-8")
    except ValueError as error:
        raise SystemExit(f"{path}: {error}") from error


def keep_current(path: Path, marks: Marks, text: str, *, check: bool) -> int:
    """Write what has changed or, to ``check``, only say so. Returns the exit code: 1 stale, 2 no place."""
    page = path.read_text("utf-8")
    try:
        new = renewed(page, marks, text)
    except ValueError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    if new == page:
        return 0
    if check:
        print(f"{path} is stale: run python {sys.argv[0]}", file=sys.stderr)
        return 1
    path.write_text(new, "utf-8")
    return 0
