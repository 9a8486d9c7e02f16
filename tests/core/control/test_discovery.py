"""Finding running llamasups in run folders with any content."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from llamasup.core.auth.key_source import client_key
from llamasup.core.control import discovery
from llamasup.core.control.discovery import discover, running_at
from llamasup.core.control.private_socket import SOCKET_NAME
from llamasup.core.control.selection import Unresponsive
from llamasup.core.system.native import native
from llamasup.core.system.process.run_folder import OWNER
from llamasup.errors import ConfigInvalid

# httpcore (1.0) leaves a Unix socket that could not be connected for the collector to close.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STATUS = {
    "version": "1",
    "pid": 11,
    "url": "http://127.0.0.1:8080",
    "models": [{"id": "tiny", "state": "ready"}],
}


@contextmanager
def answering(folder: Path, body: object, code: str = "200 OK") -> Iterator[None]:
    """Something listens at the control socket of this run folder."""
    folder.mkdir(parents=True, mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / SOCKET_NAME))
        listener.listen()
        text = json.dumps(body).encode()

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65_536)
                        head = f"HTTP/1.1 {code}\r\nContent-Length: {len(text)}\r\n\r\n"
                        connection.sendall(head.encode() + text)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture
def runs(own_folders: Path) -> Iterator[Path]:
    """The parent of the run folders of this user."""
    base = own_folders / "run" / "llamasup"
    base.mkdir(mode=0o700)
    yield base
    for path in sorted(base.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def owned_by(folder: Path, pid: int) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / OWNER).write_text(native.start_of(pid) or "")


def test_running_llamasups_are_found_with_their_models(runs: Path, tmp_path: Path) -> None:
    with (
        answering(runs / "11-aa", STATUS),
        answering(runs / "qwen" / "12-bb", {**STATUS, "pid": 12, "models": []}),
    ):
        found = discover(tmp_path)
        assert {each.pid: each.models for each in found.running} == {11: ("tiny (ready)",), 12: ()}
        assert found.running[0].socket == str(runs / "11-aa" / SOCKET_NAME)
        assert found.unresponsive == ()
        known = running_at(8080)
        assert known is not None
        assert (known.pid, known.models) == (11, ("tiny (ready)",))
        assert running_at(8081) is None


def test_system_services_are_found_and_inaccessible_ones_named(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = tmp_path / "services"
    (services / "closed").mkdir(parents=True)
    (services / "empty").mkdir()
    (services / "no-folder").write_text("")
    in_service = discovery._in_service

    def closed_to_us(base: Path) -> Iterator[tuple[Path, int]]:  # root can read everything
        if base.name == "closed":
            raise PermissionError(base)
        return in_service(base)

    monkeypatch.setattr(discovery, "_in_service", closed_to_us)
    with answering(services / "open" / "13-cc", {**STATUS, "pid": 13}):
        found = discover(services)
    assert [each.pid for each in found.running] == [13]
    assert found.closed == ("closed",)


def test_stale_run_folder_is_ignored(runs: Path, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = runs / f"{ended.pid}-aa"
    owned_by(folder, ended.pid)
    with socket.socket(socket.AF_UNIX) as listener:  # bound, but not listening
        listener.bind(str(folder / SOCKET_NAME))
    owned_by(runs / f"{os.getpid()}-bb", 1)  # our PID with another start time
    (runs / "not-a-run").mkdir()
    found = discover(tmp_path)
    assert (found.running, found.unresponsive) == ((), ())


def test_process_without_a_socket_is_starting_or_stopping(runs: Path, tmp_path: Path) -> None:
    folder = runs / f"{os.getpid()}-aa"
    owned_by(folder, os.getpid())
    assert discover(tmp_path).unresponsive == (Unresponsive(os.getpid(), "starting"),)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / SOCKET_NAME))
    assert discover(tmp_path).unresponsive == (Unresponsive(os.getpid(), "stopping"),)


def test_process_that_does_not_answer_hangs(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_TIMEOUT_S", 0.05)
    folder = runs / f"{os.getpid()}-aa"
    owned_by(folder, os.getpid())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / SOCKET_NAME))
        listener.listen()
        assert discover(tmp_path).unresponsive == (Unresponsive(os.getpid(), "hangs"),)


@pytest.mark.parametrize("body", [{}, [], {"pid": "x"}, {**STATUS, "models": None}])
def test_other_program_on_the_socket_is_ignored(runs: Path, tmp_path: Path, body: object) -> None:
    with answering(runs / "11-aa", body):
        assert discover(tmp_path).running == ()


def test_older_version_with_fewer_fields_is_found(runs: Path, tmp_path: Path) -> None:
    older = {name: value for name, value in STATUS.items() if name != "version"}
    with answering(runs / "11-aa", older):
        (found,) = discover(tmp_path).running
        assert (found.pid, found.version) == (11, "")


# --- the key for another machine ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("alone\n", "alone"),
        ("# team\none name=a\ntwo name=b rights=control\nthree rights=control\n", "two"),
        ("one name=a\nwith blanks in it\ntwo rights=inference,control", "two"),
        ("a key with blanks\n", "a key with blanks"),
        ("\ufeffalone name=x\r\n", "alone"),
    ],
)
def test_first_key_with_control_rights_or_the_only_key_is_sent(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    assert client_key(path, {"LLAMASUP_API_KEY": "another"}) == key


@pytest.mark.parametrize("text", ["one\ntwo\n", "", f"sha256:saltsalt:{'0' * 64} rights=control\n"])
def test_file_without_a_usable_key_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigInvalid, match="no plain key with the control right"):
        client_key(path, {})


def test_key_comes_from_environment_without_a_file() -> None:
    assert client_key(None, {"LLAMASUP_API_KEY": "k"}) == "k"
    assert client_key(None, {}) is None


def test_vanishing_folder_does_not_hide_others(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "10-gone").mkdir()
    really = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path.name == "10-gone":
            raise FileNotFoundError
        return really(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    with answering(runs / "11-aa", STATUS):
        assert len(discover(tmp_path).running) == 1
