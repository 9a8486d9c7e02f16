from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.http.address import (
    ANY_HOST,
    Address,
    TcpAddress,
    TrustedProxies,
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
    parse_worker,
)
from llamasup.core.settings.kinds import InvalidValue, RpcWorker
from llamasup.core.settings.model import worker_identity
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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("127.0.0.1:50052", "127.0.0.1:50052"),
        ("localhost:1", "127.0.0.1:1"),
        ("LocalHost:01", "127.0.0.1:1"),
        ("10.0.0.2:50052", "10.0.0.2:50052"),
        ("192.168.1.9:65535", "192.168.1.9:65535"),
        ("tls://worker.example.net:7000", "tls://worker.example.net:7000"),
        ("tls://[2001:db8::1]:7000", "tls://[2001:db8::1]:7000"),
        ("tls://[2001:DB8:0::1]:7000", "tls://[2001:db8::1]:7000"),
        ("tls://Worker.Example.NET.:7000", "tls://worker.example.net:7000"),
        ("tls://LOCALHOST:7000", "tls://localhost:7000"),
    ],
)
def test_private_address_or_tunnel_is_accepted(text: str, shown: str) -> None:
    assert str(parse_worker(text)) == shown
    assert RpcWorker().parse(text) == shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0.0.0.0:50052", "every address of this machine"),
        ("8.8.8.8:50052", "a public address or a name"),
        ("worker.local:50052", "a public address or a name"),
        ("[fd00::1]:50052", "IPv6"),
        ("10.0.0.2", "not the address"),
        ("10.0.0.2:0", "not the address"),
        ("10.0.0.2:65536", "not the address"),
        ("tcp://10.0.0.2:1", "not the address"),
        ("tls://a..b:7000", "not the address"),
        ("tls://.a:7000", "not the address"),
        ("tls://-a:7000", "not the address"),
        ("tls://a-.b:7000", "not the address"),
        (f"tls://{'a' * 64}:7000", "not the address"),
        (f"tls://{'a.' * 126}aa:7000", "not the address"),
        ("tls://10.0.2:7000", "not the address"),
        ("tls://999.1.1.1:7000", "not the address"),
        ("tls://[::::]:7000", "not the address"),
    ],
)
def test_other_address_is_refused_with_a_reason(text: str, why: str) -> None:
    with pytest.raises(UsageInvalid, match=why):
        parse_worker(text)
    with pytest.raises(InvalidValue, match=why):
        RpcWorker().parse(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("localhost:7", "127.0.0.1:7"),
        ("tls://localhost:7", "tls://127.0.0.1:7"),
        ("tls://A.example:7", "tls://a.example.:007"),
        ("tls://10.0.0.2:7", "10.0.0.2:7"),
    ],
)
def test_two_notations_of_one_worker_have_one_identity(one: str, other: str) -> None:
    assert parse_worker(one).identity == parse_worker(other).identity
    assert worker_identity(one) != worker_identity("127.0.0.1:8")


@pytest.mark.parametrize(
    ("host", "private"),
    [("10.1.2.3", True), ("172.16.0.1", True), ("127.0.0.1", False), ("0.0.0.0", False), ("name", False)],
)
def test_loopback_and_names_are_not_private(host: str, private: bool) -> None:
    assert is_private(host) is private


def test_kind_describes_itself() -> None:
    kind = RpcWorker()
    assert "private address" in kind.allowed
    assert kind.schema()["type"] == "string"


PROXIES = TrustedProxies(("10.0.0.0/8", "fd00::1", "unix"))


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "client"),
    [
        ("10.0.0.1", b"203.0.113.7", "203.0.113.7"),
        ("10.0.0.1", b"203.0.113.7:4711", "203.0.113.7"),  # Azure writes the port
        ("10.0.0.1", b"2001:db8::1", "2001:db8::1"),
        ("10.0.0.1", b"[2001:db8::1]:4711", "2001:db8::1"),
        ("10.0.0.1", b"::ffff:203.0.113.7", "203.0.113.7"),
        ("10.0.0.1", b"1.2.3.4, 203.0.113.7", "203.0.113.7"),  # the client has sent 1.2.3.4
        ("10.0.0.1", b"1.2.3.4,203.0.113.7,10.0.0.9 , 10.1.1.1", "203.0.113.7"),  # several proxies
        ("10.0.0.1", b"10.0.0.7, 10.0.0.8", "10.0.0.7"),  # a client in the network of the proxies
        ("10.0.0.1", b"", "10.0.0.1"),
        ("10.0.0.1", b"unknown", "10.0.0.1"),
        ("10.0.0.1", b"203.0.113.7, _hidden", "10.0.0.1"),
        ("10.0.0.1", b"203.0.113.7, , 10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", b"localhost", "10.0.0.1"),
        ("10.0.0.1", b"for=1.2.3.4", "10.0.0.1"),
        ("10.0.0.1", b"\xff\x00", "10.0.0.1"),
        ("10.0.0.1", b"1.2.3.4," + b"10.0.0.2," * 100 + b"10.0.0.3", "10.0.0.2"),
        ("fd00::1", b"203.0.113.7", "203.0.113.7"),
        ("fd00::1%eth0", b"203.0.113.7", "203.0.113.7"),
        ("", b"203.0.113.7", "203.0.113.7"),
        ("192.0.2.1", b"203.0.113.7", "192.0.2.1"),  # nobody trusts this one
        ("fd00::2", b"203.0.113.7", "fd00::2"),
    ],
)
def test_client_is_the_last_address_that_is_no_proxy(peer: str, forwarded_for: bytes, client: str) -> None:
    assert PROXIES.client_of(peer, forwarded_for) == client


@pytest.mark.parametrize("peer", ["", "127.0.0.1", "::1"])
def test_no_proxy_is_trusted_by_default(peer: str) -> None:
    assert TrustedProxies().client_of(peer, b"203.0.113.7") == peer
    assert peer not in TrustedProxies(("10.0.0.1",))


def test_peer_that_is_no_address_is_no_proxy() -> None:
    assert "client" not in PROXIES


@given(st.binary(max_size=200))
def test_every_header_names_a_client(forwarded_for: bytes) -> None:
    assert PROXIES.client_of("10.0.0.1", forwarded_for)
    assert PROXIES.client_of("192.0.2.1", forwarded_for) == "192.0.2.1"
