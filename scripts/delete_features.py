"""Deletes each feature in a copy of the tree, and shows whether the rest works without it.

scripts/delete_features.py                       all features, a minute each
scripts/delete_features.py --quick batch wrap    these: imports, help, import contracts and quick tests

A feature is its folder, its tests, its entry in ``llamasup/features/__init__.py`` and the modules that this
entry names. The tests that import one of these modules are deleted with it. Without ``--quick``, the rest is
linted, and serves with the llama-server that ``LLAMASUP_TEST_SERVER`` names.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llamasup.features import FEATURES, Feature  # noqa: E402

HELD = ("peers",)
"""The feature that cannot be deleted yet: docs/design.md says why."""

_COPIED = ("llamasup", "tests", "scripts", "configs", "pyproject.toml", "README.md")
# The tests of what reads the list of features, and of what features attach to.
_TESTS = (
    *("api", "cli/test_app.py", "cli/test_hints.py", "cli/test_option_groups.py", "cli/test_serve.py"),
    *("core/config", "core/control/test_app.py", "core/control/test_routes.py"),
    *("core/settings/test_outside.py", "service/test_config_editing.py", "service/test_config_source.py"),
)
# The docs describe all features, and are not in the copy; random texts take long.
_IGNORED = (
    *(f"--ignore=tests/core/config/test_{name}.py" for name in ("page", "any_text")),
    "--deselect=tests/api/test_package.py::test_list_of_errors_in_the_documentation_is_complete",
)
_PYTEST = ("-q", "-n", "2", "-p", "no:cacheprovider", *_IGNORED)
_ERROR = re.compile(r"error|BROKEN|^FAILED| imports |[A-Z]\d{3}\b")
_TIMEOUT_S = 300.0
_COMMANDS = """
from llamasup.cli.app import COMMANDS, app
from typer.main import get_command
root = get_command(app)
for section in COMMANDS.values():
    for entry in section:
        root.get_command(None, entry.name)
"""


class Broken(Exception):
    """What does not work without the feature."""


def delete(feature: Feature, tree: Path) -> tuple[int, list[str]]:
    """Delete the feature from the tree. Returns its lines of code, and the files that still import it."""
    outside = {*feature.modules, feature.command_module} - {""}
    modules = (f"llamasup.features.{feature.name}", *sorted(outside))
    lines = 0
    for module in modules:
        path = tree / module.replace(".", "/")
        files = list(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        lines += sum(bool(line.strip()) for file in files for line in file.read_text("utf-8").splitlines())
        shutil.rmtree(path) if path.is_dir() else files[0].unlink()
    shutil.rmtree(tree / "tests/features" / feature.name, ignore_errors=True)
    imported = (
        f"from {folder} import [^\\n]*{name}" for folder, _, name in (m.rpartition(".") for m in modules)
    )
    known = "|".join((*map(re.escape, modules), *imported, rf"tests\.features\.{feature.name}"))
    names = re.compile(rf"\b({known})\b")
    imports = re.compile(rf"^ *(?:from|import) .*{names.pattern}", re.MULTILINE)
    for test in (tree / "tests").rglob("*.py"):
        if imports.search(test.read_text("utf-8")):
            test.unlink()
    contracts = tree / "pyproject.toml"
    kept = [line for line in contracts.read_text("utf-8").splitlines(True) if not names.search(line)]
    contracts.write_text("".join(kept), "utf-8")
    _delete_entry(feature.name, tree / "llamasup/features/__init__.py")
    rest = sorted((tree / "llamasup").rglob("*.py"))
    holding = [file for file in rest if names.search(file.read_text("utf-8"))]
    return lines, [str(file.relative_to(tree / "llamasup")) for file in holding]


def _delete_entry(name: str, path: Path) -> None:
    lines = path.read_text("utf-8").splitlines(True)
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.Call) and ast.unparse(node).startswith(f"Feature({name!r}"):
            del lines[node.lineno - 1 : node.end_lineno]
    path.write_text("".join(lines), "utf-8")


def check(feature: str, tree: Path, *, quick: bool) -> None:
    """Raises Broken with the first error."""
    programs = Path(sys.executable).parent
    environ = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "HOME": str(tree),
        "LLAMASUP_TEST_WITHOUT": feature,
    }

    def run(what: str, *command: str | Path) -> None:
        done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            output = (done.stdout + done.stderr).strip().splitlines() or [""]
            found = (line for line in output if _ERROR.search(line))
            raise Broken(f"{what}: {next(found, output[-1])}")

    run("--help", sys.executable, "-m", "llamasup", "--help")
    run("commands", sys.executable, "-c", _COMMANDS)
    run("lint-imports", programs / "lint-imports", "--no-cache")
    tests = (f"tests/{room}" for room in _TESTS if (tree / "tests" / room).exists())
    run("tests", sys.executable, "-m", "pytest", *_PYTEST, *tests)
    if quick:
        return
    run("ruff", programs / "ruff", "check", "--no-cache", "llamasup")
    run("mypy", programs / "mypy", "--cache-dir", tree.parent / "mypy", "-p", "llamasup")
    (tree / "config.yaml").write_text("models: {demo: {path: demo}}\n", "utf-8")
    _serve(tree, environ, "run", "demo")
    _serve(tree, environ, "serve", "--config", "config.yaml")


def _serve(tree: Path, environ: dict[str, str], *arguments: str) -> None:
    """Let a real llama-server answer a request, and stop."""
    more = ("--runtime", environ["LLAMASUP_TEST_SERVER"], "--port", "0", "--events", "jsonl")
    command = [sys.executable, "-m", "llamasup", *arguments, *more]
    with subprocess.Popen(
        command, cwd=tree, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        events = map(json.loads, process.stdout)
        ready = next((event for event in events if event["event"] == "ready"), None)
        status = 0
        if ready is not None:
            body = {"model": "demo", "prompt": "Once", "max_tokens": 4}
            status = httpx.post(f"{ready['url']}/v1/completions", json=body, timeout=_TIMEOUT_S).status_code
            process.terminate()
        process.stdout.read()
    if (process.returncode, status) != (0, 200):
        raise Broken(f"{arguments[0]}: exit code {process.returncode}, status {status}")


def results(names: Collection[str], *, quick: bool) -> Iterator[tuple[str, int, str]]:
    """Name, lines of code and first error of each feature. Without an error, the rest works."""
    with tempfile.TemporaryDirectory(prefix="without-") as folder:
        for feature in (feature for feature in FEATURES if feature.name in names):
            tree = Path(folder) / feature.name
            for name in _COPIED:
                source, copy = ROOT / name, tree / name
                copy.parent.mkdir(exist_ok=True)
                shutil.copytree(source, copy) if source.is_dir() else shutil.copy2(source, copy)
            needing = [other for other in FEATURES if feature.name in other.needs]
            for other in needing:
                delete(other, tree)
            lines, holding = delete(feature, tree)
            error = f"imported by {', '.join(holding)}" if holding else ""
            try:
                if not holding:
                    check(feature.name, tree, quick=quick)
            except Broken as broken:
                error = str(broken)
            yield feature.name, lines, error


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if word != "--quick"] or [feature.name for feature in FEATURES]
    print("| Feature | Lines | Without it |\n|---|---|---|")
    for name, lines, error in results(names, quick="--quick" in sys.argv):
        print(f"| {name} | {lines:,} | {error or 'works'} |", flush=True)
