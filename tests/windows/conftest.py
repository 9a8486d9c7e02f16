"""The Windows Python, once for all tests; skipped with the reason where it cannot be had."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.windows.wine import Windows, windows_python


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.windows)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group("windows"))


@pytest.fixture(scope="session")
def python() -> Iterator[Path]:
    found = windows_python()
    if found is None:
        if os.environ.get("LLAMASUP_REQUIRE_WINDOWS") == "1":
            pytest.fail("scripts/windows-python has not prepared a Windows Python")
        pytest.skip("no Windows Python: run scripts/windows-python")
    # The first process of a session starts Wine's services, which takes seconds.
    prefix = {**os.environ, "WINEPREFIX": str(found.parent / "prefix"), "WINEARCH": "win64"}
    quiet = subprocess.DEVNULL
    # Not by a test: they would keep its pipes.
    for command in (["wineserver", "-p60"], ["wine", "wineboot"]):
        subprocess.run(command, env=prefix, stdin=quiet, stdout=quiet, stderr=quiet, check=False)
    yield found
    subprocess.run(["wineserver", "-k"], env=prefix, stdin=quiet, stdout=quiet, stderr=quiet, check=False)


@pytest.fixture
def windows(python: Path, tmp_path: Path) -> Iterator[Windows]:
    machine = Windows(python, tmp_path)
    yield machine
    machine.close()
