"""A proxy that leaves all judgement to llama-server: what ``llamasup wrap`` puts before it."""

from __future__ import annotations

import dataclasses
import json

from llamasup.http.heads import HeadRules
from llamasup.proxy import ProxyConfig
from llamasup.queueing.endpoint import Unavailable
from tests.proxy.conftest import MakeRig
from tests.proxy.rig import CHAT, Rig, answer, get, post, status
from tests.proxy.test_waiting import serves, wait_until

WRAPPED = ProxyConfig(route_by_model=False, rules=HeadRules(transparent=True, credentials=True))
PREFIXED = dataclasses.replace(WRAPPED, rules=HeadRules(transparent=True, credentials=True, prefix=b"/x"))


def through(rig: Rig, raw: bytes, *lines: bytes) -> tuple[list[bytes], list[bytes]]:
    """Send a request, answer it with ``lines``: the header lines that the child and the client get."""
    client = rig.connect()
    client.send(raw)
    child = rig.accept()
    asked, _ = child.message()
    child.send(answer(b"{}", *lines))
    head, _ = client.message()
    return asked.split(b"\r\n"), head.split(b"\r\n")


def test_llama_server_sees_its_client_as_it_is(make_rig: MakeRig) -> None:
    rig = make_rig(WRAPPED)
    said = [
        b"origin: https://page.example",
        b"authorization: Bearer k",
        b"x-api-key: k2",
        b"x-forwarded-for: 10.0.0.1",
        b"x-conversation-id: c1",
        b"cookie: a=b",
    ]
    raw = b"\r\n".join((b"GET /nowhere HTTP/1.1", b"Host: rebound.example:80", *said, b"", b""))
    asked, _ = through(rig, raw)
    assert asked[:2] == [b"GET /nowhere HTTP/1.1", b"host: rebound.example:80"]
    assert asked[2:-2] == said


def test_its_cors_headers_come_back(make_rig: MakeRig) -> None:
    cors = (b"Access-Control-Allow-Origin: *", b"Access-Control-Allow-Headers: *")
    _, got = through(make_rig(WRAPPED), get(b"/props", b"Origin: null", method=b"OPTIONS"), *cors)
    assert set(cors) <= set(got)


def test_paths_that_llamasup_has_elsewhere_are_its_own(make_rig: MakeRig) -> None:
    rig = make_rig(WRAPPED, control=True)
    for path in (b"/health", b"/livez", b"/metrics", b"/llamasup/v1/status", b"/tools"):
        asked, got = through(rig, get(path, b"Connection: close"), b"Connection: close")
        assert asked[0] == b"GET " + path + b" HTTP/1.1"
        assert got[0] == b"HTTP/1.1 200 OK"
    asked, _ = through(rig, post(b"/slots/0?action=save", b"{}"))
    assert asked[0] == b"POST /slots/0?action=save HTTP/1.1"


def test_while_nothing_serves_its_health_is_answered_for_it(make_rig: MakeRig) -> None:
    rig = make_rig(PREFIXED)
    rig.backend.unavailable = Unavailable(503, "Loading model")
    for path in (b"/x/health", b"/x/v1/health", b"/livez"):  # the last is any other path here
        head, body = rig.ask(get(path))
        assert status(head) == 503
        assert json.loads(body)["error"]["message"] == "Loading model"


def test_behind_a_prefix_a_request_still_waits_for_the_model(make_rig: MakeRig) -> None:
    rig = make_rig(PREFIXED)
    rig.backend.unavailable = Unavailable(503, "Loading model", queueable=True)
    client = rig.connect()
    client.send(post(b"/x" + CHAT, b"{}"))
    wait_until(rig, 1)
    serves(rig)
    child = rig.accept()
    assert child.message()[0].startswith(b"POST /x" + CHAT)
    child.send(answer())
    assert status(client.message()[0]) == 200


def test_without_a_host_header_it_is_llama_servers_to_refuse(make_rig: MakeRig) -> None:
    asked, _ = through(make_rig(WRAPPED), b"GET /health HTTP/1.1\r\n\r\n")
    assert asked[:2] == [b"GET /health HTTP/1.1", b"Host: localhost"]


def test_a_child_with_a_key_of_its_own_gets_that_one_alone(make_rig: MakeRig) -> None:
    rules = HeadRules(transparent=True)
    rig = make_rig(dataclasses.replace(WRAPPED, rules=rules), api_key="own")
    asked, _ = through(rig, get(b"/props", b"Authorization: Bearer theirs", b"X-Api-Key: theirs"))
    assert [line for line in asked if b"theirs" in line or b"own" in line] == [b"Authorization: Bearer own"]
