from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fake llama-server as an executable: a real child process whose faults ``--fake`` commands."""
    path = tmp_path_factory.mktemp("fake") / "llama-server"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llamasup.testing.fake_server "$@"\n')
    path.chmod(0o755)
    return str(path)
