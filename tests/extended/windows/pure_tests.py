"""The quick tests of pure modules, for another Python on another system.

Also a plugin of pytest for that Python: it leaves out tests whose data is of one system.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

_PACKAGES = frozenset({"hypothesis", "jsonschema", "msgspec", "pytest", "yaml"})
_NOT_EVERYWHERE = frozenset({"fcntl", "pty", "resource", "termios"})
_IMPURE = frozenset({"asyncio", "signal", "socket", "subprocess", "threading"})
_TOOLS = ("test_license_texts.py", "test_making_of_bundles.py", "test_build_of_llama_server.py")

_OF_ONE_SYSTEM = {
    "test_source_that_is_no_path_must_be_downloaded[/models/a.gguf-False]": "a path of Linux",
    "test_source_that_is_no_path_is_a_download[/models/tiny.gguf-False]": "a path of Linux",
    "test_redacted_shows_names_without_folders": "a path of Linux",
    "test_time_of_a_choice_grows_linearly_with_the_files": "the clock of a thread is coarse",
}


def pure_tests() -> Sequence[str]:
    """The files that import only pure modules of llamasup, and packages that every system has."""
    return [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.name not in _TOOLS and _is_pure(path) and all(map(_is_pure, _conftests(path)))
    ]


def _conftests(path: Path) -> Iterable[Path]:
    """Without that of all tests."""
    folders = (folder for folder in path.parents if ROOT / "tests" in folder.parents)
    return (file for folder in folders if (file := folder / "conftest.py").exists())


@cache
def _is_pure(path: Path) -> bool:
    contracts = importlib.import_module("scripts.pure_modules")
    effects = contracts.listed_effects(ROOT)
    for module in _imports(path):
        package = module.partition(".")[0]
        if package == "llamasup":
            if contracts.is_listed(module, effects):
                return False
        elif package == "tests":
            file = ROOT / Path(*module.split(".")).with_suffix(".py")
            if file.exists() and not _is_pure(file):
                return False
        elif package in _NOT_EVERYWHERE | _IMPURE or package not in sys.stdlib_module_names | _PACKAGES:
            return False
    return True


def _imports(path: Path) -> Iterable[str]:
    """The modules, and what is imported from them, which may be modules too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Import():
                yield from (name.name for name in node.names)
            case ast.ImportFrom(module=str(module)):
                yield module
                yield from (f"{module}.{name.name}" for name in node.names)


# --- in the Windows Python


def pytest_configure() -> None:
    if sys.platform == "win32":
        winapi = importlib.import_module("_winapi")
        if hasattr(winapi, "CopyFile2"):
            del winapi.CopyFile2  # Wine 8 ends a process that calls it; shutil has another way


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if {item.name, item.name.partition("[")[0]} & _OF_ONE_SYSTEM.keys()]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
