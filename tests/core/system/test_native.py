"""The parts for macOS that run on every POSIX system."""

from __future__ import annotations

import os
import subprocess
import sys
from time import monotonic

import psutil
import pytest

from llamasup.core.system.hardware import probe
from tests.kit.patience import PATIENCE_S

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX")


@posix
def test_macos_finds_descendants_by_their_mark() -> None:
    from llamasup.core.system.native.macos import MacOS

    mac = MacOS()
    with subprocess.Popen(["sleep", "600"], env={"LLAMASUP_RUN": "/run/1/ab", "PATH": os.defpath}) as process:
        try:
            until = monotonic() + PATIENCE_S
            while psutil.Process(process.pid).name() != "sleep":
                assert monotonic() < until
            assert process.pid in mac.tagged(b"LLAMASUP_RUN=/run/1/ab\0")
            assert mac.is_tagged(process.pid, b"LLAMASUP_RUN=/run/1/")
            assert not mac.is_tagged(process.pid, b"LLAMASUP_RUN=/run/2/")
            assert mac.kill_if(process.pid, lambda: True, group=False)
        finally:
            process.kill()
    assert not mac.is_tagged(process.pid, b"LLAMASUP_RUN=/run/1/")


def test_unknown_swap_is_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    def disabled() -> None:
        raise RuntimeError("Performance counters may be disabled")

    monkeypatch.setattr(psutil, "swap_memory", disabled)
    machine = probe._by_psutil()
    assert (machine.swap_total_bytes, machine.swap_free_bytes) == (0, 0)
    assert machine.memory_total_bytes > 0


@posix
@pytest.mark.skipif(not hasattr(os, "waitid"), reason="not on macOS before Python 3.13")
def test_macos_sees_an_exit_without_reaping() -> None:
    """The process group is killed first: its number is free for others after the reaping."""
    from llamasup.core.system.native.macos import MacOS

    mac = MacOS()
    with subprocess.Popen(["true"]) as process:
        mac.wait_until_exited(process)
        assert mac.sees_without_reaping
        assert mac.has_exited(process)
        assert process.returncode is None
