"""Stale run folders are distinguished from those of running processes, and swept."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamasup.core.system.native import native
from llamasup.core.system.process import run_folder as module
from llamasup.core.system.process.child import StaleRun
from llamasup.core.system.process.run_folder import NO_CONTROL, OWNER, run_folder, run_folders, scratch_folder
from llamasup.core.system.process.sweep import record_ready_file, stale_runs, sweep, sweep_run
from llamasup.core.system.storage import folders
from llamasup.core.system.storage.folders import cache_folder, claim, state_folder


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder for run folders, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr(module, "_short_temporary_folder", lambda: Path(folder))
        (Path(folder) / "llamasup").mkdir()
        yield Path(folder)


@pytest.fixture
def dead() -> int:
    """The PID of a process that has exited."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def made(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


def test_folder_of_a_running_process_is_not_stale(base: Path) -> None:
    with run_folder() as run:
        assert list(run_folders()) == [(run.path, os.getpid())]
        assert stale_runs() == ()


def test_folder_whose_process_hides_its_start_is_not_stale(
    base: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows: it belongs to the administrators, and this process does not."""
    folder = made(base / "llamasup" / f"{dead}-abc")
    (folder / OWNER).write_text("7")
    monkeypatch.setattr(native, "start_of", lambda pid: "")
    assert stale_runs() == ()


def test_folder_of_an_exited_process_is_stale(base: Path, dead: int) -> None:
    folder = made(base / "llamasup" / f"{dead}-abc")
    (folder / "config").mkdir()
    unbound = socket.socket(socket.AF_UNIX)
    unbound.bind(str(folder / "1.sock"))
    unbound.close()
    assert stale_runs() == (StaleRun(str(folder), dead),)
    assert folder.is_dir()


def test_stale_folder_in_the_fallback_place_is_found(base: Path, dead: int) -> None:
    folder = made(base / f"llamasup-{dead}-abc")
    assert [stale.path for stale in stale_runs()] == [str(folder)]


def test_listening_socket_is_named(base: Path, dead: int) -> None:
    folder = made(base / "llamasup" / f"{dead}-abc")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "1.sock"))
        listener.listen()
        assert stale_runs() == (StaleRun(str(folder), dead, (str(folder / "1.sock"),)),)


def test_reused_pid_does_not_hide_a_stale_folder(base: Path) -> None:
    folder = made(base / "llamasup" / f"{os.getpid()}-abc")
    (folder / "owner").write_text("another boot/17")
    assert [stale.path for stale in stale_runs()] == [str(folder)]


def test_zombie_counts_as_exited(base: Path) -> None:
    zombie = subprocess.Popen([sys.executable, "-S", "-c", ""], stdout=subprocess.PIPE)
    assert zombie.stdout is not None
    with zombie.stdout as output:
        assert output.read() == b""  # its exit closes the pipe
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    try:
        folder = made(base / "llamasup" / f"{zombie.pid}-abc")
        assert [stale.path for stale in stale_runs()] == [str(folder)]
    finally:
        zombie.wait()


def test_other_files_are_ignored(base: Path, dead: int) -> None:
    made(base / "llamasup" / "other")
    (base / "llamasup" / f"{dead}-file").touch()
    (base / "llamasup" / f"{dead}-link").symlink_to(base)
    assert stale_runs() == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_folder_of_another_user_is_ignored(base: Path, dead: int) -> None:
    os.chown(made(base / "llamasup" / f"{dead}-abc"), 12345, 12345)
    assert stale_runs() == ()


# --- the sweep -----------------------------------------------------------------------------------


def test_sweep_removes_a_stale_run_and_reports_it_once(base: Path, dead: int) -> None:
    folder = made(base / "llamasup" / f"{dead}-abc")
    (folder / "config").mkdir()
    (folder / "config" / "file").touch()
    (one,) = sweep()
    assert (one.folder, one.pid) == (folder, dead)
    assert str(folder) in str(one)
    assert not folder.exists()
    assert sweep() == ()


def test_sweep_leaves_running_ones_and_other_files(base: Path, dead: int) -> None:
    made(base / "llamasup" / "other")
    (base / "llamasup" / f"{dead}-link").symlink_to(base)
    with run_folder() as run:
        assert sweep() == ()
        assert run.path.is_dir()
    assert (base / "llamasup" / "other").is_dir()
    assert (base / "llamasup" / f"{dead}-link").is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_sweep_leaves_the_folder_of_another_user(base: Path, dead: int) -> None:
    folder = made(base / "llamasup" / f"{dead}-abc")
    os.chown(folder, 12345, 12345)
    assert sweep() == ()
    assert folder.is_dir()


def test_sweep_of_a_run_removes_all_folders_of_its_process_and_no_others(base: Path, dead: int) -> None:
    """A killed process may have had a folder in which it asked a program for its options."""
    names = (f"{dead}-one", f"{dead}-asked", f"{dead}0-other")
    one, asked, other = (made(base / "llamasup" / name) for name in names)
    sweep_run(one)
    assert not one.exists()
    assert not asked.exists()
    assert other.is_dir()


@pytest.mark.parametrize("locked", ["one", "asked"])
def test_sweep_of_a_run_waits_for_a_lock_that_is_held_for_a_moment(
    base: Path, dead: int, locked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that the killed process was just starting holds the lock until its ``exec``."""
    one, asked = (made(base / "llamasup" / f"{dead}-{name}") for name in ("one", "asked"))
    lock = claim(base / "llamasup" / f"{dead}-{locked}")
    assert lock is not None
    locks = [lock]
    monkeypatch.setattr(
        "llamasup.core.system.process.sweep.time.sleep", lambda _: os.close(locks.pop()) if locks else None
    )
    sweep_run(one)
    assert not locks
    assert not one.exists()
    assert not asked.exists()


@pytest.mark.usefixtures("base")
def test_folder_in_which_a_program_is_asked_is_of_no_llamasup_and_is_removed() -> None:
    with scratch_folder() as folder:
        assert (Path(folder) / NO_CONTROL).exists()
        assert sweep() == ()
    assert not Path(folder).exists()


def test_folder_being_swept_by_another_process_is_left_alone(base: Path, dead: int) -> None:
    folder = made(base / "llamasup" / f"{dead}-abc")
    lock = claim(folder)
    assert lock is not None
    try:
        assert sweep() == ()
        assert stale_runs() == ()
    finally:
        os.close(lock)
    assert len(sweep()) == 1


def test_recreated_folder_of_a_running_process_is_not_stale(base: Path) -> None:
    """systemd-tmpfiles, tmpreaper: the lock went with the first folder."""
    with run_folder() as run:
        shutil.rmtree(run.path)
        made(run.path)
        assert sweep() == ()
        assert stale_runs() == ()
        assert run.path.is_dir()


def test_start_time_decides_if_folders_cannot_be_locked(
    base: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # NFS, of a folder

    monkeypatch.setattr(fcntl, "flock", no_locks)
    stale = made(base / "llamasup" / f"{dead}-abc")
    with run_folder() as run:
        assert [swept.folder for swept in sweep()] == [stale]
        assert run.path.is_dir()
        (run.path / "owner").write_text("another boot/17")  # another process has its PID now
        assert [swept.folder for swept in sweep()] == [run.path]


def test_a_run_that_is_swept_before_it_could_claim_its_folder_makes_another(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swept_first(folder: Path) -> int | None:
        if not taken:
            taken.append(folder)
            folder.rmdir()
        return claim(folder)

    taken: list[Path] = []
    monkeypatch.setattr(folders, "claim", swept_first)
    with run_folder() as run:
        assert run.path.is_dir()
        assert taken != [run.path]


def test_old_half_written_files_of_dead_processes_are_removed(base: Path, dead: int) -> None:
    kept = [
        state_folder() / ".notes.txt.part",  # not a name of atomic_write
        state_folder() / f".stats.json.{os.getpid()}-0123abcd.part",  # it is being written
        cache_folder() / f".new.json.{dead}-0123abcd.part",  # perhaps in another container
        cache_folder() / f"model.gguf.{dead}-0123abcd.part",  # a download that can go on
    ]
    gone = [cache_folder() / f".facts.json.{dead}-0123abcd.part", state_folder() / f".x.{dead}-0123abcd.part"]
    for path in (*kept, *gone):
        path.touch()
        if path != kept[2]:
            os.utime(path, (0, 0))
    sweep()
    assert [path for path in (*kept, *gone) if path.exists()] == kept
    for path in kept:
        path.unlink()


def test_sweep_removes_only_the_ready_file_of_the_stale_run(base: Path, dead: int, tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"
    for pid, removed in ((os.getpid(), False), (dead, True)):
        url = {"url": "http://127.0.0.1:1", "host": "127.0.0.1", "port": 1}
        ready_file.write_text(json.dumps({"event": "ready", "pid": pid, **url}))
        folder = made(base / "llamasup" / f"{dead}-abc")
        record_ready_file(folder, ready_file)
        (one,) = sweep()
        assert (one.ready_file == ready_file) is removed
        assert ready_file.exists() is not removed
