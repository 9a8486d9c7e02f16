"""Notifications to systemd and sockets from it, over real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamasup.errors import ConfigInvalid
from llamasup.features.systemd import notify
from llamasup.features.systemd.notify import FIRST_FD, Notifier, take_sockets, take_systemd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux")


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """A service manager's socket, and its name as $NOTIFY_SOCKET has it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@llamasup-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(name.replace("@", "\0"))
        sock.settimeout(10)
        yield name, sock


def test_message_arrives_as_one_datagram(manager: tuple[str, socket.socket]) -> None:
    name, sock = manager
    environ = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid()), "A": "b"}
    systemd = take_systemd(environ)
    assert systemd is not None
    assert systemd.watchdog_s == 3.0
    assert environ == {"A": "b"}  # so that no child reports in our name
    systemd.notifier.send("READY=1", "STATUS=serving é")
    assert sock.recv(4096).decode() == "READY=1\nSTATUS=serving é"
    systemd.notifier.close()


def test_full_queue_delays_messages_and_keeps_their_order(
    manager: tuple[str, socket.socket],
) -> None:
    name, sock = manager
    notifier = Notifier(name)
    while fill(name.replace("@", "\0")):
        pass
    notifier.send("WATCHDOG=1", keep=False)
    notifier.send("READY=1")
    notifier.send("WATCHDOG=1", keep=False)
    notifier.send("STATUS=serving")
    sock.setblocking(False)
    read_all(sock)
    notifier.send("WATCHDOG=1", keep=False)
    assert read_all(sock) == [b"READY=1", b"STATUS=serving", b"WATCHDOG=1"]
    notifier.close()


def fill(address: str) -> int:
    """Fill the queue of one sender. Returns the number of messages."""
    sent = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        while True:
            try:
                sender.sendto(b"x", address)
            except BlockingIOError:
                return sent
            sent += 1


def read_all(sock: socket.socket) -> list[bytes]:
    read = []
    while True:
        try:
            read.append(sock.recv(4096))
        except BlockingIOError:
            return read


def test_missing_service_manager_is_ignored(tmp_path: Path) -> None:
    notifier = Notifier(str(tmp_path / "gone"))
    notifier.send("READY=1")
    notifier.send("x" * 10_000_000)  # and one that is too large for a datagram
    notifier.close()
    notifier.close()


@pytest.mark.parametrize("name", ["", "vsock:2:1", "relative"])
def test_no_notification_without_a_socket(name: str) -> None:
    environ = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1"} if name else {}
    assert take_systemd(environ) is None
    assert environ == {}


@pytest.mark.parametrize(
    ("interval", "pid", "seconds"),
    [("500000", "", 0.5), ("500000", "1", None), ("0", "", None), ("soon", "", None), ("", "", None)],
)
def test_watchdog_of_another_process_is_ignored(interval: str, pid: str, seconds: float | None) -> None:
    systemd = take_systemd({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": interval, "WATCHDOG_PID": pid})
    assert systemd is not None
    assert systemd.watchdog_s == seconds


# --- sockets: descriptors 3 and up belong to a process of their own --------------------------------

_TAKE = """
import os, sys
from llamasup.errors import LlamasupError
from llamasup.features.systemd.notify import take_sockets
os.environ["LISTEN_PID"] = os.environ.get("LISTEN_PID") or str(os.getpid())
try:
    taken = take_sockets(os.environ)
except LlamasupError as error:
    print(error.exit_code, error.message)
else:
    print([(each.getsockname(), each.getblocking(), each.get_inheritable()) for each in taken])
print([name for name in os.environ if name.startswith("LISTEN_")])
"""


def output_with_descriptors(*files: int, **environ: str) -> list[str]:
    """The output of a process that gets these descriptors as 3, 4, …"""
    moves = "; ".join(f"os.dup2({fd}, {FIRST_FD + 40 + at})" for at, fd in enumerate(files))
    downs = "; ".join(f"os.dup2({FIRST_FD + 40 + at}, {FIRST_FD + at})" for at in range(len(files)))
    program = f"import os\n{moves}\n{downs}\n{_TAKE}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LISTEN_FDS": str(len(files)), **environ},
        pass_fds=files,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines()


def test_sockets_are_taken_once_and_hidden_from_children() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as two,
    ):
        expected = [(sock.getsockname(), False, False) for sock in (one, two)]
        assert output_with_descriptors(one.fileno(), two.fileno()) == [str(expected), "[]"]


def test_sockets_for_another_process_are_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert output_with_descriptors(sock.fileno(), LISTEN_PID="1") == ["[]", "[]"]


def test_unix_socket_is_taken(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
        sock.listen()
        assert output_with_descriptors(sock.fileno()) == [str([(str(tmp_path / "s"), False, False)]), "[]"]


def test_datagram_socket_is_rejected_by_name() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        code, _, message = output_with_descriptors(sock.fileno(), LISTEN_FDNAMES="front")[0].partition(" ")
    assert code == "78"
    assert "'front'" in message
    assert "not a stream socket" in message


def test_connection_and_file_are_rejected() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
        Path(__file__).open() as file,
    ):
        assert "does not listen" in output_with_descriptors(sock.fileno())[0]
        assert "78 " in output_with_descriptors(listener.fileno(), file.fileno())[0]


def test_socket_of_a_family_without_a_name_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel that is newer than Python."""

    class Unknown(socket.socket):
        @property
        def family(self) -> int:  # type: ignore[override]
            return 999

    with socket.create_server(("127.0.0.1", 0)) as listening:
        descriptor = os.dup(listening.fileno())
        monkeypatch.setattr(notify, "FIRST_FD", descriptor)
        monkeypatch.setattr(socket, "socket", Unknown)
        with pytest.raises(ConfigInvalid, match="it is not a stream socket"):
            take_sockets({"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())})


def test_no_sockets_are_taken_without_activation() -> None:
    assert take_sockets({}) == ()
    assert take_sockets({"LISTEN_FDS": "x", "LISTEN_PID": str(os.getpid())}) == ()


def test_closed_descriptor_is_an_error() -> None:
    code, _, message = output_with_descriptors(LISTEN_FDS="60")[0].partition(" ")
    assert code == str(ConfigInvalid.exit_code)
    assert "descriptor" in message
