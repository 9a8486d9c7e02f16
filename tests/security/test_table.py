"""docs/security.md says what the tests say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scripts.pages import keep_current

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "security_table.py"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("security_table", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["security_table"] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_every_promise_has_a_test_and_the_document_is_current(table: ModuleType) -> None:
    checks = table.all_checks()
    assert {check.promise for check in checks} == set(table.PROMISES)
    current = keep_current(table.DOCUMENT, table.MARKS, table.table(checks), check=True)
    assert current == 0, "run scripts/security_table.py"


def test_threat_model_is_that_of_the_tests(table: ModuleType) -> None:
    current = keep_current(table.DOCUMENT, table.REACH_MARKS, table.reach_table(), check=True)
    assert current == 0, "run scripts/security_table.py"


def test_a_row_is_made_of_a_marker(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        'CASES = {"one": 1, "two": 2}\n'
        '@pytest.mark.check("X2", "a | b")\n'
        '@pytest.mark.parametrize("raw", CASES.values(), ids=CASES)\n'
        "def test_what_is_odd(raw): ...\n"
        "def test_what_shows_nothing(): ...\n"
    )
    assert "| what is odd: one; two | a \\| b | [test_it](../tests/test_it.py) |\n" in table.table(
        table.all_checks()
    )
    assert "nothing" not in table.table(table.all_checks())
