"""The transparent proxy of ``llamasup wrap``, which leaves all checks to llama-server."""

from __future__ import annotations

import json

from msgspec.structs import replace

from llamasup.core.http.heads import HeadRules, HttpError
from llamasup.core.proxy import ProxyConfig
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import await_queued, start_generation
from tests.core.proxy.rig import CHAT, Rig, answer, get, post, status

WRAPPED = ProxyConfig(route_by_model=False, rules=HeadRules(transparent=True, credentials=True))
PREFIXED = replace(WRAPPED, rules=HeadRules(transparent=True, credentials=True, prefix=b"/x"))


def through(rig: Rig, raw: bytes, *lines: bytes) -> tuple[list[bytes], list[bytes]]:
    """Send a request, answer it with ``lines``: the header lines that the child and the client get."""
    client = rig.send(raw)
    child = rig.accept()
    received, _ = child.message()
    child.send(answer(b"{}", *lines))
    head, _ = client.message()
    return received.split(b"\r\n"), head.split(b"\r\n")


def test_transparent_proxy_forwards_the_request_unchanged(make_rig: MakeRig) -> None:
    rig = make_rig(WRAPPED)
    headers = [
        b"origin: https://page.example",
        b"authorization: Bearer k",
        b"x-api-key: k2",
        b"x-forwarded-for: 10.0.0.1",
        b"x-conversation-id: c1",
        b"cookie: a=b",
    ]
    raw = b"\r\n".join((b"GET /nowhere HTTP/1.1", b"Host: rebound.example:80", *headers, b"", b""))
    received, _ = through(rig, raw)
    assert received[:2] == [b"GET /nowhere HTTP/1.1", b"host: rebound.example:80"]
    assert received[2:-2] == headers


def test_transparent_proxy_forwards_cors_headers(make_rig: MakeRig) -> None:
    cors = (b"Access-Control-Allow-Origin: *", b"Access-Control-Allow-Headers: *")
    _, got = through(make_rig(WRAPPED), get(b"/props", b"Origin: null", method=b"OPTIONS"), *cors)
    assert set(cors) <= set(got)


def test_transparent_proxy_forwards_paths_of_llamasup(make_rig: MakeRig) -> None:
    rig = make_rig(WRAPPED, control=True)
    for path in (b"/health", b"/livez", b"/metrics", b"/llamasup/v1/status", b"/tools"):
        received, got = through(rig, get(path, b"Connection: close"), b"Connection: close")
        assert received[0] == b"GET " + path + b" HTTP/1.1"
        assert got[0] == b"HTTP/1.1 200 OK"
    received, _ = through(rig, post(b"/slots/0?action=save", b"{}"))
    assert received[0] == b"POST /slots/0?action=save HTTP/1.1"


def test_transparent_proxy_answers_health_while_nothing_serves(make_rig: MakeRig) -> None:
    rig = make_rig(PREFIXED)
    rig.backend.unavailable = HttpError(503, "Loading model")
    for path in (b"/x/health", b"/x/v1/health", b"/livez"):  # /livez is an ordinary path here
        head, body = rig.ask(get(path))
        assert status(head) == 503
        assert json.loads(body)["error"]["message"] == "Loading model"


def test_request_under_a_prefix_waits_for_the_model(make_rig: MakeRig) -> None:
    rig = make_rig(PREFIXED)
    rig.backend.unavailable = HttpError(503, "Loading model", queueable=True)
    client = rig.send(post(b"/x" + CHAT, b"{}"))
    await_queued(rig, 1)
    start_generation(rig)
    child = rig.accept()
    assert child.message()[0].startswith(b"POST /x" + CHAT)
    child.send(answer())
    assert status(client.message()[0]) == 200


def test_transparent_proxy_forwards_request_without_host(make_rig: MakeRig) -> None:
    received, _ = through(make_rig(WRAPPED), b"GET /health HTTP/1.1\r\n\r\n")
    assert received[:2] == [b"GET /health HTTP/1.1", b"Host: localhost"]


def test_transparent_proxy_replaces_credentials_with_key_of_the_child(make_rig: MakeRig) -> None:
    rules = HeadRules(transparent=True)
    rig = make_rig(replace(WRAPPED, rules=rules), api_key="own")
    received, _ = through(rig, get(b"/props", b"Authorization: Bearer theirs", b"X-Api-Key: theirs"))
    assert [line for line in received if b"theirs" in line or b"own" in line] == [
        b"Authorization: Bearer own"
    ]
