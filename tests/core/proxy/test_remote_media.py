"""URLs in bodies that llama-server would fetch (X7)."""

from __future__ import annotations

import json

import pytest

from llamasup.core.http.heads import HeadRules
from llamasup.core.proxy import Limits, ProxyConfig
from tests.core.http.test_body_scan import FETCHED, URL, chat
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.rig import CHAT, Rig, Wire, answer, error_of, get, post, status

BIG = "a" * (128 << 10)


def passes(rig: Rig, path: bytes, body: bytes, child: Wire | None = None) -> Wire:
    """Returns the connection to the child. ``child``: the connection of an earlier request."""
    client = rig.send(post(path, body))
    child = child or rig.accept()
    assert child.message()[1] == body
    child.send(answer())
    assert status(client.message()[0]) == 200
    return child


@pytest.mark.check("X7", "400 remote_media")
@pytest.mark.parametrize("route_by_model", [True, False])
@pytest.mark.parametrize("body", FETCHED.values(), ids=FETCHED)
def test_url_that_llama_server_would_fetch_is_refused(
    make_rig: MakeRig, body: str, *, route_by_model: bool
) -> None:
    rig = make_rig(ProxyConfig(route_by_model=route_by_model))
    client = rig.send(post(CHAT, body.encode()))
    error = error_of(client, 400)
    assert error["cause"] == "remote_media"
    assert "good.example" in str(error["message"])
    assert rig.backend.requested_models == []


@pytest.mark.parametrize(
    "path",
    [
        b"/v1/messages",
        b"/v1/responses",
        b"/v1/embeddings",
        b"/apply-template",
        b"/v1/messages/count_tokens",
        b"/v1/chat/completions/input_tokens",
        b"/v1/some/other",
    ],
)
def test_media_url_is_refused_on_every_route_that_may_take_media(rig: Rig, path: bytes) -> None:
    client = rig.send(post(path, FETCHED["a chat's image"].encode()))
    assert error_of(client, 400)["cause"] == "remote_media"


@pytest.mark.parametrize("path", [b"/v1/rerank", b"/v1/audio/transcriptions", b"/tokenize", b"/detokenize"])
def test_media_url_is_accepted_on_routes_without_media(rig: Rig, path: bytes) -> None:
    passes(rig, path, FETCHED["a chat's image"].encode())


def test_data_url_is_accepted(rig: Rig) -> None:
    data = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aHR0cDovLw=="}}
    passes(rig, CHAT, chat(data).encode())


def test_url_as_text_is_accepted(rig: Rig) -> None:
    passes(rig, CHAT, chat({"type": "text", "text": URL}, name=URL).encode())


@pytest.mark.parametrize(("allowed", "code"), [("good.example", 200), ("other.example", 400), ("any", 200)])
def test_media_url_of_configured_host_is_accepted(make_rig: MakeRig, allowed: str, code: int) -> None:
    rig = make_rig(ProxyConfig(remote_media=(allowed,)))
    client = rig.send(post(CHAT, FETCHED["a chat's image"].encode()))
    if code == 200:
        child = rig.accept()
        child.message()
        child.send(answer())
    assert status(client.message()[0]) == code


def test_body_too_complex_to_scan_is_refused_only_if_it_may_hold_a_url(make_rig: MakeRig) -> None:
    many = "[" + '"a",' * 14_000 + '"a"]'
    lists = ",".join([many] * 8)
    rig = make_rig(ProxyConfig(limits=Limits(stream_above_bytes=1 << 20)))
    client = rig.send(post(CHAT, f'{{"x":[{lists}],"y":"http"}}'.encode()))
    assert error_of(client, 400)["cause"] == "body_too_complex"
    passes(rig, CHAT, f'{{"x":[{lists}]}}'.encode())


@pytest.mark.check("X7", "400 above 25,000 strings and brackets, closed")
@pytest.mark.parametrize("stream_above_bytes", [64 << 10, 1 << 20], ids=["forwarded", "buffered"])
@pytest.mark.parametrize("path", [b"/apply-template", b"/v1/messages/count_tokens"])
def test_complexity_limit_is_lower_without_key_limits(
    make_rig: MakeRig, path: bytes, stream_above_bytes: int
) -> None:
    body = b'{"x":[%b""]}' % (b'{"url":"http"},' * 8_000)
    limits = Limits(stream_above_bytes=stream_above_bytes)
    rig = make_rig(ProxyConfig(route_by_model=False, limits=limits))
    child = passes(rig, CHAT, body)
    passes(rig, path, b'{"x":[%b""]}' % (b'{"url":"http"},' * 6_000), child)
    client = rig.send(post(path, body))
    error = error_of(client, 400)
    assert error["cause"] == "body_too_complex"
    assert "25,000" in str(error["remedy"])
    assert client.sees_the_end()


def test_forwarded_body_too_complex_to_scan_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(route_by_model=False))
    client = rig.send(
        post(CHAT, b'{"x":' + b"[" * 600 + b"]" * 600 + b',"y":"%b","z":"http"}' % BIG.encode())
    )
    assert error_of(client, 400)["cause"] == "body_too_complex"


def test_transparent_proxy_does_not_check_urls(make_rig: MakeRig) -> None:
    rules = HeadRules(transparent=True, credentials=True)
    rig = make_rig(ProxyConfig(route_by_model=False, rules=rules))
    passes(rig, CHAT, FETCHED["a chat's image"].encode())


# --- forwarded bodies


@pytest.mark.check("X7", "400; llama-server never gets the last byte")
@pytest.mark.parametrize("last", [1, 30, 60_000])
def test_urls_of_a_forwarded_body_are_checked_before_its_last_byte(make_rig: MakeRig, last: int) -> None:
    rig = make_rig(ProxyConfig(route_by_model=False))
    client = rig.connect()
    image = {"type": "image_url", "image_url": {"url": URL}}
    body = json.dumps(
        {"messages": [{"role": "user", "content": [image, {"type": "text", "text": BIG}]}]}
    ).encode()
    client.send(get(CHAT, b"Content-Length: %d" % len(body), method=b"POST"), body[:-last])
    child = rig.accept()
    child.until(b'"messages"')
    client.send(body[-last:])
    assert error_of(client, 400)["cause"] == "remote_media"
    assert rig.record().outcome == "refused"
    try:
        rest = child.rest()
    except ConnectionResetError:
        rest = b""
    assert not rest.endswith(body[-1:])


def test_allowed_url_in_forwarded_body_is_accepted(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(route_by_model=False, remote_media=("good.example",)))
    image = {"type": "image_url", "image_url": {"url": URL}}
    passes(rig, CHAT, chat(image, name=BIG).encode())
