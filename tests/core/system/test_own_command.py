"""How llamasup starts a part of itself: with Python, as the bundle, or not at all."""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from llamasup.core.system.own_command import (
    BUNDLE,
    MODULES,
    PART_ARGUMENT,
    Part,
    own_command,
    python_executable,
)

PARTS: tuple[Part, ...] = get_args(Part)
parts = pytest.mark.parametrize("part", PARTS)


@pytest.fixture
def executable(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "executable", "/app/llamasup")
    return "/app/llamasup"


@pytest.mark.parametrize("part", ["llamasup", "embedded", "sweep"])
def test_python_runs_a_module_without_the_current_folder_on_its_path(part: Part, executable: str) -> None:
    module = {"llamasup": "llamasup", "embedded": "llamasup.embedded"}.get(part, MODULES[part])
    assert own_command(part) == (executable, "-P", "-m", module)


@pytest.mark.parametrize("part", ["exec_child", "exec_guardian", "console_stop"])
def test_python_runs_a_file_without_site_packages(part: Part, executable: str) -> None:
    command = own_command(part)
    assert command is not None
    *python, file = command
    assert python == [executable, "-I", "-S"]
    assert Path(file).is_file()
    assert Path(file).stem == part


@parts
def test_every_part_has_a_module_with_a_main_function(part: Part) -> None:
    spec = find_spec(MODULES[part])
    assert spec is not None
    assert spec.origin is not None
    source = ast.parse(Path(spec.origin).read_text("utf-8"))
    defined = {node.name for node in source.body if isinstance(node, ast.FunctionDef)}
    imported = {name.name for node in source.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert "main" in defined | imported


@parts
def test_bundle_becomes_a_part_by_its_first_argument(
    part: Part, executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "frozen", BUNDLE, raising=False)
    expected = (executable,) if part == "llamasup" else (executable, PART_ARGUMENT, part)
    assert own_command(part) == expected
    assert python_executable() is None


@parts
def test_another_frozen_application_is_not_started_again(
    part: Part, executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert own_command(part) is None
    assert python_executable() is None


@parts
def test_python_that_does_not_know_its_program_starts_nothing(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    assert own_command(part) is None
