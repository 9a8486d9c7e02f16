#!/usr/bin/env python3
"""Count the code: lines, files, imports of features in the core, and docstrings that cannot be read alone.

    scripts/count.py             print the counts with their bounds
    scripts/count.py --check     exit code 1 if a count is above its bound
    scripts/count.py --list      also name what is counted, except for lines and files
    scripts/count.py --rooms     list the rooms with their files, lines, and the rooms that they import

A line of code is a line that is not blank, a comment, a docstring or an import. A fragment is a docstring
whose first sentence begins like a part of another one.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Lower a bound when its count has fallen. Raise it only with a reason in the message of the commit.
BOUNDS = {
    "lines of code in llamasup": 60_650,
    "lines of code in llamasup/core": 31_700,
    "lines of code in llamasup/features": 18_800,
    "lines of code in tests": 97_200,
    "lines of code in scripts": 8_200,
    "files in llamasup": 522,
    "files in scripts": 91,
    "files above 500 lines": 0,
    "imports of features in the core": 0,
    "packages without a docstring": 0,
    "fragments": 0,
}
MOST_LINES = 500
FRAGMENT = re.compile(r"(Of|Those|That of|What|Which|Also|Without|With|As|How|Who|Where|When|If) |None:")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Source(NamedTuple):
    """One Python file."""

    name: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def code(self) -> int:
        """The lines of code."""
        skipped: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                skipped |= lines_of(node)
            elif isinstance(node, DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
                skipped |= lines_of(node.body[0])
        numbered = enumerate(map(str.strip, self.text.splitlines()), 1)
        return sum(bool(line) and line[0] != "#" and number not in skipped for number, line in numbered)

    def docstrings(self) -> Iterator[tuple[int, str]]:
        """The first line of each docstring, with the line of its definition."""
        for node in ast.walk(self.tree):
            if isinstance(node, DEFINITIONS) and (text := ast.get_docstring(node)):
                yield getattr(node, "lineno", 1), text.partition("\n")[0]


def lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def sources(root: Path, folder: str) -> list[Source]:
    paths = sorted((root / folder).rglob("*.py"))
    texts = ((path, path.read_text("utf-8")) for path in paths)
    return [Source(path.relative_to(root).as_posix(), text, ast.parse(text)) for path, text in texts]


def features_in_core(core: Sequence[Source]) -> list[str]:
    return [
        f"{source.name}:{node.lineno} {node.module}"
        for source in core
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llamasup.features")
    ]


def counts(root: Path) -> dict[str, int | list[str]]:
    """The numbers of lines and files, and the names of all else that is counted."""
    package, tests, scripts = (sources(root, folder) for folder in ("llamasup", "tests", "scripts"))
    core = [source for source in package if source.name.startswith("llamasup/core/")]
    features = [source for source in package if source.name.startswith("llamasup/features/")]
    return {
        "lines of code in llamasup": sum(source.code for source in package),
        "lines of code in llamasup/core": sum(source.code for source in core),
        "lines of code in llamasup/features": sum(source.code for source in features),
        "lines of code in tests": sum(source.code for source in tests),
        "lines of code in scripts": sum(source.code for source in scripts),
        "files in llamasup": len(package),
        "files in scripts": sum(
            path.is_file() and "__pycache__" not in path.parts for path in (root / "scripts").rglob("*")
        ),
        "files above 500 lines": [
            f"{source.name}: {source.lines}" for source in package if source.lines > MOST_LINES
        ],
        "imports of features in the core": features_in_core(core),
        "packages without a docstring": [
            source.name
            for source in package
            if source.name.endswith("/__init__.py") and not ast.get_docstring(source.tree)
        ],
        "fragments": [
            f"{source.name}:{line} {text}"
            for source in package
            for line, text in source.docstrings()
            if FRAGMENT.match(text)
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in ("check", "list", "rooms"):
        parser.add_argument(f"--{option}", action="store_true")
    options = parser.parse_args()
    if options.rooms:
        from scripts.generated.rooms import listing

        print(listing())
        return 0
    is_above = False
    for what, found in counts(ROOT).items():
        count = found if isinstance(found, int) else len(found)
        is_above = is_above or count > BOUNDS[what]
        verdict = "  ABOVE" if count > BOUNDS[what] else ""
        print(f"{what:34} {count:7,}  (at most {BOUNDS[what]:,}){verdict}")
        if options.list and not isinstance(found, int):
            print("".join(f"    {name}\n" for name in found), end="")
    return 1 if options.check and is_above else 0


if __name__ == "__main__":
    sys.exit(main())
