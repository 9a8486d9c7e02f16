"""Whether the servers of another llamasup work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamasup.core.system.process.run_folder import NO_CONTROL, run_folder
from llamasup.core.system.process.sweep import record_child
from llamasup.features.tuning.neighbours import POLL_S, Neighbours
from tests.kit.patience import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

WORKS, SLEEPS = "while True: pass", "import time; time.sleep(1000)"


@pytest.fixture
def other_run() -> Iterator[Path]:
    with run_folder() as folder:
        yield folder.path


def looked(neighbours: Neighbours, seconds: float = 1.0) -> bool:
    """Whether they were busy at any time."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        if neighbours.are_busy():
            return True
        time.sleep(POLL_S)
    return False


@pytest.fixture
def child(request: pytest.FixtureRequest, other_run: Path) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-S", "-c", request.param])
    record_child(other_run, process.pid, sys.executable)
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.parametrize("child", [WORKS], indirect=True)
def test_a_server_that_computes_is_busy(child: int, tmp_path: Path) -> None:
    neighbours = Neighbours(tmp_path)
    eventually(neighbours.are_busy, "a busy neighbour", every_s=POLL_S)


def test_a_server_that_computes_for_a_moment_is_busy(other_run: Path, tmp_path: Path) -> None:
    """Less than a tick of the kernel's clock, which has 10 ms."""
    neighbours = Neighbours(tmp_path)
    record_child(other_run, os.getpid(), sys.executable)

    def is_seen() -> bool:
        neighbours.are_busy()
        until_s = time.process_time() + 0.006
        while time.process_time() < until_s:
            pass
        return neighbours.are_busy()

    eventually(is_seen, "a busy neighbour", every_s=0.2)


@pytest.mark.parametrize("child", [SLEEPS], indirect=True)
def test_a_server_that_waits_is_idle(child: int, tmp_path: Path) -> None:
    neighbours = Neighbours(tmp_path)
    eventually(lambda: not looked(neighbours, 0.3), "an idle neighbour")


@pytest.mark.parametrize("child", [WORKS], indirect=True)
def test_own_servers_and_those_of_other_tunings_do_not_count(
    child: int, other_run: Path, tmp_path: Path
) -> None:
    assert not looked(Neighbours(other_run), 0.3)
    (other_run / NO_CONTROL).touch()
    assert not looked(Neighbours(tmp_path), 0.3)


@pytest.mark.parametrize("child", [WORKS], indirect=True)
def test_a_server_that_ended_is_idle(child: int, other_run: Path, tmp_path: Path) -> None:
    neighbours = Neighbours(tmp_path)
    eventually(neighbours.are_busy, "a busy neighbour", every_s=POLL_S)
    subprocess.run(["kill", "-KILL", str(child)], check=True)
    eventually(lambda: not neighbours.are_busy(), "an idle neighbour", every_s=POLL_S)
