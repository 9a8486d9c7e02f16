from __future__ import annotations

import pytest

from llamasup.core.http.address import (
    ANY_HOST,
    Address,
    TcpAddress,
    UnixAddress,
    addresses,
    allowed_host,
    allowed_media_host,
    allowed_origin,
    host_of_url,
    invalid_host_remedy,
    is_local,
    is_loopback,
    is_private,
)
from llamasup.errors import UsageInvalid


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


def test_authority_is_the_configured_host_and_port() -> None:
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
def test_only_loopback_is_private(host: str, loopback: bool) -> None:
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
def test_invalid_address_has_a_remedy(host: str, remedy: str) -> None:
    assert remedy in (invalid_host_remedy(host) or "")


@pytest.mark.parametrize("host", ["::1", "fe80::1%eth0", "0.0.0.0", "localhost", "./a.sock", "my-machine"])
def test_possible_address_has_no_remedy(host: str) -> None:
    assert invalid_host_remedy(host) is None


# --- allowlists ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llm.example.net", "llm.example.net"),
        ("LLM.Example.net.", "llm.example.net"),
        ("10.0.0.1", "10.0.0.1"),
        ("fd00::1", "fd00::1"),
        ("[fd00::1]", "fd00::1"),
    ],
)
def test_a_host_is_a_name_or_an_address(text: str, name: str) -> None:
    assert allowed_host(text) == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("*", "DNS rebinding"),
        ("*.example.net", "DNS rebinding"),
        ("llm.example.net:8080", "has a port"),
        ("[fd00::1]:80", "has a port"),
        ("http://llm.example.net", "not a host name"),
        ("a/b", "not a host name"),
        ("a b", "not a host name"),
        ("bücher.example", "not a host name"),
        ("", "not a host name"),
    ],
)
def test_invalid_host_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageInvalid, match=said):
        allowed_host(text)


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://chat.example.net", "https://chat.example.net"),
        ("HTTPS://Chat.example.net:443", "https://chat.example.net"),
        ("https://chat.example.net:80", "https://chat.example.net:80"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("http://a:80", "http://a"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("tauri://localhost", "tauri://localhost"),
    ],
)
def test_an_origin_is_spelled_as_browsers_send_it(text: str, origin: str) -> None:
    assert allowed_origin(text) == origin


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("*", "every web page"),
        ("https://*.example.net", "every web page"),
        ("null", "not an origin"),
        ("chat.example.net", "not an origin"),
        ("https://chat.example.net/", "not an origin"),
        ("https://chat.example.net/app", "not an origin"),
        ("https://", "not an origin"),
        ("https://a:99999", "not an origin"),
        ("://a", "not an origin"),
        ("https://bücher.example", "not an origin"),
    ],
)
def test_invalid_origin_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageInvalid, match=said):
        allowed_origin(text)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("CDN.example.net", "cdn.example.net"),
        ("10.0.0.5:8000", "10.0.0.5:8000"),
        ("[FD00::1]:80", "[fd00::1]:80"),
        ("[fd00::1]", "[fd00::1]"),
        ("any", ANY_HOST),
    ],
)
def test_a_media_host_may_have_a_port(text: str, host: str) -> None:
    assert allowed_media_host(text) == host


@pytest.mark.parametrize("text", ["*", "*.example", "http://a", "a/b", "a@b", "a:99999", "a:", ""])
def test_an_invalid_media_host_is_refused(text: str) -> None:
    with pytest.raises(UsageInvalid, match="is not a valid media host"):
        allowed_media_host(text)


@pytest.mark.parametrize(
    ("host", "private"),
    [
        ("192.168.1.20", True),
        ("100.64.3.4", True),
        ("fd00::1", True),
        ("fe80::1%eth0", True),
        ("8.8.8.8", False),
        ("2001:db8::1", False),
        ("desk.local", False),
    ],
)
def test_private_addresses_are_those_of_networks_without_the_internet(host: str, private: bool) -> None:
    assert is_private(host) is private


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://Desk.example.net:8080", "desk.example.net"),
        ("http://[::1]", "::1"),
        ("http://a:0", None),
        ("http://a b", None),
    ],
)
def test_host_of_a_url(url: str, host: str | None) -> None:
    assert host_of_url(url) == host
