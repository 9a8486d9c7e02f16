from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.conftest import fake_server

__all__ = ["fake_server"]


@pytest.fixture
def fake(fake_server: Callable[..., str]) -> str:
    """A llama-server that is ready at once and says eight words."""
    return fake_server()
