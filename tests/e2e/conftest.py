from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from tests.e2e.forked import forked_to_end
from tests.kit.fake_server import install
from tests.kit.paths import ROOT


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Start it before the tests: later it would be a new child of this process."""
    forked_to_end("--version")


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Makes executables of the fake llama-server, real child processes; arguments are its faults."""
    folder = tmp_path_factory.mktemp("fake")
    numbers = count()

    def make(*faults: str) -> str:
        return str(install(folder / f"llama-server-{next(numbers)}", *faults))

    return make


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """llamasup as one file, below a folder with a space in its name."""
    path = tmp_path / "My Programs" / "llamasup"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m llamasup "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return path
