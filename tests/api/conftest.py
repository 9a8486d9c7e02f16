from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import fake_server

__all__ = ["fake_server"]

# Tests without processes.
QUICK = {"test_events.py", "test_inputs.py", "test_package.py"}


@pytest.fixture
def fake(fake_server: Callable[..., str]) -> str:
    """A llama-server that is ready at once and says eight words."""
    return fake_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each of the others starts processes: together they would make the quick check a slow one."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name not in QUICK:
            item.add_marker(pytest.mark.slow)
