"""Listeners on several addresses: they share a port, and remove their files."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from llamasup.core.http.address import TcpAddress, UnixAddress
from llamasup.core.proxy.listeners.listen import listen
from llamasup.core.proxy.listeners.tls import TlsContext
from llamasup.errors import ConfigInvalid, PortInUse, PortNotAllowed
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.rig import Wire, get, status


def test_all_addresses_share_the_port_and_first_tcp_address_is_shown(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    listeners = listen([path, "127.0.0.1", "127.0.0.2"], 0)
    names = [sock.getsockname() for sock in listeners.sockets]
    try:
        port = names[1][1]
        assert names == [path, ("127.0.0.1", port), ("127.0.0.2", port)]
        assert listeners.address == TcpAddress("127.0.0.1", port)
    finally:
        listeners.close()
    assert not Path(path).exists()


def test_umask_sets_permissions_of_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    before = os.umask(0o027)
    try:
        listeners = listen([str(path)], 1)
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert listeners.address == UnixAddress(str(path))
    listeners.close()


def test_close_stops_own_sockets_in_all_processes_but_not_foreign_ones(tmp_path: Path) -> None:
    for is_ours in (True, False):
        listeners = listen([str(tmp_path / "a.sock"), "127.0.0.1"], 0)
        listeners.ours = is_ours
        names = [sock.getsockname() for sock in listeners.sockets]
        elsewhere = [sock.dup() for sock in listeners.sockets]  # as in a forked process
        (tmp_path / "a.sock").rename(tmp_path / "same.sock")  # this test is not about the file
        listeners.close()
        for name, other in zip((str(tmp_path / "same.sock"), names[1]), elsewhere, strict=True):
            with other, socket.socket(other.family) as client:
                assert (client.connect_ex(name) == 0) is not is_ours
        (tmp_path / "same.sock").unlink()


def test_close_does_not_remove_file_that_replaced_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    listeners = listen([str(path)], 1)
    path.rename(tmp_path / "ours")
    path.write_text("theirs")
    listeners.close()
    assert path.read_text() == "theirs"


def test_listen_does_not_remove_a_regular_file(tmp_path: Path) -> None:
    file = tmp_path / "a.sock"
    file.write_text("theirs")
    with pytest.raises(PortNotAllowed, match="not a socket"):
        listen([str(file)], 1)
    assert file.read_text() == "theirs"


def test_unix_socket_with_full_backlog_is_not_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(path)
        busy.listen(0)
        waiting.connect(path)  # now its backlog is full
        with pytest.raises(PortInUse, match="another process"):
            listen([path], 1)
    assert Path(path).exists()
    listeners = listen([path], 1)  # now it is stale
    listeners.close()


def test_if_one_address_fails_none_stays_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortInUse):
        listen([str(path), "127.0.0.1"], taken.getsockname()[1])
    assert not path.exists()
    with pytest.raises(PortNotAllowed):
        listen([str(tmp_path / "missing" / "a.sock")], 1)


def test_reuse_port_shares_a_port() -> None:
    one = listen(["127.0.0.1"], 0, reuse_port=True)
    assert isinstance(one.address, TcpAddress)
    two = listen(["127.0.0.1"], one.address.port, reuse_port=True)
    assert two.address == one.address
    one.close()
    two.close()


def test_error_says_what_is_wrong_with_certificate_or_key(tmp_path: Path) -> None:
    def made(name: str, *words: str) -> tuple[str, str]:
        files = str(tmp_path / f"{name}.key"), str(tmp_path / f"{name}.pem")
        new = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-subj",
            "/CN=x",
        ]
        subprocess.run([*new, *words, "-keyout", files[0], "-out", files[1]], check=True, capture_output=True)
        return files

    key, chain = made("one", "-nodes")
    other, _ = made("other", "-nodes")
    encrypted, its_chain = made("encrypted", "-passout", "pass:secret")
    missing = str(tmp_path / "missing")
    for key_file, chain_file, reason in (
        (key, missing, f"'{missing}': No such file"),
        (missing, chain, f"'{missing}': No such file"),
        (key, str(tmp_path), f"'{tmp_path}': Is a directory"),
        (key, key, f"'{key}' contains no PEM certificate"),
        (chain, chain, f"'{chain}' contains no PEM key"),
        (other, chain, "the key belongs to another certificate"),
        (
            encrypted,
            its_chain,
            f"'{encrypted}' contains no PEM key, or one with a password",
        ),  # without the option
    ):
        with pytest.raises(ConfigInvalid) as refused:
            TlsContext(key_file, chain_file)
        assert refused.value.message.endswith(".")
        assert f": {reason}" in refused.value.message


@pytest.mark.parametrize(("hosts", "reached"), [(["::"], True), (["::", "127.0.0.2"], False)])
def test_dual_stack_accepts_ipv4_unless_other_hosts_are_named(hosts: list[str], reached: bool) -> None:
    """As llama-server (b11434) [run]."""
    listeners = listen(hosts, 0, dual_stack=True)
    port = listeners.sockets[0].getsockname()[1]
    try:
        for host, answers in (("::1", True), ("127.0.0.1", reached)):
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as client:
                assert (client.connect_ex((host, port)) == 0) is answers
    finally:
        listeners.close()


def test_ipv4_address_of_dual_stack_connection_is_an_accepted_host(make_rig: MakeRig) -> None:
    rig = make_rig(sockets=listen(["::"], 0, dual_stack=True).sockets)
    client = Wire(socket.create_connection(("127.0.0.2", rig.address[1])))
    try:
        for host, code in ((b"127.0.0.2", 200), (b"127.0.0.3", 403)):
            client.send(get(b"/livez").replace(b"Host: localhost", b"Host: " + host))
            assert status(client.message()[0]) == code
    finally:
        client.close()
