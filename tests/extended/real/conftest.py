from tests.e2e.conftest import fork_server
from tests.real.conftest import capabilities

__all__ = ["capabilities", "fork_server"]
