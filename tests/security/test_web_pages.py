"""Pages in a browser: a name that leads to us is not enough (X2), nor is being on this machine (X3)."""

from __future__ import annotations

import json

import pytest

from llamasup.core.proxy import ProxyConfig
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.rig import CHAT, Rig, answer, field, get, post, status


def with_host(host: bytes, path: bytes = b"/props") -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"


def verdict(rig: Rig, raw: bytes) -> tuple[int, str]:
    """Of a request that does not reach the child: status and cause."""
    head, body = rig.ask(raw)
    assert rig.backend.requested_models == []
    return status(head), json.loads(body)["error"].get("cause", "")


@pytest.mark.check("X2", "400")
@pytest.mark.parametrize(
    "host",
    [
        b"localhost@evil.example",
        b"evil.example@localhost",
        b"localhost:80:80",
        b"localhost:",
        b"localhost:-1",
        b"localhost:65536",
        b"localhost:8o80",
        b":80",
        b"localhost,localhost",
        b"localhost;x",
        b"localhost?x",
        b"localhost#x",
        b"localhost\\evil",
        b"localhost%00",
        b"%6cocalhost",
        b"[::1",
        b"::1",
        b"[fe80::1%25lo]",
        b"[::1]x",
        b"[v1.x]",
        b"http://localhost",
        b"\xe2\x84\xaaocalhost",
        b"a" * 300,
        b"*",
    ],
)
def test_a_host_that_is_no_name_and_port_is_refused(rig: Rig, host: bytes) -> None:
    assert verdict(rig, with_host(host)) == (400, "")


@pytest.mark.check("X2", "403")
@pytest.mark.parametrize(
    "host",
    [
        b"evil.example",
        b"localhost.evil.example",
        b"evil.localhost.example",
        b"localhost.localdomain",
        b"ai",  # countries may give their own domain an address
        b"evil.local.example",
        b"fritz.box",
        b"host.docker.internal.evil.example",
        b"xn--p1ai",
        b"127.0.0.1.nip.io",
        b"127.1",
        b"2130706433",
        b"0x7f000001",
        b"0177.0.0.1",
        b"127.0.0.2",
        b"0.0.0.0",
        b"[::]",
        b"[::ffff:127.0.0.1]",
        b"169.254.169.254",
        b"xn--lcalhost-z9a",
    ],
)
def test_a_name_that_is_not_ours_is_refused(rig: Rig, host: bytes) -> None:
    assert verdict(rig, with_host(host)) == (403, "foreign_host")
    assert verdict(rig, with_host(host, b"/livez")) == (403, "foreign_host")


@pytest.mark.check("X2", "400")
def test_an_absolute_target_does_not_excuse_the_host_header(rig: Rig) -> None:
    for lines in (b"", b"Host: a b\r\n", b"Host: localhost\r\nHost: localhost\r\n", b"Host:\r\n"):
        raw = b"GET http://localhost/props HTTP/1.1\r\n" + lines + b"\r\n"
        assert verdict(rig, raw) == (400, "")


@pytest.mark.check("X2", "400 or 403")
@pytest.mark.parametrize(
    "target",
    [
        b"http://evil.example/props",
        b"http://localhost@evil.example/props",
        b"http://evil.example@localhost/props",
        b"http://localhost:99999/props",
        b"http://localhost.evil.example:80",
        b"https://evil.example?localhost",
    ],
)
def test_a_foreign_target_is_refused_whatever_host_says(rig: Rig, target: bytes) -> None:
    assert verdict(rig, get(target))[0] in (400, 403)


@pytest.mark.check("X3", "403")
@pytest.mark.parametrize(
    "origin",
    [
        b"null",
        b"NULL",
        b"http://evil.example",
        b"http://localhost.evil.example",
        b"http://localhost@evil.example",
        b"http://localhost:1",
        b"http://localhost/",
        b"http://localhost, http://evil.example",
        b"http://localhost http://evil.example",
        b"//localhost",
        b"localhost",
        b"file://localhost",
        b"chrome-extension://localhost",
        b"moz-extension://x",
        b"http:localhost",
        b"http://127.0.0.1",
        b"*",
    ],
)
def test_a_page_that_is_not_ours_is_refused_and_gets_no_cors_header(rig: Rig, origin: bytes) -> None:
    for raw in (
        post(CHAT, b"{}", b"Origin: " + origin, b"Content-Type: text/plain"),  # what needs no preflight
        get(CHAT, b"Origin: " + origin, b"Access-Control-Request-Method: POST", method=b"OPTIONS"),
    ):
        head, body = rig.ask(raw)
        assert (status(head), json.loads(body)["error"]["cause"]) == (403, "foreign_origin")
        assert b"access-control-" not in head.lower()
    assert rig.backend.requested_models == []


@pytest.mark.check("X3")
def test_a_preflight_of_a_configured_page_is_answered_here_and_no_other(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(origins=("https://app.example",)))
    asks = (b"Access-Control-Request-Method: POST", b"Access-Control-Request-Private-Network: true")
    client = rig.connect()
    client.send(get(CHAT, b"Origin: https://app.example", *asks, method=b"OPTIONS"))
    head = client.head()
    assert status(head) == 204
    assert field(head, b"access-control-allow-origin") == b"https://app.example"
    assert field(head, b"vary") == b"Origin"
    assert field(head, b"access-control-allow-credentials") is None
    assert field(head, b"access-control-allow-private-network") is None
    assert b"*" not in head
    for origin in (b"http://app.example", b"https://app.example:8443", b"https://app.example.evil", b"null"):
        assert verdict(rig, get(CHAT, b"Origin: " + origin, *asks, method=b"OPTIONS"))[0] == 403
    assert rig.backend.requested_models == []


@pytest.mark.check("X3", "401")
def test_a_configured_page_needs_a_key_like_everybody(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(origins=("https://app.example",), api_keys=("k",)))
    head, _ = rig.ask(post(CHAT, b"{}", b"Origin: https://app.example"))
    assert status(head) == 401
    assert field(head, b"access-control-allow-origin") == b"https://app.example"
    client = rig.connect()
    client.send(post(CHAT, b"{}", b"Origin: https://app.example", b"Authorization: Bearer k"))
    child = rig.accept()
    asked, _ = child.message()
    assert field(asked, b"origin") is None
    child.send(answer(b"{}", b"Access-Control-Allow-Origin: *"))
    head, _ = client.message()
    assert [line for line in head.split(b"\r\n") if line.lower().startswith(b"access-control-")] == [
        b"Access-Control-Allow-Origin: https://app.example",
        b"Access-Control-Expose-Headers: X-Request-Id, Server-Timing, Retry-After, X-Llamasup-Repaired, "
        b"X-Llamasup-Ignored-Tools, X-Llamasup-Moved-System",
    ]


@pytest.mark.parametrize("path", [CHAT, b"/health", b"/metrics"])
def test_a_preflight_allows_the_headers_that_the_page_asks_for(make_rig: MakeRig, path: bytes) -> None:
    rig = make_rig(ProxyConfig(origins=("https://app.example",)))
    asks = (b"Origin: https://app.example", b"Access-Control-Request-Method: GET")
    for asked, allowed in (
        (b"authorization, x-stainless-os", b"authorization, x-stainless-os"),
        (b"bad name, *", b"Authorization, Content-Type, X-Api-Key, X-Request-Id, X-Llamasup-Priority"),
    ):
        client = rig.connect()
        client.send(get(path, *asks, b"Access-Control-Request-Headers: " + asked, method=b"OPTIONS"))
        head = client.head()
        assert (status(head), field(head, b"access-control-allow-headers")) == (204, allowed)
