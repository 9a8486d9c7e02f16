"""A Ray cluster of several nodes on this machine, a fleet on it, and a front. Skipped without Ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamasup.testing.tiny import tiny_decoder
from tests.fleet.rig import Rig


@pytest.fixture(scope="package")
def rig(tmp_path_factory: pytest.TempPathFactory, llama_server: str) -> Iterator[Rig]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: scripts/test_fleet installs it")
    folder = tmp_path_factory.mktemp("fleet")
    for name in ("tiny.gguf", "other.gguf"):
        (folder / name).write_bytes(tiny_decoder())
    with Rig(folder, llama_server) as rig:
        yield rig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
