"""The control API over TCP: only keys with the right `control` have access, and no web page."""

from __future__ import annotations

import json
import select

import pytest

from llamasup.core.proxy import Limits, ProxyConfig
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import CHAT, STREAM_HEAD, Clock, Rig, Wire, answer, chunk, field, get, post, status

KEYS = ProxyConfig(key_file=keys_of("infer\nadmin rights=control\nboth rights=inference,control"))
NO_CONTROL = ProxyConfig(key_file=keys_of("infer"))
POSTS = [
    b"/llamasup/v1/models/tiny/load",
    b"/llamasup/v1/models/org%2Frepo:q8_0/unload",
    b"/llamasup/v1/models/org/repo:q8_0/restart?wait=0",
    b"/llamasup/v1/reload",
    b"/llamasup/v1/shutdown?now=1",
]
READS = [b"/llamasup/v1/status", b"/llamasup/v1/events", b"/llamasup/v1/models/tiny/logs?follow=1"]
EVENT = chunk(b'data: {"event":"state"}\n\n')


def cause_of(client: Wire, code: int) -> str:
    head, body = client.message()
    assert status(head) == code, body
    return str(json.loads(body)["error"]["cause"])


def nothing_was_forwarded(rig: Rig) -> bool:
    assert rig._control is not None
    return select.select([rig._control], [], [], 0)[0] == [] and rig.backend.requested_models == []


@pytest.mark.check("X4", "401 or 403")
@pytest.mark.parametrize("path", [*POSTS, *READS])
def test_control_api_needs_a_key_with_the_right_control(make_rig: MakeRig, path: bytes) -> None:
    rig = make_rig(KEYS, control=True)
    client = rig.connect()
    method = b"GET" if path in READS else b"POST"
    for line, code, cause in (
        (b"X: y", 401, "api_key"),
        (b"Authorization: Bearer wrong", 401, "api_key"),
        (b"x-api-key: infer", 403, "key_rights"),
    ):
        client.send(get(path, line, b"Content-Length: 0", method=method))
        assert cause_of(client, code) == cause
    assert nothing_was_forwarded(rig)
    client.send(get(path, b"x-api-key: admin", b"Content-Length: 0", method=method))
    control = rig.accept_control()
    head = control.head()
    assert head.startswith(method + b" " + path + b" HTTP/1.1\r\n")
    assert b"admin" not in head
    control.send(answer(b"{}"))
    assert status(client.message()[0]) == 200


def test_control_api_learns_which_key_a_request_has(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(key_file=keys_of("secret name=ops@home rights=control")), control=True)
    for lines in ((b"x-api-key: secret",), (b"x-api-key: secret", b"X-Llamasup-Client: key:other")):
        client = rig.send(get(b"/llamasup/v1/status", *lines))
        control = rig.accept_control()
        assert field(control.head(), b"x-llamasup-client") == b"key%3Aops%40home"
        control.send(answer(b"{}", b"Connection: close"))
        assert status(client.message()[0]) == 200


@pytest.mark.check("X4", "403")
@pytest.mark.parametrize("config", [ProxyConfig(), NO_CONTROL], ids=["no keys", "no key that may control"])
@pytest.mark.parametrize("path", POSTS)
def test_control_api_is_closed_over_tcp_without_a_control_key(
    make_rig: MakeRig, config: ProxyConfig, path: bytes
) -> None:
    rig = make_rig(config, control=True)
    client = rig.send(post(path, b"", b"Authorization: Bearer infer"))
    expected = "control_closed"
    assert cause_of(client, 403) == expected
    assert nothing_was_forwarded(rig)


@pytest.mark.check("X4", "400, plain or encoded")
@pytest.mark.parametrize("path", [b"/llamasup/v1/upgrade", b"/llamasup/v1/models/tiny/load"])
def test_path_with_a_control_character_is_refused(make_rig: MakeRig, path: bytes) -> None:
    rig = make_rig(KEYS, control=True)
    client = rig.connect()
    for byte in (b"%%%02x" % byte for byte in (*range(0x20), 0x7F)):
        for spelling in (path + byte, path[:-1] + byte + path[-1:], b"/llamasup/" + byte + path):
            client.send(get(spelling, b"x-api-key: admin", b"Content-Length: 0", method=b"POST"))
            assert cause_of(client, 400) == "path_spelling"
    assert nothing_was_forwarded(rig)


@pytest.mark.parametrize(
    "line", [b"X: y", b"X-Llamasup-Through-Proxy: 0", b"Connection: x-llamasup-through-proxy"]
)
def test_control_api_sees_that_a_request_came_through_the_proxy(make_rig: MakeRig, line: bytes) -> None:
    rig = make_rig(KEYS, control=True)
    rig.send(get(b"/llamasup/v1/upgrade", b"x-api-key: admin", line, b"Content-Length: 0", method=b"POST"))
    assert b"\r\nx-llamasup-through-proxy: 1\r\n" in rig.accept_control().head()


def test_key_with_the_right_control_may_see_an_upgrade(make_rig: MakeRig) -> None:
    rig = make_rig(KEYS, control=True)
    client = rig.send(get(b"/llamasup/v1/upgrade", b"x-api-key: admin"))
    control = rig.accept_control()
    assert control.head().startswith(b"GET /llamasup/v1/upgrade HTTP/1.1")
    control.send(answer(b"{}"))
    assert status(client.message()[0]) == 200


@pytest.mark.check("X3", "403")
@pytest.mark.parametrize(
    "origin", [b"https://evil.example", b"null", b"http://localhost:1", b"http://127.0.0.1"]
)
def test_foreign_web_page_cannot_stop_llamasup_even_with_a_key(make_rig: MakeRig, origin: bytes) -> None:
    """A form or fetch() of a page sends this without a preflight: a POST with a plain body."""
    rig = make_rig(KEYS, control=True)
    for key in (b"X: y", b"x-api-key: admin"):
        client = rig.connect()
        lines = (b"Origin: " + origin, b"Content-Type: text/plain", key)
        client.send(post(b"/llamasup/v1/shutdown", b"a=b", *lines))
        assert cause_of(client, 403) == "foreign_origin"
    assert nothing_was_forwarded(rig)


@pytest.mark.check("X2", "403")
@pytest.mark.parametrize("line", [b"", b"x-api-key: wrong\r\n", b"X-Llamasup-Console: wrong\r\n"])
def test_page_with_a_rebound_dns_name_cannot_stop_llamasup(make_rig: MakeRig, line: bytes) -> None:
    """DNS rebinding: for the browser this is the server of the page, so that it sends no foreign Origin."""
    rig = make_rig(KEYS, control=True)
    client = rig.connect()
    client.send(
        b"POST /llamasup/v1/shutdown HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n"
        + line
        + b"Content-Length: 0\r\n\r\n"
    )
    assert cause_of(client, 403) == "foreign_host"
    assert nothing_was_forwarded(rig)


@pytest.mark.check("X4", "401")
def test_page_of_our_own_origin_also_needs_a_key(make_rig: MakeRig) -> None:
    """llama-server's own pages have this origin. Code injected into one cannot send a key in a header."""
    rig = make_rig(KEYS, control=True)
    client = rig.send(post(b"/llamasup/v1/shutdown", b"", b"Origin: http://localhost", b"Cookie: key=admin"))
    assert cause_of(client, 401) == "api_key"
    assert nothing_was_forwarded(rig)


def test_request_timeout_does_not_apply_to_control_events(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(
        ProxyConfig(
            key_file=KEYS.key_file,
            route_by_model=False,
            request_timeout_s=100.0,
            limits=Limits(sweep_s=0.01),
        ),
        control=True,
    )
    listener = rig.send(get(b"/llamasup/v1/events", b"x-api-key: both"))
    control = rig.accept_control()
    control.head()
    control.send(STREAM_HEAD + EVENT)
    listener.until(EVENT)

    client = rig.send(post(CHAT, b"{}", b"x-api-key: both"))
    rig.accept().message()
    clock.pass_s(100.0)
    assert cause_of(client, 504) == "request_timeout"  # it began later

    control.send(EVENT)
    listener.until(EVENT)
