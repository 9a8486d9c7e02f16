"""PIDs are reused, identities are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamasup.core.system.native import native
from llamasup.core.system.native.linux import Linux
from llamasup.core.system.process.sweep import kill_if

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

BOOT = "sys/kernel/random/boot_id"


def test_process_that_hides_its_start_is_not_younger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "start_of", lambda pid: "" if pid == 1 else "boot/7")
    assert not native.began_after(1, 2)
    assert not native.began_after(2, 1)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], env={"MARK": "here/1", "PATH": os.defpath}) as process:
        while Path(f"/proc/{process.pid}/cmdline").read_bytes() != b"sleep\x00600\x00":
            pass
        yield process
        process.kill()


def stat_of(proc: Path, pid: int, name: str, state: str, ticks: int, boot: str = "one") -> Path:
    """A /proc with one process in it."""
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    fields = [state, *("0",) * 18, str(ticks), "0", "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
    (proc / BOOT).parent.mkdir(parents=True, exist_ok=True)
    (proc / BOOT).write_text(f"{boot}\n")
    return proc


def test_start_time_identifies_a_process(sleeper: subprocess.Popen[bytes]) -> None:
    assert native.start_of(sleeper.pid) == native.start_of(sleeper.pid)
    assert native.start_of(sleeper.pid) != native.start_of(os.getpid())
    assert native.began_after(sleeper.pid, os.getpid())
    assert not native.began_after(os.getpid(), sleeper.pid)


@linux
def test_same_pid_with_another_start_or_boot_is_another_process(tmp_path: Path) -> None:
    first = Linux().start_of(7, stat_of(tmp_path, 7, "a", "S", 100))
    assert first == Linux().start_of(7, stat_of(tmp_path, 7, "a", "R", 100))
    assert first != Linux().start_of(7, stat_of(tmp_path, 7, "a", "S", 101))
    assert first != Linux().start_of(7, stat_of(tmp_path, 7, "a", "S", 100, boot="two"))


@linux
def test_a_name_with_brackets_and_blanks_does_not_shift_the_fields(tmp_path: Path) -> None:
    assert Linux().start_of(7, stat_of(tmp_path, 7, "sh) Z 1 (x", "S", 100)) == "one/100"


@linux
@pytest.mark.parametrize("state", ["Z", "X"])
def test_zombie_has_exited(tmp_path: Path, state: str) -> None:
    assert Linux().start_of(7, stat_of(tmp_path, 7, "a", state, 100)) is None


def test_missing_process_has_no_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert native.start_of(sleeper.pid) is None
    sleeper.wait()
    assert native.start_of(sleeper.pid) is None
    assert not native.began_after(sleeper.pid, os.getpid())


@linux
def test_tagged_processes_are_found_by_prefix(sleeper: subprocess.Popen[bytes]) -> None:
    assert native.is_tagged(sleeper.pid, b"MARK=here/")
    assert native.is_tagged(sleeper.pid, b"MARK=here/1\0")
    assert not native.is_tagged(sleeper.pid, b"MARK=here\0")
    assert not native.is_tagged(sleeper.pid, b"ARK=here/")
    assert native.tagged(b"MARK=here/") == [sleeper.pid]
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert native.tagged(b"MARK=here/") == []


def test_only_a_matching_process_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    assert not kill_if(sleeper.pid, lambda: False)
    assert sleeper.poll() is None
    assert kill_if(sleeper.pid, lambda: True)
    assert sleeper.wait() == -9
    assert not kill_if(sleeper.pid, lambda: True)


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("pid", [1, 0, -1])
def test_pids_for_groups_are_never_killed(pid: int, group: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        pytest.fail(f"signalled {arguments}")

    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, never)
    monkeypatch.setattr(signal, "pidfd_send_signal", never)
    assert not kill_if(pid, lambda: True, group=group)


def test_process_is_killed_by_pid_without_pidfd(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert kill_if(sleeper.pid, lambda: True)
    assert sleeper.wait() == -9
