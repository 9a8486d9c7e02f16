from tests.e2e.conftest import fork_server

__all__ = ["fork_server"]
