"""One session of Wine for all tests of a run; skipped where no Windows Python was prepared.

Tests with ``runtime`` run with llama.cpp's own llama-server.exe and with the embedded runtime.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.extended.windows.wine import PATIENCE_S, Session, Windows, windows_path

TIMEOUT_S = 6 * PATIENCE_S
"""A test makes several starts, each of which may take ``PATIENCE_S`` on a loaded machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def session() -> Iterator[Session]:
    given = os.environ.get("LLAMASUP_WINDOWS_PYTHON")
    if not given:
        pytest.skip("set LLAMASUP_WINDOWS_PYTHON to what scripts/windows-python prints")
    session = Session(Path(given))
    yield session
    session.close()


@pytest.fixture
def windows(session: Session, tmp_path: Path) -> Iterator[Windows]:
    with Windows(session, tmp_path) as machine:
        yield machine


@pytest.fixture(scope="session", params=["binary", "embedded"])
def runtime(request: pytest.FixtureRequest, session: Session) -> str:
    """What ``--runtime`` takes for each of the two real runtimes of Windows."""
    if request.param == "embedded":
        return "embedded"
    if not session.llama_server.exists():
        pytest.skip(f"{session.llama_server} is missing: scripts/windows-llama-server says why")
    return windows_path(session.llama_server)
