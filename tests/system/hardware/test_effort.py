"""What real processes spend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from llamasup.system.hardware.facts import CpuUsage
from llamasup.system.hardware.usage import cpu_usage
from tests.patience import PATIENCE_S


def until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def of(pid: int) -> CpuUsage:
    spent = cpu_usage(pid)
    assert spent is not None
    return spent


@pytest.mark.parametrize("script", ["while :; do :; done", "(while :; do :; done) & wait"])
def test_cpu_time_includes_descendants(script: str) -> None:
    with subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True) as child:
        try:
            until(lambda: of(child.pid).cpu_s > 0.2)
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def test_stopped_process_is_detected() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as child:
        try:
            assert not of(child.pid).stopped
            child.send_signal(signal.SIGSTOP)
            until(lambda: of(child.pid).stopped)
        finally:
            child.kill()


def test_exited_process_has_no_usage() -> None:
    with subprocess.Popen(["/bin/true"]) as child:
        child.wait()
    assert cpu_usage(child.pid) is None
