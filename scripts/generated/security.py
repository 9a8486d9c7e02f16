"""The generated parts of docs/security.md: what each right reaches, and the tests of each promise.

``tests/security/reach.py`` has the rows of the table, which a test tries. The list comes from the ``check``
markers of the tests, which are only parsed.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from scripts.pages import ROOT
from tests.security.reach import REACH, RIGHTS

PROMISES = {
    "X1": "who can connect",
    "X2": "the Host header",
    "X3": "web pages",
    "X4": "keys",
    "X5": "access to llama-server",
    "X6": "llama-server's environment",
    "X7": "closed paths, and URLs in bodies",
    "X8": "limits",
    "X9": "framing",
    "X10": "the models folder",
    "X11": "downloads",
    "X12": "the header of a model file",
    "X13": "what is written down",
    "X14": "the systemd unit",
    "X15": "a config over the API",
    "X16": "answers in the browser",
    "X17": "rights of tokens and sessions",
}


class Check(NamedTuple):
    """A marker of a test. Its second argument, the outcome, is for readers of the test."""

    promise: str
    test: str
    file: str


def checks_in(path: Path) -> list[Check]:
    """Return the checks of one test file, in their order."""
    file = path.relative_to(ROOT).as_posix()
    return [
        Check(ast.literal_eval(call.args[0]), node.name, file)
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.check"
    ]


def all_checks() -> list[Check]:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [check for path in paths if "mark.check(" in path.read_text("utf-8") for check in checks_in(path)]


def reach_table() -> str:
    """List what each right reaches, as Markdown."""
    lines = [f"| | {' | '.join(RIGHTS)} |\n|---|{'---|' * len(RIGHTS)}\n"]
    for thing in REACH:
        cells = ("yes" if right in thing.rights else "–" for right in RIGHTS)
        lines.append(f"| {thing.what} | {' | '.join(cells)} |\n")
    return "".join(lines)


def checks_list() -> str:
    """List the tests of each promise, as Markdown. Raises ValueError for an unknown promise."""
    checks = all_checks()
    order = list(PROMISES)
    lines: list[str] = []
    for promise in sorted({check.promise for check in checks}, key=order.index):
        lines.append(f"\n### {promise}: {PROMISES[promise]}\n\n")
        lines += (f"- [{check.test}](../{check.file})\n" for check in checks if check.promise == promise)
    return "".join(lines)
