"""The web console over TCP: which requests reach its files, and what the secret of a session allows."""

from __future__ import annotations

import json

import pytest

from llamasup.core.auth.api_key import ApiKey, digest_of
from llamasup.core.auth.key_source import KeyFile
from llamasup.core.proxy import ProxyConfig
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import CHAT, Rig, Wire, answer, field, get, post, status
from tests.core.proxy.test_control import nothing_was_forwarded

CONSOLE = ProxyConfig(console=True, route_by_model=False)
WITH_KEYS = ProxyConfig(
    console=True, route_by_model=False, key_file=keys_of("infer\nadmin rights=control"), api_keys=("given",)
)
SESSION = b"/llamasup/v1/console/session"
HEADER = b"X-Llamasup-Console: secret"
ORIGIN = b"Origin: http://localhost"
OPAQUE = b"Origin: null"
OWN = (HEADER, ORIGIN)
CHANGES = [(b"POST", b"/llamasup/v1/reload"), (b"PUT", b"/llamasup/v1/config"), (b"DELETE", SESSION)]


class OneSession:
    """One session, with the secret ``secret``, until it ends."""

    def __init__(self) -> None:
        self.is_over = False

    def has(self, secret: bytes) -> bool:
        return not self.is_over and secret == b"secret"

    def key_of(self, secret: bytes) -> ApiKey | None:
        return ApiKey("console", b"", b"", controls=True) if self.has(secret) else None


@pytest.fixture(params=[CONSOLE, WITH_KEYS], ids=["no keys", "keys"])
def console(make_rig: MakeRig, request: pytest.FixtureRequest) -> Rig:
    return signed_in(make_rig, request.param)


def signed_in(make_rig: MakeRig, config: ProxyConfig) -> Rig:
    rig = make_rig(config, control=True)
    rig.proxy.console.sessions = OneSession()
    return rig


def refusal(rig: Rig, request: bytes) -> tuple[int, str]:
    head, body = rig.ask(request)
    assert nothing_was_forwarded(rig)
    return status(head), str(json.loads(body)["error"]["cause"])


def forwarded(rig: Rig, request: bytes) -> bytes:
    """The head that the control application gets."""
    client = rig.send(request)
    control = rig.accept_control()
    head = control.head()
    control.send(answer(b"{}", b"Connection: close"))  # the next request gets a new connection
    assert status(client.message()[0]) == 200
    return head


def change(method: bytes, path: bytes, *lines: bytes) -> bytes:
    return get(path, b"Content-Length: 0", *lines, method=method)


# --- files


@pytest.mark.parametrize(
    "path", [b"/llamasup/", b"/llamasup/assets/console.js", b"/llamasup/assets/a/b-c.css"]
)
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_files_of_the_console_need_no_key(console: Rig, path: bytes, method: bytes) -> None:
    client = console.send(get(path, method=method))
    assert console.accept_control().head().startswith(method + b" " + path + b" HTTP/1.1\r\n")
    client.close()


@pytest.mark.check("X7")
@pytest.mark.parametrize(
    "path",
    [
        b"/llamasup/assets/../v1/status",
        b"/llamasup/assets/..%2fv1/status",
        b"/llamasup/assets/%2e%2e/v1/status",
        b"/llamasup/assets//v1",
        b"/llamasup/assets/.hidden",
        b"/llamasup/assets/",
        b"/llamasup/assets/a..b/../../v1/status",
        b"/llamasup/assets\\..\\v1",
        b"/llamasup/v1/status",
        b"/llamasup/index.html",
    ],
)
def test_no_path_leads_out_of_the_files_of_the_console(console: Rig, path: bytes) -> None:
    assert refusal(console, get(path))[0] in (401, 403)


def test_files_are_only_read(console: Rig) -> None:
    assert refusal(console, change(b"POST", b"/llamasup/"))[0] in (401, 403)


@pytest.mark.check("X2", "403 foreign_host")
def test_foreign_host_gets_no_file_of_the_console(console: Rig) -> None:
    request = b"GET /llamasup/ HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    assert refusal(console, request) == (403, "foreign_host")


def test_console_that_is_off_has_no_files_and_no_sessions(make_rig: MakeRig) -> None:
    rig = signed_in(make_rig, ProxyConfig())
    for request in (get(b"/llamasup/"), get(SESSION), get(b"/llamasup/v1/status", HEADER)):
        assert refusal(rig, request) == (403, "control_closed")


# --- sessions


def test_secret_of_a_session_gives_the_right_control(console: Rig) -> None:
    head = forwarded(console, get(b"/llamasup/v1/status", HEADER))
    assert b"x-llamasup-console: secret" in head
    assert console.record().client == "key:console"


@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize("origin", [ORIGIN, OPAQUE])
def test_page_of_the_console_changes_with_its_secret(
    console: Rig, method: bytes, path: bytes, origin: bytes
) -> None:
    assert forwarded(console, change(method, path, HEADER, origin)).startswith(method + b" " + path)


@pytest.mark.check("X3", "401 or 403")
@pytest.mark.parametrize(("method", "path"), [*CHANGES, (b"GET", b"/llamasup/v1/events")])
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((HEADER, b"Origin: http://evil.example"), (403, "foreign_origin")),
        ((HEADER, b"Origin: http://localhost:3000"), (403, "foreign_origin")),
        ((b"X-Llamasup-Console: 1", OPAQUE), (401, "session", "console_page")),
        ((b"X-Llamasup-Console: ", OPAQUE), (403, "foreign_origin")),
        ((OPAQUE,), (403, "foreign_origin")),
    ],
)
def test_page_of_another_site_changes_nothing(
    console: Rig, method: bytes, path: bytes, lines: tuple[bytes, ...], expected: tuple[object, ...]
) -> None:
    code, cause = refusal(console, change(method, path, *lines))
    assert code == expected[0]
    assert cause in expected


@pytest.mark.check("X3", "403")
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_page_of_a_configured_origin_uses_no_session(make_rig: MakeRig, method: bytes) -> None:
    rig = signed_in(make_rig, ProxyConfig(console=True, origins=("https://chat.example",)))
    request = change(method, b"/llamasup/v1/status", HEADER, b"Origin: https://chat.example")
    assert refusal(rig, request) == (403, "foreign_origin")


@pytest.mark.check("X4", "401 or 403")
@pytest.mark.parametrize("cookie", [b"llamasup_session=secret", b"x-llamasup-console=secret"])
def test_cookie_gives_no_right(console: Rig, cookie: bytes) -> None:
    for path in (b"status", b"events", b"models/m/logs", b"config"):
        request = get(b"/llamasup/v1/" + path, b"Cookie: " + cookie, ORIGIN)
        assert refusal(console, request)[0] in (401, 403)


# --- the origin of a sandboxed page

PREFLIGHT = (OPAQUE, b"Access-Control-Request-Headers: content-type, x-llamasup-console")


def cors(rig: Rig, request: bytes) -> bytes | None:
    """The Access-Control-Allow-Origin of a local answer."""
    head, _ = rig.ask(request)
    return field(head, b"access-control-allow-origin")


@pytest.mark.parametrize("path", [b"/llamasup/v1/config", SESSION, b"/v1/chat/completions"])
def test_browser_may_ask_whether_the_page_may_send_its_secret(console: Rig, path: bytes) -> None:
    head, _ = console.ask(get(path, *PREFLIGHT, method=b"OPTIONS"))
    assert status(head) == 204
    assert field(head, b"access-control-allow-origin") == b"null"
    assert b"PUT" in (field(head, b"access-control-allow-methods") or b"")
    assert field(head, b"access-control-allow-credentials") is None
    head, _ = console.ask(get(path, OPAQUE, method=b"OPTIONS"))
    assert status(head) == 403


def test_page_reads_why_it_is_refused(console: Rig) -> None:
    assert cors(console, get(b"/llamasup/v1/status", OPAQUE, b"X-Llamasup-Console: old")) == b"null"
    assert cors(console, get(b"/llamasup/v1/status", OPAQUE)) is None


@pytest.mark.check("X3")
def test_page_without_an_origin_reads_the_files_and_not_the_page(console: Rig) -> None:
    client = console.send(get(b"/llamasup/assets/console.js", OPAQUE))
    console.accept_control().send(answer(b"js", b"Connection: close"))
    assert field(client.message()[0], b"access-control-allow-origin") == b"null"
    assert refusal(console, get(b"/llamasup/", OPAQUE)) == (403, "foreign_origin")
    for secret in (b"1", console.proxy.console.page_secret.encode()):
        lines = (OPAQUE, b"X-Llamasup-Console: " + secret, b"Authorization: Bearer infer")
        assert refusal(console, get(b"/llamasup/", *lines)) == (401, "session")
        assert refusal(console, post(b"/v1/chat/completions", CHAT, *lines)) == (401, "session")


def test_playground_uses_a_model_while_its_session_lasts(console: Rig) -> None:
    request = post(b"/v1/completions", b"{}", HEADER, OPAQUE, b"Authorization: Bearer infer")
    client = console.send(request)
    child = console.accept()
    head, _ = child.message()
    assert b"x-llamasup-console" not in head.lower()
    child.send(answer(b"{}"))
    assert field(client.message()[0], b"access-control-allow-origin") == b"null"
    session = console.proxy.console.sessions
    assert isinstance(session, OneSession)
    session.is_over = True
    client.send(request)
    head, body = client.message()
    assert (status(head), json.loads(body)["error"]["cause"]) == (401, "session")


def test_console_that_owns_its_address_is_not_sandboxed(make_rig: MakeRig) -> None:
    rig = signed_in(make_rig, ProxyConfig(console=True, route_by_model=True))
    assert refusal(rig, get(b"/llamasup/v1/status", HEADER, OPAQUE)) == (403, "foreign_origin")
    forwarded(rig, get(b"/llamasup/v1/status", HEADER, ORIGIN))


def test_request_with_an_ended_session_gets_401_on_an_open_connection(console: Rig) -> None:
    client = console.connect()
    request = get(b"/llamasup/v1/status", HEADER)
    client.send(request)
    control = console.accept_control()
    control.head()
    control.send(answer(b"{}"))
    client.message()
    session = console.proxy.console.sessions
    assert isinstance(session, OneSession)
    session.is_over = True
    client.send(request)
    head, body = client.message()
    assert (status(head), json.loads(body)["error"]["cause"]) == (401, "session")


def test_secret_is_unknown_before_the_control_application_is_loaded(make_rig: MakeRig) -> None:
    rig = make_rig(CONSOLE, control=True)
    assert refusal(rig, get(b"/llamasup/v1/status", HEADER)) == (401, "session")


@pytest.mark.check("X4", "401 outside of `/llamasup/`")
@pytest.mark.parametrize("path", [b"/v1/models", b"/metrics", b"/props", b"/slots", b"/"])
def test_secret_opens_no_path_of_a_model(make_rig: MakeRig, path: bytes) -> None:
    rig = signed_in(make_rig, WITH_KEYS)
    assert refusal(rig, get(path, *OWN)) == (401, "api_key")
    assert refusal(rig, post(b"/v1/chat/completions", CHAT, *OWN)) == (401, "api_key")


def test_key_with_the_right_control_needs_no_session(make_rig: MakeRig) -> None:
    rig = signed_in(make_rig, WITH_KEYS)
    forwarded(rig, change(b"POST", b"/llamasup/v1/reload", b"x-api-key: admin"))


# --- signing in


def test_request_for_a_session_needs_no_key(console: Rig) -> None:
    forwarded(console, get(SESSION))
    forwarded(console, change(b"POST", SESSION, HEADER))
    forwarded(console, change(b"POST", SESSION, HEADER, ORIGIN))


@pytest.mark.check("X3", "401 or 403")
@pytest.mark.parametrize(
    "lines",
    [(HEADER, b"Origin: http://evil.example"), (OPAQUE,), (OPAQUE, b"X-Llamasup-Console: 1")],
)
def test_page_of_another_site_signs_no_browser_in(console: Rig, lines: tuple[bytes, ...]) -> None:
    code, cause = refusal(console, change(b"POST", SESSION, *lines))
    assert (code, cause) in ((403, "foreign_origin"), (401, "console_page"))


def test_sandboxed_page_signs_in_with_the_secret_of_the_page(console: Rig) -> None:
    secret = b"X-Llamasup-Console: " + console.proxy.console.page_secret.encode()
    forwarded(console, change(b"POST", SESSION, secret, OPAQUE))
    assert refusal(console, change(b"POST", b"/llamasup/v1/reload", secret, OPAQUE)) == (401, "session")


def test_other_spelling_of_the_sign_in_needs_a_key(console: Rig) -> None:
    assert refusal(console, change(b"POST", SESSION + b"/", b"X-Llamasup-Console: none"))[0] in (401, 403)


def test_minted_key_infers_under_its_name_until_it_is_revoked(console: Rig) -> None:
    keys = console.proxy.keys
    key = ApiKey("console", b"s", digest_of(b"s", b"minted"))
    console.call(lambda: keys.mint(key))
    client = console.send(post(b"/v1/completions", b"{}", b"Authorization: Bearer minted"))
    child = console.accept()
    child.message()
    child.send(answer(b"{}"))
    client.message()
    assert console.record().client == "key:console"
    console.call(lambda: keys.revoke(key))
    client.send(post(b"/v1/completions", b"{}", b"Authorization: Bearer minted"))
    if keys.needed:
        assert status(client.message()[0]) == 401
    else:
        child.message()
        child.send(answer(b"{}"))
        client.message()
        assert console.record().client == "127.0.0.1"


# --- the way to the console

ACCEPTS = b"Accept: text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"


def location(client: Wire) -> bytes | None:
    head, _ = client.message()
    return field(head, b"location") if status(head) == 302 else None


@pytest.mark.parametrize("keys", [None, keys_of("infer")])
def test_browser_that_asks_for_the_root_of_serve_is_led_to_the_console(
    make_rig: MakeRig, keys: KeyFile | None
) -> None:
    rig = make_rig(ProxyConfig(console=True, route_by_model=True, key_file=keys), control=True)
    assert location(rig.send(get(b"/", ACCEPTS))) == b"llamasup/"
    assert location(rig.send(get(b"/llamasup"))) == b"llamasup/"
    assert rig.record().outcome == "local"


def test_other_client_and_run_keep_the_root_of_llama_server(make_rig: MakeRig) -> None:
    serve = make_rig(ProxyConfig(console=True, route_by_model=True))
    for request in (get(b"/"), get(b"/", b"Accept: application/json"), change(b"POST", b"/", ACCEPTS)):
        client = serve.send(request)
        child = serve.accept()
        child.message()
        child.send(answer(b"x", b"Connection: close"))
        assert status(client.message()[0]) == 200


def test_browser_sees_the_page_of_llama_server_under_run(make_rig: MakeRig) -> None:
    run = make_rig(CONSOLE)
    client = run.send(get(b"/", ACCEPTS))
    child = run.accept()
    child.message()
    child.send(answer(b"page"))
    assert client.message()[1] == b"page"
