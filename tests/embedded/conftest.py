"""The parameters of xllamacpp."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def xllamacpp() -> Any:
    return pytest.importorskip("xllamacpp", reason="the embedded runtime needs xllamacpp: run scripts/test")


@pytest.fixture
def params(xllamacpp: Any) -> Any:
    return xllamacpp.CommonParams()
