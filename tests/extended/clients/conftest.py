"""Clients that take long to import or to run. Their servers are those of tests/clients."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import chat, collected, curl, encoder, node, ollama_js, serve, slow_to_load, tools

__all__ = ["chat", "collected", "curl", "encoder", "node", "ollama_js", "serve", "slow_to_load", "tools"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Some clients, such as litellm and langchain, leave sockets to the garbage collector."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    """The module. Without this variable it fetches a list of prices when it is imported; in a thread that
    never had an event loop it makes one, and nobody closes it.
    """
    asyncio.set_event_loop(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        yield importlib.import_module("litellm")
