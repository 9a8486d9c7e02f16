from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from llamasup.testing.fake_server import install


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Makes executables of the fake llama-server, real child processes; arguments are its faults."""
    folder = tmp_path_factory.mktemp("fake")
    numbers = count()

    def make(*faults: str) -> str:
        return str(install(folder / f"llama-server-{next(numbers)}", *faults))

    return make


# Those that say what comes out, and no more: several at a time.
BESIDE = {
    *("test_bad_config.py", "test_ladder.py", "test_plan.py", "test_serve_bad_input.py", "test_service.py"),
    "test_service_many.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each of these tests starts processes: together they would make the quick check a slow one."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.slow)
            if item.path.name in BESIDE:
                item.add_marker(pytest.mark.beside)
