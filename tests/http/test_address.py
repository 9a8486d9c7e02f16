from __future__ import annotations

import pytest

from llamasup.http.address import (
    Address,
    TcpAddress,
    UnixAddress,
    addresses,
    invalid_host_remedy,
    is_local,
    is_loopback,
)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (TcpAddress("127.0.0.1", 8080), "http://127.0.0.1:8080"),
        (TcpAddress("::1", 8080), "http://[::1]:8080"),
        (UnixAddress("/run/1.sock"), "http://localhost"),
        (TcpAddress("0.0.0.0", 8080), "http://127.0.0.1:8080"),
        (TcpAddress("0", 8080), "http://127.0.0.1:8080"),
        (TcpAddress("::", 8080, tls=True), "https://[::1]:8080"),
    ],
)
def test_an_address_is_a_url_that_clients_take(address: Address, url: str) -> None:
    assert address.url == url


def test_it_is_written_as_it_was_said() -> None:
    said = [TcpAddress(host, 80).authority for host in ("0.0.0.0", "::", "example.net")]
    assert said == ["0.0.0.0:80", "[::]:80", "example.net:80"]


def test_tls_shows_in_the_url() -> None:
    assert TcpAddress("::1", 8080, tls=True).url == "https://[::1]:8080"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("LocalHost", True),
        ("0.0.0.0", False),
        ("192.168.1.2", False),
        ("::", False),
        ("my-machine", False),
        ("", False),
    ],
)
def test_only_loopback_is_out_of_reach_for_others(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_people_are_shown_the_path_of_a_socket() -> None:
    assert UnixAddress("/run/a.sock").shown == "/run/a.sock"
    assert TcpAddress("::1", 8080).shown == "http://[::1]:8080"


def test_a_host_may_be_several() -> None:
    assert addresses("127.0.0.1, ::1,/run/x.sock,::1,") == ["127.0.0.1", "::1", "/run/x.sock"]
    assert [is_local(host) for host in ("127.0.0.1", "/run/x.sock", "0.0.0.0", "example.net")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("host", "remedy"),
    [
        ("/run/llm", "ends in .sock"),
        ("127.0.0.1:9000", "--port"),
        ("http://localhost", "only the name"),
        ("[::1]", "brackets"),
        ("[::1]:80", "brackets"),
    ],
)
def test_what_can_be_no_address_is_told_what_it_should_be(host: str, remedy: str) -> None:
    assert remedy in (invalid_host_remedy(host) or "")


@pytest.mark.parametrize("host", ["::1", "fe80::1%eth0", "0.0.0.0", "localhost", "./a.sock", "my-machine"])
def test_what_may_be_an_address_is_left_to_the_system(host: str) -> None:
    assert invalid_host_remedy(host) is None
