"""Requests as clients and health checks of other programs send them: each of them is answered."""

from __future__ import annotations

import json

import pytest

from llamasup.core.http.heads import HttpError
from llamasup.core.proxy import Limits, ProxyConfig
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import CHAT, Rig, answer, field, get, post, status
from tests.core.proxy.test_many_models import ABSENT, MakeMany, error_of, json_post, make_many, reaches

__all__ = ["make_many"]

# --- paths that no llama-server has


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        (b"/api/show", "`ollama.listen`"),
        (b"/api/v0/models", "`ollama.listen`"),
        (b"/v1/v1/chat/completions", "ends in /v1"),
        (b"/v1/images/generations", "base URL"),
        (b"/v1/audio/speech", "base URL"),
        (b"/sdapi/v1/txt2img", "base URL"),
        (b"/v1/moderations", "base URL"),
        (b"/v1beta/models/other:generateContent", "base URL"),
        (b"/openai/deployments/other/chat/completions", "base URL"),
        (b"/v1/chat/completion", "base URL"),
    ],
)
def test_unknown_path_loads_no_model(make_many: MakeMany, path: bytes, remedy: str) -> None:
    rig, many = make_many(default="other")
    other = many.by_id["other"]
    other.unavailable = ABSENT
    for request in (json_post(path, model="other"), post(path, b"{}"), get(path), json_post(path, model="x")):
        error = error_of(rig.ask(request), 404)
        assert error["cause"] == "unknown_path"
        assert remedy in error["remedy"]
    assert other.waits == 0
    assert many.created == []


@pytest.mark.parametrize(
    "why",
    [HttpError(503, "Loading model", cause="loading"), HttpError(503, "was killed", cause="killed")],
)
def test_unknown_path_of_a_model_that_starts_again_is_no_404(make_many: MakeMany, why: HttpError) -> None:
    """A client tries a 503 again, and no 404."""
    rig, many = make_many()
    many.by_id["other"].unavailable = why
    assert error_of(rig.ask(json_post(b"/v1/custom", model="other")), 503)["cause"] == why.cause


def test_loaded_model_gets_the_unknown_paths_of_a_newer_build(make_many: MakeMany) -> None:
    rig, many = make_many()
    reaches(rig, many, "other", json_post(b"/v1/new", model="other"))
    many.by_id["other"].unavailable = ABSENT
    client = rig.send(json_post(b"/v1/audio/transcriptions", model="other"))
    rig.call(many.by_id["other"].loaded)
    child = many.accept("other", rig)
    assert child.message()[0].startswith(b"POST /v1/audio/transcriptions ")
    child.send(answer())
    assert status(client.message()[0]) == 200


def test_key_learns_from_unknown_paths_no_more_than_from_known_ones(make_many: MakeMany) -> None:
    rig, many = make_many(ProxyConfig(key_file=keys_of("one name=a models=bge")), default="other")
    for unavailable in (None, ABSENT):
        many.by_id["other"].unavailable = unavailable
        for name in ("other", "nothing"):
            request = json_post(b"/v1/new", b"X-Api-Key: one", model=name)
            assert error_of(rig.ask(request), 403)["cause"] == "key_models"


# --- WebSockets

UPGRADE = (b"Connection: keep-alive, Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13")


@pytest.mark.parametrize("path", [b"/v1/responses", b"/v1/realtime?model=x", b"/", b"/livez", b"/api/chat"])
@pytest.mark.parametrize(
    "config",
    [ProxyConfig(), ProxyConfig(route_by_model=False), ProxyConfig(api_keys=("k",))],
    ids=["serve", "run", "keys"],
)
def test_websocket_gets_426_at_once(make_rig: MakeRig, config: ProxyConfig, path: bytes) -> None:
    client = make_rig(config).send(get(path, *UPGRADE) + b"\x81\x85frame")
    head, body = client.message()
    assert status(head) == 426
    assert field(head, b"upgrade") == b"HTTP/1.1"
    assert head.count(b"\r\nConnection: Upgrade\r\n") == 1
    assert json.loads(body)["error"]["cause"] == "websocket"
    assert client.sees_the_end()


def test_websocket_through_a_proxy_that_drops_the_offer_gets_426_too(rig: Rig) -> None:
    assert status(rig.ask(get(b"/v1/responses", b"Sec-WebSocket-Version: 13"))[0]) == 426


@pytest.mark.parametrize(
    "request_",
    [
        get(b"/livez", b"Upgrade: websocket"),  # RFC 9110 §7.8: without the connection option it is void
        get(b"/livez", b"Connection: Upgrade", b"Upgrade: h2c", b"HTTP2-Settings: AAMA"),
        get(b"/livez", *UPGRADE[:2]).replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
    ids=["no connection option", "h2c", "HTTP/1.0"],
)
def test_other_offers_are_ignored(rig: Rig, request_: bytes) -> None:
    assert status(rig.ask(request_)[0]) == 200


# --- slashes


@pytest.mark.parametrize(
    ("sent", "plain"),
    [
        (b"//v1/chat/completions", b"/v1/chat/completions"),
        (b"/v1//chat/completions", b"/v1/chat/completions"),
        (b"/v1/chat/completions/", b"/v1/chat/completions"),
        (b"///v1//embeddings//", b"/v1/embeddings"),
        (b"http://localhost//v1/rerank/", b"/v1/rerank"),
        (b"/tokenize/?add_special=true", b"/tokenize?add_special=true"),
    ],
)
def test_further_slashes_are_taken_out(rig: Rig, sent: bytes, plain: bytes) -> None:
    client = rig.send(post(sent, b"{}"))
    child = rig.accept()
    assert child.message()[0].startswith(b"POST " + plain + b" HTTP/1.1\r\n")
    child.send(answer())
    assert status(client.message()[0]) == 200
    assert rig.record().path == plain.partition(b"?")[0].decode()


@pytest.mark.parametrize("path", [b"//v1/models", b"/v1/models/", b"//v1/models/other", b"/v1/models/other/"])
def test_list_is_found_with_further_slashes(make_many: MakeMany, path: bytes) -> None:
    rig, _ = make_many()
    assert status(rig.ask(get(path))[0]) == 200


# --- requests about the server


@pytest.mark.parametrize("default", [None, "other"])
@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS"])
def test_address_of_many_models_answers_itself(
    make_many: MakeMany, method: bytes, default: str | None
) -> None:
    rig, many = make_many(default=default)
    many.by_id["other"].unavailable = ABSENT
    client = rig.send(get(b"/", method=method))
    head = client.head()
    assert status(head) == (204 if method == b"OPTIONS" else 200)
    assert many.by_id["other"].waits == 0


@pytest.mark.parametrize("path", [b"/props", b"/props?model=", b"/props/", b"/props?autoload=false"])
def test_properties_of_many_models_are_those_of_a_router(make_many: MakeMany, path: bytes) -> None:
    rig, _ = make_many()
    head, body = rig.ask(get(path))
    assert status(head) == 200
    properties = json.loads(body)
    assert properties["role"] == "router"
    assert properties["default_generation_settings"] == {"params": {}, "n_ctx": 0}


@pytest.mark.parametrize("path", [b"/health", b"/v1/health", b"/livez", b"/readyz"])
def test_health_paths_have_options(make_rig: MakeRig, path: bytes) -> None:
    rig = make_rig(ProxyConfig(api_keys=("k",)))
    head = rig.send(get(path, method=b"OPTIONS")).head()
    assert status(head) == 204
    assert field(head, b"allow") == b"GET, HEAD, OPTIONS"
    evil = get(path, b"Origin: http://evil.example", method=b"OPTIONS")
    assert status(rig.ask(evil)[0]) == 403


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS"])
@pytest.mark.parametrize("lines", [b"", b"User-Agent: HAProxy\r\n"])
def test_http_1_0_needs_no_host(rig: Rig, method: bytes, lines: bytes) -> None:
    client = rig.send(method + b" /health HTTP/1.0\r\n" + lines + b"\r\n")
    assert status(client.message()[0] if method == b"GET" else client.head()) in (200, 204)
    assert client.sees_the_end()


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (b"Host:\r\n", 400),
        (b"Host: evil.example\r\n", 403),
        (b"Origin: http://\r\n", 403),
        (b"Origin: http://evil.example\r\n", 403),
        (b"Origin: null\r\n", 403),
    ],
)
def test_http_1_0_is_checked_for_the_rest(rig: Rig, lines: bytes, code: int) -> None:
    assert status(rig.ask(b"GET /props HTTP/1.0\r\n" + lines + b"\r\n")[0]) == code


# --- names of this machine


@pytest.mark.parametrize(
    "host",
    [
        b"host.docker.internal:8080",
        b"gateway.containers.internal",  # of Podman
        b"llama",  # of Docker Compose
        b"llama_server-1",
        b"nas.local",
        b"llm.default.svc.cluster.local:80",  # of Kubernetes
        b"NAS.LAN.",
        b"box.home.arpa",
        b"app.localhost",
        b"build7.example.net",  # of this machine
    ],
)
@pytest.mark.parametrize("path", [b"/livez", CHAT])
def test_name_that_no_public_dns_resolves_is_accepted(make_rig: MakeRig, host: bytes, path: bytes) -> None:
    rig = make_rig(ProxyConfig(machine="Build7.example.net"))
    request = get(path).replace(b"Host: localhost", b"Host: " + host)
    client = rig.send(request)
    if path == CHAT:
        child = rig.accept()
        child.message()
        child.send(answer())
    assert status(client.message()[0]) == 200
    own_page = get(b"/livez", b"Origin: http://" + host).replace(b"Host: localhost", b"Host: " + host)
    assert status(rig.ask(own_page)[0]) == 200
    foreign_page = get(b"/livez", b"Origin: http://evil.example").replace(
        b"Host: localhost", b"Host: " + host
    )
    assert status(rig.ask(foreign_page)[0]) == 403


def test_with_a_valid_key_every_host_is_accepted_and_no_other_client_profits(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(api_keys=("k",)))
    foreign = get(b"/props").replace(b"Host: localhost", b"Host: llm.example.net")
    with_key = foreign.replace(b"\r\n\r\n", b"\r\nX-Api-Key: k\r\n\r\n")
    client, child = rig.begin(with_key)
    child.send(answer())
    assert status(client.message()[0]) == 200
    for request in (
        foreign,
        with_key.replace(b"Key: k", b"Key: l"),
        get(b"/livez").replace(b"localhost", b"llm.example.net"),
    ):
        error = error_of(rig.ask(request), 403)
        assert (error["cause"], error["remedy"]) == (
            "foreign_host",
            "Use localhost or the address of the server, or allow the name with "
            "--allow-host llm.example.net (in a config: http.allow_hosts).",
        )
    page = with_key.replace(b"\r\n\r\n", b"\r\nOrigin: http://evil.example\r\n\r\n")
    error = error_of(rig.ask(page), 403)
    assert (error["cause"], "--allow-origin" in error["remedy"]) == ("foreign_origin", True)
    assert status(rig.ask(with_key.replace(b"llm.example.net", b"a b"))[0]) == 400


# --- reverse proxies


@pytest.mark.parametrize(
    ("trusted", "lines", "client"),
    [
        ((), (b"X-Forwarded-For: 203.0.113.7",), "127.0.0.1"),
        (("10.0.0.0/8",), (b"X-Forwarded-For: 203.0.113.7",), "127.0.0.1"),
        (("127.0.0.1",), (b"X-Forwarded-For: 203.0.113.7",), "203.0.113.7"),
        (("127.0.0.1",), (b"X-Forwarded-For: 1.2.3.4", b"x-forwarded-for: 203.0.113.7"), "203.0.113.7"),
        (("127.0.0.1",), (b"X-Real-IP: 203.0.113.7", b"Forwarded: for=203.0.113.7"), "127.0.0.1"),
        (("127.0.0.1",), (), "127.0.0.1"),
    ],
)
def test_client_behind_a_trusted_proxy_is_recorded(
    make_rig: MakeRig, trusted: tuple[str, ...], lines: tuple[bytes, ...], client: str
) -> None:
    rig = make_rig(ProxyConfig(trusted_proxies=trusted))
    proxy = rig.send(post(CHAT, b"{}", *lines))
    child = rig.accept()
    for _ in range(3):  # the third one is recognized by its bytes
        assert b"orwarded" not in child.message()[0]
        child.send(answer())
        proxy.message()
        assert rig.record().client == client
        proxy.send(post(CHAT, b"{}", *lines))


def test_one_connection_of_a_proxy_has_many_clients(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(trusted_proxies=("127.0.0.1",), limits=Limits(connections_per_client=1)))
    one, two = rig.connect(), rig.connect()
    for number in range(4):
        for wire in (one, two):
            address = b"203.0.113.%d" % number
            wire.send(get(b"/livez", b"X-Forwarded-For: " + address))
            assert status(wire.message()[0]) == 200
            assert rig.record().client == address.decode()


@pytest.mark.parametrize(
    ("request_", "cause"),
    [
        (get(b"/v1/responses", *UPGRADE), "websocket"),
        (get(b"/v1/responses", b"X-Llamasup-Priority: very"), "bad_priority"),
        (get(b"/v1/responses", b"Host: other"), ""),
    ],
)
def test_refusal_of_a_head_is_recorded_with_its_path_and_client(
    make_rig: MakeRig, request_: bytes, cause: str
) -> None:
    rig = make_rig(ProxyConfig(trusted_proxies=("127.0.0.1",)))
    rig.ask(request_.replace(b"\r\n\r\n", b"\r\nX-Forwarded-For: 203.0.113.7\r\n\r\n"))
    record = rig.record()
    assert (record.method, record.path, record.client) == ("GET", "/v1/responses", "203.0.113.7")
    assert record.cause == cause


def test_refusal_of_a_key_is_recorded_with_its_name(make_rig: MakeRig) -> None:
    rig = make_rig(
        ProxyConfig(key_file=keys_of("one name=phone rights=inference\ntwo name=me rights=control"))
    )
    assert status(rig.ask(get(b"/llamasup/v1/status", b"X-Api-Key: one"))[0]) == 403
    assert rig.record().client == "key:phone"


def test_root_has_one_spelling(make_rig: MakeRig) -> None:
    """The links of its page are relative: below //, they lead elsewhere."""
    rig = make_rig(ProxyConfig(console=True))
    assert status(rig.ask(get(b"///", b"Accept: text/html"))[0]) == 404


def test_console_is_found_below_a_prefix(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(console=True))
    for path in (b"/", b"/llamasup"):
        head, _ = rig.ask(get(path, b"Accept: text/html"))
        assert (status(head), field(head, b"location")) == (302, b"llamasup/")
