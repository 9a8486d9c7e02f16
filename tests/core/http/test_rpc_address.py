"""Which addresses an RPC worker may have."""

from __future__ import annotations

import pytest

from llamasup.core.http.address import is_private
from llamasup.core.http.rpc_address import parse_worker
from llamasup.core.settings.address_kinds import RpcWorker, worker_identity
from llamasup.core.settings.kinds import InvalidValue
from llamasup.errors import UsageInvalid


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
