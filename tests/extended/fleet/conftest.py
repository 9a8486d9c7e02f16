"""A Ray cluster of several nodes on this machine, a fleet on it, and a front. Skipped without Ray.

Where the machine allows it, each node is in a network namespace, with a delay on the way.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.extended.fleet.network import Network
from tests.extended.fleet.rig import NODES, Rig
from tests.kit.tiny import tiny_decoder

DELAY_S = 0.005  # each way, as between two cities


@pytest.fixture(scope="package")
def rig(tmp_path_factory: pytest.TempPathFactory, llama_server: str) -> Iterator[Rig]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: scripts/test_fleet installs it")
    folder = tmp_path_factory.mktemp("fleet")
    for name in ("tiny.gguf", "other.gguf"):
        (folder / name).write_bytes(tiny_decoder())
    with ExitStack() as stack:
        network = None if Network.problem() else stack.enter_context(Network(NODES, DELAY_S))
        yield stack.enter_context(Rig(folder, llama_server, network))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
