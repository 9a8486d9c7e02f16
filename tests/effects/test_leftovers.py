"""Folders of runs that have ended: told from those of runs that go on, and only looked at."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamasup.core.doctor_facts import LeftFolder
from llamasup.effects import files
from llamasup.effects.files import run_folder, run_folders
from llamasup.effects.leftovers import leftovers


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only place where run folders are, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr(files, "_short_temporary_folder", lambda: Path(folder))
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
