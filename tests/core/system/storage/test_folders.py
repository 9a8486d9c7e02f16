"""Private folders and files on the real file system."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamasup.core.system.native import native
from llamasup.core.system.process import run_folder as module
from llamasup.core.system.process.run_folder import LONGEST_SOCKET_NAME, run_folder
from llamasup.core.system.storage.folders import atomic_write, cache_folder, private_folder, state_folder
from llamasup.errors import FolderUnusable, NothingWritable
from tests.kit.paths import ROOT


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# --- private folders -------------------------------------------------------------------------------


def test_private_folder_is_only_for_this_user(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "a" / "b")
    assert (folder.is_dir(), mode(folder)) == (True, 0o700)


def test_open_folder_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    assert mode(private_folder(tmp_path / "open")) == 0o700


def test_symlink_file_and_invalid_path_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderUnusable, match="it is a symlink"):
        private_folder(tmp_path / "link")
    with pytest.raises(FolderUnusable, match="File exists"):
        private_folder(tmp_path / "file")
    with pytest.raises(FolderUnusable, match="Not a directory") as raised:
        private_folder(tmp_path / "file" / "below")
    assert (raised.value.exit_code, raised.value.cause) == (71, "folder_unusable")
    assert "set $HOME" in raised.value.remedy


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(FolderUnusable, match=f"it belongs to user {owner}"):
        private_folder(tmp_path)


# --- atomic writes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_as_a_whole_and_is_private(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o644)
    atomic_write(path, b"new", durable=durable)
    assert (path.read_bytes(), mode(path)) == (b"new", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_a_symlink_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "file").symlink_to(tmp_path / "victim")
    atomic_write(tmp_path / "file", b"new")
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert not (tmp_path / "file").is_symlink()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    folder_in_its_place = tmp_path / "file"
    folder_in_its_place.mkdir()
    with pytest.raises(IsADirectoryError):
        atomic_write(folder_in_its_place, b"new")
    assert list(tmp_path.iterdir()) == [folder_in_its_place]


# --- where things live -----------------------------------------------------------------------------


def test_state_and_cache_follow_the_users_variables_and_systemds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert state_folder() == tmp_path / "state" / "llamasup"
    assert cache_folder() == tmp_path / "cache" / "llamasup"
    monkeypatch.setenv("STATE_DIRECTORY", f"{tmp_path / 'unit'}:{tmp_path / 'second'}")
    assert state_folder() == tmp_path / "unit"
    assert mode(tmp_path / "unit") == 0o700


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path: pytest's own are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp") as folder:
        yield Path(folder)


def test_a_run_has_a_fresh_private_folder_that_goes_with_it(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    with run_folder() as first, run_folder() as second:
        assert first.path.parent == second.path.parent == short / "llamasup"
        assert first.path != second.path
        assert first.path.name.startswith(f"{os.getpid()}-")
        assert mode(first.path) == mode(first.path.parent) == 0o700
        (first.path / "below").mkdir()
        (first.path / "below" / "file").write_text("")
    first.close()  # once more does no harm
    assert list((short / "llamasup").iterdir()) == []


def test_systemds_runtime_directory_comes_first(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(short / "unit"))
    with run_folder() as run:
        assert run.path.parent == short / "unit"


@pytest.mark.parametrize("length", [20, 70, 90, 100, 200])  # 60 fits a process number of three digits
def test_a_socket_with_the_longest_name_can_be_bound_in_it(
    short: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    base = short / ("d" * (length - len(str(short)) - 1)) if length > len(str(short)) + 1 else short
    base.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    with run_folder() as run, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run.path / ("s" * LONGEST_SOCKET_NAME)))
        assert (run.path.parent.parent == base) == (length < 60)


def test_socket_path_never_exceeds_the_limit(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the limit: whatever folder is chosen, the longest name still binds."""
    for length in range(40, 80):
        base = short / ("e" * (length - len(str(short)) - 1))
        base.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
        with run_folder() as run, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(run.path / ("s" * LONGEST_SOCKET_NAME)))


def test_folder_of_another_user_is_skipped(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    (short / "llamasup").symlink_to("/etc")
    monkeypatch.setattr(module, "_short_temporary_folder", lambda: short)
    (short / f"llamasup-{os.geteuid()}").write_text("taken as well")
    with run_folder() as run:
        assert run.path.parent == short
        assert mode(run.path) == 0o700


def test_no_usable_folder_is_an_error_with_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(module, "_short_temporary_folder", lambda: Path("/proc/self/fd"))
    with pytest.raises(NothingWritable, match="/proc/self/fd"):
        run_folder()


def test_last_run_folder_is_made_private_or_removed(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows it inherits the rights of the temporary folder."""
    monkeypatch.setattr(native, "make_private", lambda path, status: "its drive has no ACLs")
    before = set(short.iterdir())
    with pytest.raises(FolderUnusable, match="its drive has no ACLs"):
        run_folder()
    assert set(short.iterdir()) == before


def test_folder_is_removed_at_interpreter_exit_but_not_by_a_fork(short: Path) -> None:
    script = (
        "import os,sys\nfrom llamasup.core.system.process.run_folder import run_folder\n"
        "run = run_folder()\n"
        "pid = os.fork()\n"
        "if pid == 0: sys.exit()\n"
        "os.waitpid(pid, 0)\n"
        "print(run.path, run.path.is_dir())\n"
    )
    env = {**os.environ, "XDG_RUNTIME_DIR": str(short)}
    root = ROOT
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=root, capture_output=True, text=True, check=True
    )
    path, was_there = done.stdout.split()
    assert was_there == "True"
    assert not Path(path).exists()
