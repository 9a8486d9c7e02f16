"""Binding addresses, and the errors for addresses in use."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llamasup.core.proxy import bind, bind_unix
from llamasup.core.proxy.listeners.bind import socket_lock
from llamasup.core.proxy.listeners.listen import listen
from llamasup.errors import PortInUse, PortNotAllowed


def test_port_0_binds_a_free_port() -> None:
    (sock,) = bind("127.0.0.1", 0)
    with sock, socket.create_connection(sock.getsockname()):
        assert sock.getsockname()[1] > 0


def test_name_with_several_addresses_gets_same_port_on_all() -> None:
    sockets = bind("localhost", 0)
    try:
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
    finally:
        for sock in sockets:
            sock.close()


def test_error_for_port_in_use_names_the_process() -> None:
    (holder,) = bind("127.0.0.1", 0)
    with holder:
        port = holder.getsockname()[1]
        with pytest.raises(
            PortInUse, match=rf"port {port} on 127.0.0.1 is in use by .*\(pid {os.getpid()}\)"
        ) as caught:
            bind("127.0.0.1", port)
    assert "--port 0" in caught.value.remedy
    assert caught.value.exit_code == 71


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid", "not a host"])
def test_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(PortNotAllowed, match=host):
        bind(host, 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may bind every port")
def test_privileged_port_is_refused() -> None:
    with pytest.raises(PortNotAllowed, match="permission denied"):
        bind("127.0.0.1", 80)


def test_missing_permission_for_port_has_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Privileged(socket.socket):
        def bind(self, _address: object) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "socket", Privileged)
    with pytest.raises(PortNotAllowed, match=r"permission denied for port 80 on 127\.0\.0\.1"):
        bind("127.0.0.1", 80)


def test_unix_socket_is_accessible_only_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with bind_unix(str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    bind_unix(path).close()
    with bind_unix(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def test_unix_socket_in_use_is_not_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    with bind_unix(path), pytest.raises(PortInUse, match="another process listens"):
        bind_unix(path)


def test_bind_does_not_remove_a_regular_file(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    path.write_text("precious")
    with pytest.raises(PortNotAllowed):
        bind_unix(str(path))
    assert path.read_text() == "precious"


RACER = """
import sys
from time import monotonic
from llamasup.errors import PortInUse
from llamasup.core.proxy.listeners.bind import bind_unix
print("here", flush=True)
for line in sys.stdin:
    at, path = line.split()
    sock = None
    while monotonic() < float(at):  # both start in the same microsecond
        pass
    try:
        sock = bind_unix(path)
        print("won", flush=True)
    except PortInUse:
        print("refused", flush=True)
    sys.stdin.readline()
    if sock is not None:
        sock.close()
    print("closed", flush=True)
"""


def test_only_one_of_two_processes_takes_a_stale_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        assert answers(racers) == ["here", "here"]
        bind_unix(str(path)).close()
        for number in range(300):  # each round leaves a stale socket for the next
            assert sorted(answers(racers, f"{time.monotonic() + 0.003} {path}\n")) == ["refused", "won"], (
                number
            )
            assert answers(racers, "\n") == ["closed", "closed"]
    finally:
        for racer in racers:
            racer.communicate()
    assert os.listdir(tmp_path) == ["a.sock"]  # noqa: PTH208


def answers(racers: list[subprocess.Popen[bytes]], line: str = "") -> list[str]:
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write(line.encode())
        racer.stdin.flush()
    return [racer.stdout.readline().decode().rstrip() for racer in racers if racer.stdout is not None]


def test_wait_for_lock_of_another_process_has_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[socket_lock.__module__], "_LOCK_WAIT_S", 0.01)
    path = tmp_path / "a.sock"
    with socket_lock(path), pytest.raises(PortInUse, match="lock"):
        bind_unix(str(path))
    with bind_unix(str(path)):
        assert os.listdir(tmp_path) == ["a.sock"]  # noqa: PTH208


def make_folder(lock: Path) -> None:
    lock.mkdir()


def make_read_only(lock: Path) -> None:
    lock.touch(mode=0o400)


def make_link(lock: Path) -> None:
    lock.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "make",
    [
        make_folder,
        make_link,
        pytest.param(
            make_read_only, marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every file")
        ),
    ],
)
def test_lock_file_that_cannot_be_opened_is_named_with_a_remedy(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    lock = tmp_path / ".a.sock.lock"
    make(lock)
    with pytest.raises(PortNotAllowed, match=re.escape(f"cannot open the lock file '{lock}'")) as refused:
        bind_unix(str(tmp_path / "a.sock"))
    assert refused.value.remedy.startswith("Remove the lock file")


def test_missing_folder_is_not_reported_as_lock_file_error(tmp_path: Path) -> None:
    with pytest.raises(PortNotAllowed, match="cannot listen on") as refused:
        bind_unix(str(tmp_path / "none" / "a.sock"))
    assert "a folder that exists" in refused.value.remedy


def test_listeners_close_even_if_lock_file_cannot_be_opened(tmp_path: Path) -> None:
    listeners = listen([str(tmp_path / "a.sock")], 0)
    (tmp_path / ".a.sock.lock").mkdir()
    listeners.close()
    assert all(sock.fileno() == -1 for sock in listeners.sockets)
