"""The client behind trusted reverse proxies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.http.forwarded import TrustedProxies

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
