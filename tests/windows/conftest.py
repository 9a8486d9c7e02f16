"""The Windows Python, once for all tests; skipped with the reason where it cannot be had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.windows.wine import Session, Windows, windows_python


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.windows)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group("windows"))


@pytest.fixture(scope="session")
def session() -> Iterator[Session]:
    found = windows_python()
    if found is None:
        if os.environ.get("LLAMASUP_REQUIRE_WINDOWS") == "1":
            pytest.fail("scripts/windows-python has not prepared a Windows Python")
        pytest.skip("no Windows Python: run scripts/windows-python")
    session = Session(found)
    yield session
    session.close()


@pytest.fixture
def windows(session: Session, tmp_path: Path) -> Iterator[Windows]:
    with Windows(session, tmp_path) as machine:
        yield machine
