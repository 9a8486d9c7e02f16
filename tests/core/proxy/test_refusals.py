"""Refused requests: framing (X9), Host (X2), Origin (X3), keys (X4), closed paths (X7), limits (X8)."""

from __future__ import annotations

import json

import pytest

from llamasup.core.http.heads import HeadRules
from llamasup.core.proxy import Limits, ProxyConfig
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import CHAT, Clock, Rig, answer, chunk, field, get, post, status


def refused(rig: Rig, raw: bytes, code: int) -> bytes:
    """Send bytes; expect an error object and a closed connection. Returns the message."""
    client = rig.send(raw)
    head, body = client.message()
    assert status(head) == code, body
    assert field(head, b"content-type") == b"application/json; charset=utf-8"
    assert field(head, b"connection") == b"close"
    error = json.loads(body)["error"]
    assert error["code"] == code
    assert client.sees_the_end()
    assert rig.backend.requested_models == []
    return str(error["message"]).encode()


def declined(rig: Rig, raw: bytes, code: int) -> dict[str, object]:
    """Send a complete request; expect an error object and a connection that stays open."""
    client = rig.send(raw)
    head, body = client.message()
    assert status(head) == code, body
    client.send(get(b"/livez"))
    assert status(client.message()[0]) == 200
    assert rig.backend.requested_models == []
    return dict(json.loads(body)["error"])


def passes(rig: Rig, raw: bytes) -> bytes:
    """Send a complete request; expect that the child gets it. Returns the head at the child."""
    client, child = rig.send(raw), rig.accept()
    head, _ = child.message()
    child.send(answer(b"{}", b"Connection: close"))
    assert status(client.message()[0]) == 200
    return head


# --- X9: framing

HOST = b"Host: localhost\r\n"
POST = b"POST /a HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
SMUGGLED = {
    "Content-Length and Transfer-Encoding": POST
    + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "Transfer-Encoding and Content-Length": POST
    + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two Content-Lengths": POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "two equal Content-Lengths": POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "a list of Content-Lengths": POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "a signed Content-Length": POST + b"Content-Length: +3\r\n\r\nabc",
    "a negative Content-Length": POST + b"Content-Length: -3\r\n\r\nabc",
    "a hexadecimal Content-Length": POST + b"Content-Length: 0x3\r\n\r\nabc",
    "an empty Content-Length": POST + b"Content-Length: \r\n\r\nabc",
    "a Content-Length beyond 64 bits": POST + b"Content-Length: 99999999999999999999999\r\n\r\nabc",
    "a bare LF behind the request line": b"GET /a HTTP/1.1\n" + HOST + b"\r\n",
    "a bare LF behind a header": b"GET /a HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n",
    "a bare LF at the end of the head": b"GET /a HTTP/1.1\r\n" + HOST + b"\n",
    "a bare CR in a header": b"GET /a HTTP/1.1\r\n" + HOST + b"X: a\rb\r\n\r\n",
    "a NUL in a header": b"GET /a HTTP/1.1\r\n" + HOST + b"X: a\0b\r\n\r\n",
    "a folded header": b"GET /a HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n",
    "a space before the colon": b"GET /a HTTP/1.1\r\nHost : localhost\r\n\r\n",
    "a space before the first header": b"GET /a HTTP/1.1\r\n Host: localhost\r\n\r\n",
    "a header without a name": b"GET /a HTTP/1.1\r\n" + HOST + b": x\r\n\r\n",
    "a chunk size with 0x": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "a signed chunk size": CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n",
    "an empty chunk size": CHUNKED + b"\r\nabc\r\n0\r\n\r\n",
    "a chunk size behind a space": CHUNKED + b" 3\r\nabc\r\n0\r\n\r\n",
    "a chunk size that overflows": CHUNKED + b"FFFFFFFFFFFFFFFFF\r\nabc\r\n0\r\n\r\n",
    "a bare LF behind a chunk size": CHUNKED + b"3\nabc\r\n0\r\n\r\n",
    "a bare LF behind a chunk": CHUNKED + b"3\r\nabc\n0\r\n\r\n",
    "a chunk longer than its size": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "a CR in a chunk extension": CHUNKED + b'3;a="b\rc"\r\nabc\r\n0\r\n\r\n',
    "a bare LF in a chunk extension": CHUNKED + b"3;a\nb\r\nabc\r\n0\r\n\r\n",
    "a coding with chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "two Transfer-Encodings": POST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\n",
    "chunks in HTTP/1.0": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a method in lower case": b"get /a HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target that is no path": b"GET a HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target with a fragment": b"GET /a#b HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target with raw UTF-8": "GET /ü HTTP/1.1\r\n".encode() + HOST + b"\r\n",
    "a star for GET": b"GET * HTTP/1.1\r\n" + HOST + b"\r\n",
    "a version that there is not": b"GET /a HTTP/1.2\r\n" + HOST + b"\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.check("X9", "400, closed")
@pytest.mark.parametrize("raw", SMUGGLED.values(), ids=SMUGGLED)
def test_invalid_framing_is_refused_and_connection_closed(rig: Rig, raw: bytes) -> None:
    refused(rig, raw + get(b"/smuggled"), 400)


@pytest.mark.check("X9")
def test_request_after_invalid_framing_is_never_served(rig: Rig) -> None:
    client = rig.send(get(b"/livez") + b"garbage\r\n\r\n" + get(b"/livez"))
    assert status(client.message()[0]) == 200
    assert status(client.message()[0]) == 400
    assert client.sees_the_end()


@pytest.mark.check("X9", "405, 505 or 417, closed")
@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"TRACE / HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"PROPFIND / HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 505),
        (get(b"/", b"Expect: a miracle"), 417),
    ],
    ids=["CONNECT", "TRACE", "PROPFIND", "HTTP/2.0", "Expect"],
)
def test_unsupported_request_is_refused_with_its_status(rig: Rig, raw: bytes, code: int) -> None:
    refused(rig, raw, code)


# --- X2: Host


@pytest.mark.check("X2", "400, closed")
@pytest.mark.parametrize(
    "raw",
    [
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: \r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: me@localhost\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost:port\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost:99999\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost, evil\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost/evil\r\n\r\n",
    ],
    ids=["absent", "twice", "empty", "a space", "user", "port", "large port", "list", "path"],
)
def test_missing_double_or_malformed_host_is_refused(rig: Rig, raw: bytes) -> None:
    refused(rig, raw, 400)


@pytest.mark.check("X2", "403 foreign_host")
@pytest.mark.parametrize("path", [b"/livez", b"/health", b"/props", CHAT, b"/metrics"])
def test_foreign_host_is_refused_on_every_path(rig: Rig, path: bytes) -> None:
    for host in (
        b"evil.example",
        b"localhost.evil.example",
        b"127.0.0.2",
        b"192.168.1.1:80",
        b"[::2]",
        b"0.0.0.0",
    ):
        error = declined(rig, get(path).replace(b"Host: localhost", b"Host: " + host), 403)
        assert error["cause"] == "foreign_host"


@pytest.mark.check("X2", "403 foreign_host")
def test_foreign_authority_in_the_target_is_refused(rig: Rig) -> None:
    assert declined(rig, get(b"http://evil.example/livez"), 403)["cause"] == "foreign_host"


@pytest.mark.parametrize(
    "host", [b"localhost", b"LOCALHOST:1", b"localhost.", b"127.0.0.1:8080", b"[::1]:80"]
)
def test_loopback_names_are_accepted_hosts(rig: Rig, host: bytes) -> None:
    head, _ = rig.ask(get(b"/livez").replace(b"Host: localhost", b"Host: " + host))
    assert status(head) == 200


def test_configured_names_are_accepted_hosts(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(hosts=("Llama.Example",)))
    head, _ = rig.ask(get(b"/livez").replace(b"localhost", b"llama.example:443"))
    assert status(head) == 200


# --- X3: Origin


@pytest.mark.check("X3", "403 foreign_origin, for every method")
@pytest.mark.parametrize("origin", [b"null", b"https://evil.example", b"http://localhost:1", b"file://", b""])
def test_foreign_origin_is_refused(rig: Rig, origin: bytes) -> None:
    for path in (b"/livez", CHAT):
        for method in (b"GET", b"POST", b"OPTIONS"):
            error = declined(rig, get(path, b"Origin: " + origin, method=method), 403)
            assert error["cause"] == "foreign_origin"


@pytest.mark.check("X3", "400, closed")
def test_two_origins_are_refused(rig: Rig) -> None:
    refused(rig, get(b"/livez", b"Origin: http://localhost", b"Origin: http://evil.example"), 400)


def test_page_of_our_own_origin_may_call(rig: Rig) -> None:
    head, _ = rig.ask(get(b"/livez", b"Origin: http://localhost"))
    assert status(head) == 200
    assert field(head, b"access-control-allow-origin") is None


@pytest.mark.check("X3")
def test_page_of_a_configured_origin_may_call(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(origins=("https://app.example",), api_keys=("k",)))
    client = rig.connect()
    origin = b"Origin: https://app.example"
    client.send(get(CHAT, origin, b"Access-Control-Request-Method: POST", method=b"OPTIONS"))
    head = client.head()  # the preflight of a browser has no key
    assert status(head) == 204
    assert field(head, b"access-control-allow-origin") == b"https://app.example"
    client.send(get(b"/props", origin, b"Authorization: Bearer k"))
    child = rig.accept()
    child.head()
    child.send(answer(b"{}", b"Access-Control-Allow-Origin: *", b"Access-Control-Allow-Credentials: true"))
    head = client.head()
    assert field(head, b"access-control-allow-origin") == b"https://app.example"
    assert field(head, b"access-control-allow-credentials") is None
    assert field(head, b"vary") == b"Origin"


@pytest.mark.check("X3")
def test_cors_headers_of_the_child_are_dropped(rig: Rig) -> None:
    client, child = rig.begin(get())
    child.send(answer(b"{}", b"Access-Control-Allow-Origin: *"))
    assert field(client.head(), b"access-control-allow-origin") is None


DATA_ONLY = ProxyConfig(route_by_model=False, rules=HeadRules(data_only=True))


@pytest.mark.check("X16", "403 fetch_destination")
@pytest.mark.parametrize("path", [b"/", b"/x.html?model=m", b"/props", b"/v1/anything"])
@pytest.mark.parametrize("use", [b"document", b"iframe", b"script", b"serviceworker", b"empty, script"])
def test_browser_shows_and_runs_no_answer_of_a_model(make_rig: MakeRig, path: bytes, use: bytes) -> None:
    error = declined(make_rig(DATA_ONLY), get(path, b"Sec-Fetch-Dest: " + use), 403)
    assert error["cause"] == "fetch_destination"


@pytest.mark.check("X16", "no type of a page, and sandboxed")
def test_answer_of_a_model_is_data(make_rig: MakeRig) -> None:
    rig = make_rig(DATA_ONLY)
    client = rig.send(get(b"/x.html", b"Sec-Fetch-Dest: empty"))
    child = rig.accept()
    child.message()
    child.send(answer(b"<script>", b"Content-Type: text/html", b"Set-Cookie: a=b"))
    head = client.head()
    assert field(head, b"content-type") == b"application/octet-stream"
    assert field(head, b"content-security-policy") == b"sandbox; default-src 'none'"
    assert field(head, b"set-cookie") is None


@pytest.mark.parametrize("use", [b"document", b"script", b"style", b"serviceworker"])
def test_page_of_llama_server_is_shown_and_has_no_service_worker(rig: Rig, use: bytes) -> None:
    request = get(b"/bundle.js", b"Sec-Fetch-Dest: " + use)
    if use == b"serviceworker":
        assert declined(rig, request, 403)["cause"] == "fetch_destination"
    else:
        passes(rig, request)


def test_answers_of_llamasup_itself_are_shown(make_rig: MakeRig) -> None:
    client = make_rig(DATA_ONLY).send(get(b"/livez", b"Sec-Fetch-Dest: document"))
    assert status(client.message()[0]) == 200


# --- X4: keys

KEYS = ProxyConfig(key_file=keys_of("first\nsecond\nadmin rights=inference,control"))


@pytest.mark.check("X4", "401")
@pytest.mark.parametrize("path", [b"/", b"/props", CHAT, b"/metrics", b"/anything", b"/v1/models"])
def test_request_without_a_key_is_refused(make_rig: MakeRig, path: bytes) -> None:
    rig = make_rig(KEYS, control=True)
    for lines in (
        (),
        (b"Authorization: Bearer wrong",),
        (b"x-api-key: wrong",),
        (b"Authorization: Basic first",),
    ):
        client = rig.send(get(path, *lines))
        head, body = client.message()
        assert status(head) == 401
        assert field(head, b"www-authenticate") == b"Bearer"
        assert json.loads(body)["error"]["type"] == "authentication_error"
    assert rig.backend.requested_models == []


@pytest.mark.check("X4", "llama-server sees no key of a client")
@pytest.mark.parametrize(
    "line",
    [
        b"Authorization: Bearer first",
        b"authorization: bearer second",
        b"X-API-Key: second",
        b"Authorization: Bearer admin",
        b"x-api-key: wrong\r\nAuthorization: Bearer first",
    ],
)
def test_every_key_is_accepted_in_either_header(make_rig: MakeRig, line: bytes) -> None:
    head = passes(make_rig(KEYS), get(b"/props", line))
    assert field(head, b"authorization") is None
    assert field(head, b"x-api-key") is None


@pytest.mark.parametrize("path", [b"/livez", b"/readyz", b"/health", b"/v1/health"])
def test_health_routes_are_public(make_rig: MakeRig, path: bytes) -> None:
    assert status(make_rig(KEYS).ask(get(path))[0]) == 200


@pytest.mark.check("X4", "401")
@pytest.mark.parametrize(
    "path",
    [
        b"/HEALTH",
        b"/%68ealth",
        b"/health%00",
        b"/./health",
        b"/x/../health",
        b"/health;a=b",
        b"/livez/../props",
        b"/v1/health/x",
        b"/health%2f..%2fprops",
        b"http://localhost//%68ealth",
    ],
)
def test_unusual_spelling_of_a_public_path_needs_a_key(make_rig: MakeRig, path: bytes) -> None:
    assert declined(make_rig(KEYS), get(path), 401)["cause"] == "api_key"


@pytest.mark.check("X4", "401, closed")
def test_missing_key_is_refused_before_the_body_is_read(make_rig: MakeRig) -> None:
    rig = make_rig(KEYS)
    client = rig.send(get(CHAT, b"Content-Length: 1000000", b"Expect: 100-continue", method=b"POST"))
    assert status(client.message()[0]) == 401
    assert client.sees_the_end()


def test_one_connection_may_carry_valid_and_invalid_keys(make_rig: MakeRig) -> None:
    rig = make_rig(KEYS)
    client = rig.connect()
    child = None
    for key, code in ((b"first", 200), (b"wrong", 401), (b"first", 200), (b"firs", 401), (b"first", 200)):
        client.send(get(b"/props", b"Authorization: Bearer " + key))
        if code == 200:
            child = child or rig.accept()
            child.head()
            child.send(answer())
        assert status(client.message()[0]) == code


# --- the control API


@pytest.mark.check("X4", "401 or 403")
@pytest.mark.parametrize(
    ("config", "line", "code"),
    [
        (ProxyConfig(), b"X: y", 403),
        (ProxyConfig(api_keys=("k",)), b"Authorization: Bearer k", 403),
        (KEYS, b"X: y", 401),
        (KEYS, b"Authorization: Bearer wrong", 401),
        (KEYS, b"Authorization: Bearer first", 403),
    ],
    ids=["no keys", "no admin key", "none given", "a wrong one", "an inference key"],
)
def test_control_api_is_closed_without_an_admin_key(
    make_rig: MakeRig, config: ProxyConfig, line: bytes, code: int
) -> None:
    declined(make_rig(config, control=True), get(b"/llamasup/v1/status", line), code)


def test_admin_key_opens_the_control_api(make_rig: MakeRig) -> None:
    rig = make_rig(KEYS, control=True)
    client = rig.send(get(b"/llamasup/v1/status?a=b", b"Authorization: Bearer admin"))
    control = rig.accept_control()
    head = control.head()
    assert head.startswith(b"GET /llamasup/v1/status?a=b HTTP/1.1\r\n")
    assert b"admin" not in head
    control.send(answer(b"{}"))
    assert status(client.message()[0]) == 200
    assert rig.backend.requested_models == []


@pytest.mark.check("X4", "403")
@pytest.mark.parametrize(
    "path", [b"/%6clamasup/v1/shutdown", b"//llamasup/v1/shutdown", b"/LLAMASUP/v1", b"/llamasup"]
)
def test_unusual_spelling_of_the_control_api_is_closed(make_rig: MakeRig, path: bytes) -> None:
    rig = make_rig(KEYS, control=True)
    declined(rig, get(path, b"Authorization: Bearer first"), 403)


# --- X7: closed paths

CLOSED = [
    (b"GET", b"/tools"),
    (b"POST", b"/tools"),
    (b"POST", b"/tools/run"),
    (b"GET", b"/cors-proxy?url=http://169.254.169.254/"),
    (b"POST", b"/cors-proxy"),
    (b"POST", b"/mcp"),
    (b"POST", b"/props"),
    (b"PUT", b"/props"),
    (b"POST", b"/slots/0?action=save"),
    (b"POST", b"/slots/0?action=restore"),
    (b"POST", b"/slots/12?action=erase"),
    (b"POST", b"/slots/0"),
    (b"POST", b"/models/load"),
    (b"GET", b"/%74ools"),
    (b"GET", b"/%2574ools"),
    (b"GET", b"/%u0074ools"),  # cpp-httplib decodes this too: llama-server answers it with /tools (b11434)
    (b"POST", b"/prop%U0073"),
    (b"POST", b"/sl%u006fts/0?action=save"),
    (b"POST", b"/%25u0070rops"),
    (b"GET", b"//tools"),
    (b"GET", b"/tools/"),
    (b"GET", b"/TOOLS"),
    (b"GET", b"/x/../tools"),
    (b"GET", b"/x/%2e%2e/tools"),
    (b"GET", b"/x%2f..%2ftools"),
    (b"GET", b"/\\tools"),
    (b"POST", b"/prop%73"),
    (b"POST", b"/slot%73/0"),
    (b"POST", b"http://localhost/props"),
]


@pytest.mark.check("X7", "403 closed_path")
@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_paths_that_read_files_or_reach_the_network_are_closed(rig: Rig, method: bytes, path: bytes) -> None:
    error = declined(rig, get(path, method=method), 403)
    assert error["cause"] == "closed_path"
    assert "llamasup wrap without --strict" in str(error["remedy"])


def test_remedy_for_a_closed_path_works(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(rules=HeadRules(transparent=True, credentials=True)))  # as in ``wrap``
    passes(rig, post(b"/slots/0?action=save", b"{}"))


@pytest.mark.check("X7")
@pytest.mark.parametrize(
    ("method", "path"),
    [(b"GET", b"/props"), (b"GET", b"/slots"), (b"GET", b"/toolset"), (b"POST", b"/tokenize")],
)
def test_paths_similar_to_closed_ones_are_open(rig: Rig, method: bytes, path: bytes) -> None:
    passes(rig, get(path, b"Content-Length: 0", method=method))


def test_configuration_can_open_a_closed_path(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(open_paths=frozenset({"/slots/0"})))
    passes(rig, post(b"/slots/0?action=save", b"{}"))


# --- X8: limits

SMALL = ProxyConfig(limits=Limits(body_bytes=1000, head_bytes=2000, headers=10, sweep_s=0.02))


@pytest.mark.check("X8")
def test_body_of_32_mib_is_accepted(rig: Rig) -> None:
    body = b"x" * (32 << 20)
    client = rig.send(post(b"/tokenize", body))
    child = rig.accept()
    assert child.message()[1] == body
    child.send(answer())
    assert status(client.message()[0]) == 200


def test_client_reads_the_refusal_of_its_upload_before_the_end(make_rig: MakeRig) -> None:
    rig = make_rig(SMALL)
    client = rig.send(get(CHAT, b"Content-Length: 1000000", method=b"POST") + b"x" * 100_000)
    head = client.head()
    client.send(b"x" * 100_000)  # still sending: no reset destroys the answer
    assert status(head) == 413
    assert json.loads(client.receive(int(field(head, b"content-length") or 0)))["error"]["code"] == 413


@pytest.mark.check("X8", "431, closed")
@pytest.mark.parametrize(
    "raw",
    [
        get(b"/a", *(b"X-%d: y" % n for n in range(20))),
        get(b"/a", b"X: " + b"y" * 3000),
        get(b"/" + b"a" * 3000),
        get(b"/a", b"X: " + b"y" * 3000)[:-4],
        b"GET /" + b"a" * 3000,
        get(b"/livez")[:-2] + b"X: " + b"y" * 3000,
    ],
    ids=[
        "many headers",
        "a large header",
        "a long target",
        "unfinished",
        "an unfinished target",
        "unfinished header",
    ],
)
def test_head_above_the_limit_is_refused(make_rig: MakeRig, raw: bytes) -> None:
    refused(make_rig(SMALL), raw, 431)


@pytest.mark.check("X8", "431, closed")
@pytest.mark.parametrize(
    "tail", [b"0\r\nX: " + b"y" * 8000, b"5;x=" + b"y" * 8000], ids=["trailer", "extension"]
)
def test_endless_trailer_or_chunk_extension_is_refused(make_rig: MakeRig, tail: bytes) -> None:
    rig = make_rig(SMALL)
    client = rig.send(get(CHAT, b"Transfer-Encoding: chunked", method=b"POST"))
    client.send(chunk(b"x"))
    for at in range(0, len(tail), 500):
        client.send(tail[at : at + 500])
        if at == 1500:
            rig.ask(get(b"/livez"))  # the first part has been read, and the rest counts
    assert status(client.message()[0]) == 431


def test_hundred_headers_are_accepted(rig: Rig) -> None:
    passes(rig, get(b"/a", *(b"X-%d: y" % n for n in range(99))))


def quick(**limits: float) -> ProxyConfig:
    return ProxyConfig(limits=Limits(sweep_s=0.02, **limits))  # type: ignore[arg-type]


@pytest.mark.check("X8", "408, closed")
@pytest.mark.parametrize(
    ("config", "raw"),
    [
        (quick(head_s=0.1), get()[:-2]),
        (quick(body_idle_s=0.1), post(CHAT, b"body")[:-1]),
    ],
    ids=["head", "body"],
)
def test_incomplete_request_times_out(make_rig: MakeRig, config: ProxyConfig, raw: bytes) -> None:
    refused(make_rig(config), raw, 408)


@pytest.mark.check("X8")
def test_idle_connection_is_closed_without_an_answer(make_rig: MakeRig) -> None:
    rig = make_rig(quick(keepalive_s=0.1))
    client = rig.send(get(b"/livez"))
    client.message()
    assert client.sees_the_end()


@pytest.mark.check("X8")
def test_silent_connection_is_closed(make_rig: MakeRig) -> None:
    assert make_rig(quick(head_s=0.1)).connect().sees_the_end()


def test_running_request_has_no_client_timeout(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(quick(head_s=100.0, body_idle_s=100.0, keepalive_s=100.0))
    client, child = rig.begin(get())
    another = rig.connect()
    clock.pass_until_readable(another, 60.0)
    assert another.sees_the_end()  # so much time has passed that another connection has timed out
    child.send(answer(b"late"))
    assert client.message()[1] == b"late"
