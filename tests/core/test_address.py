from __future__ import annotations

import pytest

from llamasup.core.address import Address, TcpAddress, UnixAddress


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (TcpAddress("127.0.0.1", 8080), "http://127.0.0.1:8080"),
        (TcpAddress("::1", 8080), "http://[::1]:8080"),
        (UnixAddress("/run/1.sock"), "http://localhost"),
    ],
)
def test_an_address_is_a_url_that_clients_take(address: Address, url: str) -> None:
    assert address.url == url
