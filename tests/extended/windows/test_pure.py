"""The quick tests of pure modules also pass in a Windows Python."""

from __future__ import annotations

import re

import pytest

from tests.extended.windows.pure_tests import pure_tests
from tests.extended.windows.wine import PATIENCE_S, Windows

PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_quick_tests_of_pure_modules_pass(windows: Windows, part: int) -> None:
    plugins = ("-p", "tests.extended.windows.pure_tests", "-p", "no:cacheprovider")
    run = windows.python("-m", "pytest", "-q", *plugins, *pure_tests()[part::PARTS], stdin="NUL")
    code, shown = run.wait(5 * PATIENCE_S), run.output()
    assert code == 0, shown + run.errors
    passed = re.search(r"^(\d+) passed", shown, re.M)
    assert passed is not None
    assert int(passed[1]) > 100
