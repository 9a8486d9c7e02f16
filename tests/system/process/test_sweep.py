"""Folders of runs that have ended: told from those of runs that go on, looked at, and swept."""

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

from llamasup.system.process import run_folder as module
from llamasup.system.process.exit import LeftFolder
from llamasup.system.process.run_folder import run_folder, run_folders
from llamasup.system.process.sweep import leftovers, record_ready_file, sweep
from llamasup.system.storage import folders
from llamasup.system.storage.folders import cache_folder, claim, state_folder


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only place where run folders are, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr(module, "_short_temporary_folder", lambda: Path(folder))
        (Path(folder) / "llamasup").mkdir()
        yield Path(folder)


@pytest.fixture
def dead() -> int:
    """The number of a process that was there and has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def made(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


def test_the_folder_of_a_run_that_goes_on_is_not_left(base: Path) -> None:
    with run_folder() as run:
        assert list(run_folders()) == [(run.path, os.getpid())]
        assert leftovers() == ()


def test_the_folder_of_a_process_that_has_ended_is_left_and_stays(base: Path, dead: int) -> None:
    folder = made(base / "llamasup" / f"{dead}-abc")
    (folder / "config").mkdir()
    unbound = socket.socket(socket.AF_UNIX)
    unbound.bind(str(folder / "1.sock"))
    unbound.close()
    assert leftovers() == (LeftFolder(str(folder), dead),)
    assert folder.is_dir()


def test_one_in_the_last_place_is_found_too(base: Path, dead: int) -> None:
    folder = made(base / f"llamasup-{dead}-abc")
    assert [left.path for left in leftovers()] == [str(folder)]


def test_a_socket_that_still_answers_is_named(base: Path, dead: int) -> None:
    folder = made(base / "llamasup" / f"{dead}-abc")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "1.sock"))
        listener.listen()
        assert leftovers() == (LeftFolder(str(folder), dead, (str(folder / "1.sock"),)),)


def test_a_number_that_another_process_has_got_since_does_not_hide_the_folder(base: Path) -> None:
    folder = made(base / "llamasup" / f"{os.getpid()}-abc")
    (folder / "owner").write_text("another boot/17")
    assert [left.path for left in leftovers()] == [str(folder)]


def test_a_process_that_was_not_waited_for_has_ended_all_the_same(base: Path) -> None:
    zombie = subprocess.Popen([sys.executable, "-S", "-c", ""], stdout=subprocess.PIPE)
    assert zombie.stdout is not None
    with zombie.stdout as output:
        assert output.read() == b""  # its end closes the pipe
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    try:
        folder = made(base / "llamasup" / f"{zombie.pid}-abc")
        assert [left.path for left in leftovers()] == [str(folder)]
    finally:
        zombie.wait()


def test_what_is_no_folder_of_a_run_is_passed_over(base: Path, dead: int) -> None:
    made(base / "llamasup" / "other")
    (base / "llamasup" / f"{dead}-file").touch()
    (base / "llamasup" / f"{dead}-link").symlink_to(base)
    assert leftovers() == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_the_folder_of_another_user_is_none_of_ours(base: Path, dead: int) -> None:
    os.chown(made(base / "llamasup" / f"{dead}-abc"), 12345, 12345)
    assert leftovers() == ()


# --- the sweep -----------------------------------------------------------------------------------


def test_a_sweep_removes_what_is_left_and_tells_of_it_once(base: Path, dead: int) -> None:
    folder = made(base / "llamasup" / f"{dead}-abc")
    (folder / "config").mkdir()
    (folder / "config" / "file").touch()
    (one,) = sweep()
    assert (one.folder, one.pid) == (folder, dead)
    assert str(folder) in str(one)
    assert not folder.exists()
    assert sweep() == ()


def test_a_sweep_leaves_runs_that_go_on_and_what_is_no_run(base: Path, dead: int) -> None:
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


def test_the_sweep_of_one_folder_leaves_the_others(base: Path, dead: int) -> None:
    one, other = (made(base / "llamasup" / f"{dead}-{name}") for name in ("one", "other"))
    assert [each.folder for each in sweep(only=one)] == [one]
    assert other.is_dir()


def test_what_somebody_else_is_sweeping_is_left_to_them(base: Path, dead: int) -> None:
    folder = made(base / "llamasup" / f"{dead}-abc")
    lock = claim(folder)
    assert lock is not None
    try:
        assert sweep() == ()
        assert leftovers() == ()
    finally:
        os.close(lock)
    assert len(sweep()) == 1


def test_a_folder_that_a_cleaner_took_and_its_run_made_again_is_not_left(base: Path) -> None:
    """systemd-tmpfiles, tmpreaper: the lock went with the first folder."""
    with run_folder() as run:
        shutil.rmtree(run.path)
        made(run.path)
        assert sweep() == ()
        assert leftovers() == ()
        assert run.path.is_dir()


def test_where_folders_cannot_be_locked_the_process_tells(
    base: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # NFS, of a folder

    monkeypatch.setattr(fcntl, "flock", no_locks)
    left = made(base / "llamasup" / f"{dead}-abc")
    with run_folder() as run:
        assert [each.folder for each in sweep()] == [left]
        assert run.path.is_dir()
        (run.path / "owner").write_text("another boot/17")  # another process has its number now
        assert [each.folder for each in sweep()] == [run.path]


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


def test_half_written_files_of_the_dead_go_when_they_are_old(base: Path, dead: int) -> None:
    kept = [
        state_folder() / ".notes.txt.part",  # nobody of ours names it so
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


def test_a_ready_file_goes_with_its_run_and_not_with_another(base: Path, dead: int, tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"
    for pid, removed in ((os.getpid(), False), (dead, True)):
        url = {"url": "http://127.0.0.1:1", "host": "127.0.0.1", "port": 1}
        ready_file.write_text(json.dumps({"event": "ready", "pid": pid, **url}))
        folder = made(base / "llamasup" / f"{dead}-abc")
        record_ready_file(folder, ready_file)
        (one,) = sweep()
        assert (one.ready_file == ready_file) is removed
        assert ready_file.exists() is not removed
