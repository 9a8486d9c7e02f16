"""The console in the control application: its files, signing in and out, and the end of streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from llamasup.core.auth.key_source import KeyFile
from llamasup.core.auth.keys import Keys
from llamasup.core.http.address import Address, TcpAddress, UnixAddress
from llamasup.core.proxy.console_access import ConsoleAccess
from llamasup.features.console.routes import Console, page_address
from llamasup.features.console.sessions import IDLE_S, TOKEN_S
from llamasup.features.console.static_files import read_static_files
from tests.core.control.fake import FakeControlTarget, served
from tests.core.proxy.key_files import keys_of

PAGE = "http://127.0.0.1:8080/llamasup/"
PAGE_SECRET = "of-the-page"
TOKEN, SESSION = "/llamasup/v1/console/token", "/llamasup/v1/console/session"


class World:
    """The control application with the console, as the proxy's clients reach it."""

    def __init__(self, http: httpx.AsyncClient, fake: FakeControlTarget, keys: Keys) -> None:
        self.http = http
        self.fake = fake
        self.keys = keys
        self.now_s = 0.0
        self.clock_readings = 0

    def clock(self) -> float:
        self.clock_readings += 1
        return self.now_s

    async def token(self) -> str:
        return str((await self.http.post(TOKEN)).json()["token"])

    async def sign_in(self, **body: str) -> httpx.Response:
        answer = await self.http.post(SESSION, json=body or {"token": await self.token()})
        if answer.is_success:
            self.http.headers["x-llamasup-console"] = answer.json()["secret"]  # as the page does
        return answer

    async def session(self) -> httpx.Response:
        return await self.http.get(SESSION)


@asynccontextmanager
async def console(
    folder: Path,
    *,
    is_on: bool = True,
    owns_address: bool = False,
    page_url: str | None = PAGE,
    key_lines: str | None = None,
    key_file: Path | None = None,
) -> AsyncIterator[World]:
    fake = FakeControlTarget()
    file = None if key_file is None else KeyFile(key_file)
    keys = Keys(file if key_lines is None else keys_of(key_lines), (), lambda: 0.0)
    access = ConsoleAccess(PAGE_SECRET, is_on=is_on, owns_address=owns_address)
    world: World

    def make(wake: Callable[[], None]) -> Console:
        return Console(
            access, keys, wake, page_url, describe=lambda: {"config": True}, clock=lambda: world.clock()
        )

    async with served(fake, folder, make) as (_, path):
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            world = World(http, fake, keys)
            yield world


def run(folder: Path, visit: Callable[[World], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def all_of_it() -> None:
        async with console(folder, **options) as world:
            await visit(world)

    asyncio.run(all_of_it())


# --- files


def test_page_and_every_file_are_served(tmp_path: Path) -> None:
    async def visit(world: World) -> None:
        for path, file in read_static_files(page_secret=PAGE_SECRET).items():
            answer = await world.http.get(f"/llamasup/{path}")
            assert (answer.status_code, answer.content) == (200, file.content)
            assert answer.headers["content-type"] == file.content_type
            assert "script-src 'self'" in answer.headers["content-security-policy"]
            again = await world.http.get(
                f"/llamasup/{path}", headers={"if-none-match": answer.headers["etag"]}
            )
            assert (again.status_code, again.content) == (304, b"")

    run(tmp_path, visit)


@pytest.mark.check("X3", "an origin of its own")
@pytest.mark.parametrize("owns_address", [False, True])
def test_page_is_sandboxed_if_other_pages_have_its_address(tmp_path: Path, owns_address: bool) -> None:
    async def visit(world: World) -> None:
        headers = (await world.http.get("/llamasup/")).headers
        sandboxed = headers["content-security-policy"].endswith("; sandbox allow-scripts allow-forms")
        assert sandboxed is not owns_address
        assert ("cross-origin-opener-policy" in headers) is owns_address

    run(tmp_path, visit, owns_address=owns_address)


def test_page_contains_its_secret(tmp_path: Path) -> None:
    async def visit(world: World) -> None:
        page = (await world.http.get("/llamasup/")).text
        assert f'<meta name="llamasup-page" content="{PAGE_SECRET}">' in page

    run(tmp_path, visit)


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/llamasup/assets/nosuch.js", 404),
        ("GET", "/llamasup/index.html", 404),
        ("GET", "/llamasup/assets/", 404),
        ("GET", "/llamasup/assets/..%2Fv1%2Fstatus", 404),
        ("POST", "/llamasup/", 405),
        ("POST", "/llamasup/v1/nosuch", 404),
        ("PUT", "/llamasup/v1/nosuch", 404),
        ("PUT", SESSION, 405),
        ("GET", TOKEN, 405),
    ],
)
def test_other_path_gets_an_error_object(tmp_path: Path, method: str, target: str, status: int) -> None:
    async def visit(world: World) -> None:
        answer = await world.http.request(method, target)
        assert (answer.status_code, answer.json()["error"]["cause"]) == (status, "no_such_route")

    run(tmp_path, visit)


# --- tokens


def test_address_of_a_token_has_it_in_the_fragment(tmp_path: Path) -> None:
    async def visit(world: World) -> None:
        answer = (await world.http.post(TOKEN)).json()
        assert answer == {"token": answer["token"], "url": f"{PAGE}#token={answer['token']}", "expires_s": 60}
        assert len(answer["token"]) >= 43  # 256 bits

    run(tmp_path, visit)


@pytest.mark.parametrize(
    ("options", "part"),
    [({"is_on": False}, "serves no web console"), ({"page_url": None}, "listens only on a Unix socket")],
)
def test_token_is_refused_where_no_browser_could_use_it(
    tmp_path: Path, options: dict[str, Any], part: str
) -> None:
    async def visit(world: World) -> None:
        answer = await world.http.post(TOKEN)
        assert (answer.status_code, answer.json()["error"]["cause"]) == (409, "conflict")
        assert part in answer.json()["error"]["message"]

    run(tmp_path, visit, **options)


def test_console_that_is_off_serves_nothing_else(tmp_path: Path) -> None:
    async def visit(world: World) -> None:
        for method, target in (("GET", "/llamasup/"), ("GET", SESSION), ("POST", SESSION)):
            assert (await world.http.request(method, target)).status_code == 404

    run(tmp_path, visit, is_on=False)


@pytest.mark.check("X4", "the secret is no cookie")
def test_token_becomes_a_secret(tmp_path: Path) -> None:
    async def visit(world: World) -> None:
        answer = await world.sign_in()
        shown = answer.json()
        assert shown == {
            "name": "console",
            "version": shown["version"],
            "models_need_key": False,
            "inference_key": shown["inference_key"],
            "idle_s": IDLE_S,
            "config": True,
            "secret": shown["secret"],
        }
        assert len(shown["secret"]) >= 43  # 256 bits
        assert "set-cookie" not in answer.headers
        assert (await world.session()).json() == {name: shown[name] for name in shown if name != "secret"}

    run(tmp_path, visit)


@pytest.mark.check("X4", "then 401")
def test_token_is_valid_once_and_for_a_minute(tmp_path: Path) -> None:
    async def visit(world: World) -> None:
        used, late = await world.token(), await world.token()
        assert (await world.sign_in(token=used)).status_code == 200
        world.now_s += TOKEN_S
        for token in (used, late, "x", ""):
            answer = await world.sign_in(token=token)
            assert (answer.status_code, answer.json()["error"]["cause"]) == (401, "console_token")
            assert "set-cookie" not in answer.headers
            assert answer.json()["accepts_key"] is False
            assert (token not in answer.text) or len(token) < 2

    run(tmp_path, visit)


def through_proxy(client: str) -> dict[str, str]:
    """What the proxy adds to a request with a key."""
    return {"x-llamasup-through-proxy": "1", "x-llamasup-client": client}


@pytest.mark.check("X17")
def test_token_of_a_key_inherits_its_rights_models_and_limits(tmp_path: Path) -> None:
    lines = "watch name=watch rights=control\nadmin name=ann@home rights=inference,control models=tiny rpm=3"

    async def visit(world: World) -> None:
        for client, models in (("key:watch", None), ("key:ann%40home", ("tiny",))):
            world.http.headers.pop("x-llamasup-console", None)
            token = (await world.http.post(TOKEN, headers=through_proxy(client))).json()["token"]
            shown = (await world.sign_in(token=token)).json()
            assert f"key:{shown['name']}" == unquote(client)
            if models is None:
                assert shown["inference_key"] is None
                continue
            key = world.keys.ring.find((shown["inference_key"].encode(),))
            assert key is not None
            assert (key.controls, key.models, key.limits.requests_per_minute) == (False, models, 3)
            # A page that is signed in gets tokens of its own key.
            again = (await world.http.post(TOKEN, headers=through_proxy("key:console"))).json()["token"]
            assert (await world.sign_in(token=again)).json()["name"] == shown["name"]

    run(tmp_path, visit, key_lines=lines)


@pytest.mark.check("X4", "403")
@pytest.mark.parametrize("client", ["key:phone", "key:revoked", "key:console", "x"])
def test_other_key_gets_no_token(tmp_path: Path, client: str) -> None:
    async def visit(world: World) -> None:
        answer = await world.http.post(TOKEN, headers=through_proxy(client))
        assert (answer.status_code, answer.json()["error"]["cause"]) == (403, "not_allowed")

    run(tmp_path, visit, key_lines=KEYS)


# --- keys

KEYS = "infer name=phone\nadmin name=ann rights=inference,control"


def test_key_with_the_right_control_signs_in_under_its_name(tmp_path: Path) -> None:
    async def visit(world: World) -> None:
        shown = (await world.sign_in(key="admin")).json()
        assert (shown["name"], shown["models_need_key"]) == ("ann", True)
        key = world.keys.ring.find((shown["inference_key"].encode(),))
        assert key is not None
        assert (key.name, key.controls) == ("ann", False)

    run(tmp_path, visit, key_lines=KEYS)


@pytest.mark.check("X4", "401")
@pytest.mark.parametrize(("key", "cause"), [("infer", "key_rights"), ("wrong", "api_key"), ("", "api_key")])
def test_other_key_does_not_sign_in(tmp_path: Path, key: str, cause: str) -> None:
    async def visit(world: World) -> None:
        answer = await world.sign_in(key=key)
        assert (answer.status_code, answer.json()["error"]["cause"]) == (401, cause)
        assert answer.json()["accepts_key"] is True
        assert "set-cookie" not in answer.headers

    run(tmp_path, visit, key_lines=KEYS)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"token": 1}', b'{"key": {}}', b"token=x"], ids=range(5))
def test_body_of_another_shape_opens_no_session(tmp_path: Path, body: bytes) -> None:
    async def visit(world: World) -> None:
        answer = await world.http.post(SESSION, content=body)
        assert (answer.status_code, answer.json()["error"]["cause"]) == (400, "usage")

    run(tmp_path, visit, key_lines=KEYS)


# --- the end of a session


def test_signed_out_page_loses_its_session_and_its_key(tmp_path: Path) -> None:
    async def visit(world: World) -> None:
        key = (await world.sign_in()).json()["inference_key"].encode()
        assert world.keys.ring.find((key,)) is not None
        answer = await world.http.delete(SESSION)
        assert answer.json() == {"ended": True}
        assert world.keys.ring.find((key,)) is None
        assert (await world.session()).status_code == 401
        assert (await world.http.delete(SESSION)).json() == {"ended": False}

    run(tmp_path, visit)


@pytest.mark.check("X4", "401")
def test_other_secret_is_no_session(tmp_path: Path) -> None:
    async def visit(world: World) -> None:
        shown = (await world.sign_in()).json()
        world.http.cookies.set("llamasup_session", shown["secret"], path="/llamasup")
        for secret in ("", "none", PAGE_SECRET, shown["secret"][:-1], shown["inference_key"]):
            world.http.headers["x-llamasup-console"] = secret
            answer = await world.session()
            assert (answer.status_code, answer.json()["error"]["cause"]) == (401, "session")
            assert (await world.http.delete(SESSION)).json() == {"ended": False}
        world.http.headers["x-llamasup-console"] = shown["secret"]
        assert (await world.session()).status_code == 200

    run(tmp_path, visit)


def test_second_sign_in_of_a_browser_replaces_its_session(tmp_path: Path) -> None:
    async def visit(world: World) -> None:
        first = (await world.sign_in()).json()["inference_key"].encode()
        await world.sign_in()
        assert world.keys.ring.find((first,)) is None
        assert (await world.session()).status_code == 200

    run(tmp_path, visit)


async def events_of(world: World, secret: str, **lines: str) -> AsyncIterator[str]:
    headers = {"x-llamasup-console": secret, **lines}
    async with world.http.stream("GET", "/llamasup/v1/events", headers=headers) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))["event"]


def test_streams_of_a_session_end_with_it_and_others_continue(tmp_path: Path) -> None:
    async def visit(world: World) -> None:
        secret = (await world.sign_in()).json()["secret"]
        mine, other = events_of(world, secret), events_of(world, "")
        for events in (mine, other):
            assert [await anext(events), await anext(events)] == ["state", "state"]
        await world.http.delete(SESSION)
        assert [event async for event in mine] == []
        world.fake.happens(3)
        assert await anext(other) == "state"

    run(tmp_path, visit)


def test_stream_ends_when_the_key_of_its_session_is_removed(tmp_path: Path) -> None:
    async def visit(world: World) -> None:
        mine = events_of(world, (await world.sign_in(key="admin")).json()["secret"])
        assert await anext(mine) == "state"
        world.now_s += IDLE_S  # as at a change of the key file: the proxy looks each second
        world.keys.look()
        assert [event async for event in mine] == ["state"]

    run(tmp_path, visit, key_lines=KEYS)


@pytest.mark.check("X17")
@pytest.mark.parametrize("line", ["", "admin name=ann rights=inference,control\n"])
def test_stream_ends_when_its_key_is_removed_or_changed(tmp_path: Path, line: str) -> None:
    async def visit(world: World) -> None:
        headers = {"x-llamasup-client": "key:ann"}  # as the proxy adds it
        events = events_of(world, "", **headers)
        assert [await anext(events), await anext(events)] == ["state", "state"]
        path.write_text(f"{line}other-key name=eve rights=control\n")
        world.keys.look()
        assert [event async for event in events] == []
        gone = [event async for event in events_of(world, "", **headers)] if not line else []
        assert gone == ["state"] * len(gone)

    path = tmp_path / "keys"
    path.write_text("admin name=ann rights=control\n")
    path.chmod(0o600)
    run(tmp_path, visit, key_file=path)


def test_session_without_an_open_page_does_nothing(tmp_path: Path) -> None:
    async def visit(world: World) -> None:
        await world.sign_in()
        await world.http.aclose()
        own = asyncio.current_task()
        tasks = asyncio.all_tasks() - {own}
        asked = world.clock_readings
        for _ in range(100):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() - {own} <= tasks
        assert world.clock_readings == asked

    run(tmp_path, visit)


# --- the address


@pytest.mark.parametrize(
    ("address", "names", "expected"),
    [
        (TcpAddress("127.0.0.1", 8080), (), "http://127.0.0.1:8080/llamasup/"),
        (TcpAddress("0.0.0.0", 8080), ("llm.example",), "http://127.0.0.1:8080/llamasup/"),
        (TcpAddress("0.0.0.0", 8443, tls=True), ("llm.example",), "https://llm.example:8443/llamasup/"),
        (TcpAddress("127.0.0.1", 8443, tls=True), ("llm.example",), "https://llm.example:8443/llamasup/"),
        (TcpAddress("10.1.2.3", 8443, tls=True), ("llm.example",), "https://10.1.2.3:8443/llamasup/"),
        (TcpAddress("127.0.0.1", 8443, tls=True), (), "https://127.0.0.1:8443/llamasup/"),
        (TcpAddress("::1", 8080), (), "http://[::1]:8080/llamasup/"),
        (UnixAddress("/run/x.sock"), (), None),
    ],
)
def test_page_has_an_address_that_a_browser_on_this_machine_can_open(
    address: Address, names: tuple[str, ...], expected: str | None
) -> None:
    assert page_address(address, names) == expected
