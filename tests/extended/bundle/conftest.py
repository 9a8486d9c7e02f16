"""The bundle that scripts/bundle has made; its tests are skipped without one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.extended.bundle.program import Program


def _given(variable: str, command: str) -> Path:
    given = os.environ.get(variable)
    if not given:
        pytest.skip(f"set {variable} to what {command} prints")
    return Path(given)


@pytest.fixture
def bundle(own_folders: Path) -> Program:
    return Program(_given("LLAMASUP_TEST_BUNDLE", "scripts/bundle"), own_folders)


@pytest.fixture
def without_embedded(own_folders: Path) -> Program:
    variable = "LLAMASUP_TEST_BUNDLE_WITHOUT_EMBEDDED"
    return Program(_given(variable, "scripts/bundle --without-embedded"), own_folders)
