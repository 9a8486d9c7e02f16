import pytest

from llamasup.core.llama_server.help_text import Capabilities
from tests.e2e.conftest import fork_server
from tests.kit.runtimes import capabilities_of

__all__ = ["fork_server"]


@pytest.fixture(scope="session")
def capabilities(llama_server: str) -> Capabilities:
    """What the real llama-server lists in its help. What a test expects of a build depends on it."""
    return capabilities_of(llama_server)
