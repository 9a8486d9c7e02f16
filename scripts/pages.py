"""Lets scripts replace the text between two marks in a page of docs/."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["keep_current", "main_of", "renewed", "write_between"]

Marks = tuple[str, str]


def renewed(page: str, marks: Marks, text: str) -> str:
    """``page`` with ``text`` on separate lines between the marks. Raises ValueError if it has no marks."""
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f"there are no {' and '.join(marks)}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def write_between(path: Path, marks: Marks, text: str) -> None:
    """Replace the text. Ends the script if the page lacks the marks."""
    try:
        path.write_text(renewed(path.read_text("utf-8"), marks, text), "utf-8")
    except ValueError as error:
        raise SystemExit(f"{path}: {error}") from error


def keep_current(path: Path, marks: Marks, text: str, *, check: bool) -> int:
    """Update the page or, with ``check``, only compare it. Returns the exit code: 1 stale, 2 no marks."""
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


def main_of(description: str | None, doc: Path, marks: Marks, text: Callable[[], str]) -> int:
    """The command of a script that keeps ``text`` current in a page. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--doc", type=Path, default=doc)
    options = parser.parse_args()
    return keep_current(options.doc, marks, text(), check=options.check)
