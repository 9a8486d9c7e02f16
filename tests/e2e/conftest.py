from __future__ import annotations

from collections.abc import Callable
from itertools import count

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
