"""The tables of docs/security.md: what each right reaches, and check → test → outcome.

``tests/security/reach.py`` has the rows of the first table, which a test tries. The second table comes from
the ``check`` markers of the tests, which are only parsed.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from scripts.pages import ROOT
from tests.security.reach import REACH, RIGHTS

PROMISES = {
    "X1": "who can connect",
    "X2": "the Host header",
    "X3": "web pages",
    "X4": "keys",
    "X5": "access to the child",
    "X6": "the child's environment",
    "X7": "closed paths, and URLs in bodies",
    "X8": "limits",
    "X9": "framing",
    "X10": "the models folder",
    "X11": "downloads",
    "X13": "what is written down",
}


@dataclass(frozen=True, slots=True)
class Check:
    """``cases``: the names of the parametrized cases, if the test has a table of them."""

    promise: str
    outcome: str
    test: str
    file: str
    cases: tuple[str, ...]


def checks_in(path: Path) -> list[Check]:
    """The checks of one test file, in their order."""
    tree = ast.parse(path.read_text("utf-8"))
    tables = {
        target.id: tuple(
            key.value
            for key in node.value.keys
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        )
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: list[Check] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            calls = [decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
            cases = next((tables.get(name, ()) for call in calls if (name := _ids(call))), ())
            for call in calls:
                if ast.unparse(call.func) == "pytest.mark.check":
                    promise, outcome = (ast.literal_eval(word) for word in call.args)
                    file = path.relative_to(ROOT).as_posix()
                    found.append(Check(promise, outcome, node.name, file, cases))
    return found


def _ids(call: ast.Call) -> str:
    """The table that names a parametrization's cases."""
    return next(
        (
            keyword.value.id
            for keyword in call.keywords
            if keyword.arg == "ids" and isinstance(keyword.value, ast.Name)
        ),
        "",
    )


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


def checks_table() -> str:
    """A section for each promise, as Markdown. Raises ValueError for an unknown promise."""
    checks = all_checks()
    order = list(PROMISES)
    lines: list[str] = []
    for promise in sorted({check.promise for check in checks}, key=order.index):
        lines += [f"\n### {promise}: {PROMISES[promise]}\n\n", "| Tried | Outcome | Test |\n|---|---|---|\n"]
        for check in checks:
            if check.promise == promise:
                tried = check.test.removeprefix("test_").replace("_", " ")
                if check.cases:
                    tried += ": " + "; ".join(check.cases)
                test = f"[{Path(check.file).stem}](../{check.file})"
                lines.append(f"| {_cell(tried)} | {_cell(check.outcome)} | {test} |\n")
    return "".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
