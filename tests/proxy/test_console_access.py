"""The web console over TCP: which requests reach its files, and what its cookie allows."""

from __future__ import annotations

import json

import pytest

from llamasup.auth.key_source import KeyFile
from llamasup.auth.keys import ApiKey, digest_of
from llamasup.proxy import ProxyConfig
from llamasup.proxy.console_access import session_ids
from tests.proxy.conftest import MakeRig
from tests.proxy.key_files import keys_of
from tests.proxy.rig import CHAT, Rig, Wire, answer, field, get, post, status
from tests.proxy.test_control import nothing_was_forwarded

CONSOLE = ProxyConfig(console=True, route_by_model=False)
WITH_KEYS = ProxyConfig(
    console=True, route_by_model=False, key_file=keys_of("infer\nadmin rights=control"), api_keys=("given",)
)
SESSION = b"/llamasup/v1/console/session"
COOKIE = b"Cookie: theme=dark; llamasup_session=old.good; x=y"
HEADER = b"X-Llamasup-Console: secret"
ORIGIN = b"Origin: http://localhost"
OWN = (COOKIE, HEADER, ORIGIN)
CHANGES = [(b"POST", b"/llamasup/v1/reload"), (b"PUT", b"/llamasup/v1/config"), (b"DELETE", SESSION)]


class OneSession:
    """One session, with the id ``good`` and the secret ``secret``, until it ends."""

    def __init__(self) -> None:
        self.is_over = False

    def key_of(self, ids: tuple[bytes, ...], secret: bytes) -> ApiKey | None:
        return (
            None
            if self.is_over or b"good" not in ids or secret != b"secret"
            else ApiKey("console", b"", b"", controls=True)
        )


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


@pytest.mark.check("X7", "no other path is public, however it is written")
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


@pytest.mark.check("X2", "403 foreign_host, also for the files of the console")
def test_foreign_host_gets_no_file_of_the_console(console: Rig) -> None:
    request = b"GET /llamasup/ HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    assert refusal(console, request) == (403, "foreign_host")


def test_console_that_is_off_has_no_files_and_no_cookie(make_rig: MakeRig) -> None:
    rig = signed_in(make_rig, ProxyConfig())
    for request in (get(b"/llamasup/"), get(SESSION), get(b"/llamasup/v1/status", COOKIE)):
        assert refusal(rig, request) == (403, "control_closed")


# --- the cookie


def test_cookie_gives_the_right_control(console: Rig) -> None:
    head = forwarded(console, get(b"/llamasup/v1/status", COOKIE, HEADER))
    assert b"llamasup_session=old.good" in head
    assert b"x-llamasup-console: secret" in head
    assert console.record().client == "key:console"


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_page_of_the_console_changes_with_origin_and_header(console: Rig, method: bytes, path: bytes) -> None:
    assert forwarded(console, change(method, path, *OWN)).startswith(method + b" " + path)


@pytest.mark.check(
    "X3", "403 for a change with the cookie but without the header or the Origin of this server"
)
@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ((COOKIE, ORIGIN), "console_header"),
        ((COOKIE, ORIGIN, b"X-Llamasup-Console: "), "console_header"),
        ((COOKIE, HEADER, b"Origin: http://evil.example"), "foreign_origin"),
        ((COOKIE, HEADER, b"Origin: http://localhost:3000"), "foreign_origin"),
        ((COOKIE, HEADER, b"Origin: null"), "foreign_origin"),
        ((*OWN, b"Sec-Fetch-Site: cross-site"), "foreign_origin"),
        ((*OWN, b"Sec-Fetch-Site: same-site"), "foreign_origin"),
        ((*OWN, b"Sec-Fetch-Site: same-origin", b"Sec-Fetch-Site: cross-site"), "foreign_origin"),
    ],
)
def test_page_of_another_site_changes_nothing_with_the_cookie(
    console: Rig, method: bytes, path: bytes, lines: tuple[bytes, ...], cause: str
) -> None:
    assert refusal(console, change(method, path, *lines)) == (403, cause)


@pytest.mark.check("X3", "403: a change with the cookie has an Origin")
def test_change_with_the_cookie_needs_an_origin(console: Rig) -> None:
    assert refusal(console, change(b"POST", b"/llamasup/v1/reload", COOKIE, HEADER)) == (
        403,
        "foreign_origin",
    )


@pytest.mark.check("X3", "403: a configured origin may use models, and not the cookie of the console")
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_page_of_a_configured_origin_does_not_use_the_cookie(make_rig: MakeRig, method: bytes) -> None:
    rig = signed_in(make_rig, ProxyConfig(console=True, origins=("https://chat.example",)))
    request = change(method, b"/llamasup/v1/status", COOKIE, HEADER, b"Origin: https://chat.example")
    assert refusal(rig, request) == (403, "foreign_origin")


@pytest.mark.check("X3", "403 for a read with the cookie that another site causes")
@pytest.mark.parametrize("site", [b"cross-site", b"same-site", b"other"])
def test_page_of_another_site_reads_nothing_with_the_cookie(console: Rig, site: bytes) -> None:
    request = get(b"/llamasup/v1/events", COOKIE, HEADER, b"Sec-Fetch-Site: " + site)
    assert refusal(console, request) == (403, "foreign_origin")


def test_own_page_reads_with_the_cookie_and_the_secret(console: Rig) -> None:
    for site in (b"none", b"same-origin"):
        forwarded(console, get(b"/llamasup/v1/status", COOKIE, HEADER, b"Sec-Fetch-Site: " + site))


@pytest.mark.check(
    "X4", "401 or 403 for the cookie alone, which each program at a port of this machine may get"
)
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((), (403, "console_header")),
        ((b"X-Llamasup-Console: 1",), (401, "session")),
        ((b"X-Llamasup-Console: good",), (401, "session")),
    ],
)
def test_cookie_without_the_secret_reads_and_changes_nothing(
    console: Rig, lines: tuple[bytes, ...], expected: tuple[int, str]
) -> None:
    """A program that the browser visits may repeat the cookie with any Origin."""
    for path in (b"status", b"events", b"models/m/logs", b"config"):
        assert refusal(console, get(b"/llamasup/v1/" + path, COOKIE, *lines)) == expected
    for method, path in CHANGES:
        if path != SESSION:  # the application finds no session to end
            assert refusal(console, change(method, path, COOKIE, ORIGIN, *lines)) == expected


def test_request_with_an_ended_session_gets_401_on_an_open_connection(console: Rig) -> None:
    client = console.connect()
    request = get(b"/llamasup/v1/status", COOKIE, HEADER)
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


def test_cookie_is_unknown_before_the_control_application_is_loaded(make_rig: MakeRig) -> None:
    rig = make_rig(CONSOLE, control=True)
    assert refusal(rig, get(b"/llamasup/v1/status", COOKIE, HEADER)) == (401, "session")


@pytest.mark.check("X4", "401: the cookie counts only below /llamasup/")
@pytest.mark.parametrize("path", [b"/v1/models", b"/metrics", b"/props", b"/slots", b"/"])
def test_cookie_opens_no_path_of_a_model(make_rig: MakeRig, path: bytes) -> None:
    rig = signed_in(make_rig, WITH_KEYS)
    assert refusal(rig, get(path, *OWN)) == (401, "api_key")
    assert refusal(rig, post(b"/v1/chat/completions", CHAT, *OWN)) == (401, "api_key")


def test_key_with_the_right_control_needs_no_cookie(make_rig: MakeRig) -> None:
    rig = signed_in(make_rig, WITH_KEYS)
    forwarded(rig, change(b"POST", b"/llamasup/v1/reload", b"x-api-key: admin"))


# --- signing in


def test_request_for_a_session_needs_no_key(console: Rig) -> None:
    forwarded(console, get(SESSION))
    forwarded(console, change(b"POST", SESSION, HEADER))
    forwarded(console, change(b"POST", SESSION, HEADER, ORIGIN))


@pytest.mark.check("X3", "403 for another site that signs a browser in or out")
@pytest.mark.parametrize(
    "lines", [(), (HEADER, b"Origin: http://evil.example"), (HEADER, b"Sec-Fetch-Site: cross-site")]
)
def test_page_of_another_site_signs_no_browser_in(console: Rig, lines: tuple[bytes, ...]) -> None:
    code, cause = refusal(console, change(b"POST", SESSION, *lines))
    assert (code, cause in ("foreign_origin", "console_header")) == (403, True)


def test_other_spelling_of_the_sign_in_needs_a_key(console: Rig) -> None:
    assert refusal(console, change(b"POST", SESSION + b"/", HEADER))[0] in (401, 403)


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
    assert location(rig.send(get(b"/", ACCEPTS))) == b"/llamasup/"
    assert location(rig.send(get(b"/llamasup"))) == b"/llamasup/"
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


def test_cookie_of_several_llamasups_has_the_ids_of_all() -> None:
    assert session_ids(b"llamasup_session=a.b; other=1; llamasup_session=c") == (b"a", b"b", b"c")
    assert session_ids(b"x_llamasup_session=a") == ()
    assert session_ids(b"llamasup_session=" + b".".join(b"%d" % n for n in range(20)))[-1] == b"19"
    assert len(session_ids(b"llamasup_session=" + b".".join(b"%d" % n for n in range(20)))) == 8
