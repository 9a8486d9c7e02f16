"""Requests of clients at the address of Ray Serve; the replicas and the directory are played."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from llamasup.core.auth.api_key import ApiKey, KeyLimits, digest_of
from llamasup.core.proxy.settings import Limits
from llamasup.fleet import membership
from llamasup.fleet.ingress import AnswerCut, Ingress, IngressSettings
from llamasup.fleet.membership import FleetMembership
from llamasup.fleet.messages import FleetNode, ListedModel, Poll, Snapshot
from llamasup.fleet.node_requests import AnswerBegin
from tests.kit.async_tests import async_test
from tests.kit.patience import PATIENCE_S

NODE = FleetNode("tiny@a", "https://192.0.2.1:1", "tiny")
CHAT = "/v1/chat/completions"
JSON = b"content-type: application/json\r\n"
EVENTS = b"content-type: text/event-stream\r\n"


def api_key(word: str, **more: Any) -> ApiKey:
    return ApiKey(word, b"salt", digest_of(b"salt", word.encode()), **more)


ALICE, BOB = api_key("alice"), api_key("bob", models=("tiny",), priority="high")
LIMITED = api_key("carol", limits=KeyLimits(requests_per_minute=1))


class PlayedDirectory:
    """Answers polls with ``nodes``, and with what it knows of the model ``tiny``."""

    def __init__(self, *nodes: FleetNode) -> None:
        self.nodes = nodes
        self.tiny = ListedModel("tiny", ("gpt-tiny",))
        self.version = 1
        self.polls: list[Poll] = []
        self.news = asyncio.Event()

    def publish(self, *nodes: FleetNode, problem: str = "") -> None:
        self.nodes, self.tiny = nodes, ListedModel("tiny", ("gpt-tiny",), problem=problem)
        self.version += 1
        self.news.set()

    async def ask(self, poll: Poll) -> Snapshot:
        self.polls.append(poll)
        self.news.set()
        while poll.seen == self.version:
            self.news.clear()
            await self.news.wait()
        return Snapshot(self.version, True, "", self.nodes, (self.tiny, ListedModel("other")))


class PlayedAnswer:
    """Of a replica: ``parts`` one after another, of which an exception is raised."""

    def __init__(self, *parts: Any, assigned: bool = True) -> None:
        self.parts = iter(parts)
        self.is_assigned = assigned
        self.cancelled = 0

    async def assigned(self) -> None:
        if not self.is_assigned:
            await asyncio.Event().wait()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        part = next(self.parts, None)
        if part is None:
            raise StopAsyncIteration
        if isinstance(part, BaseException):
            raise part
        return part

    def cancel(self) -> None:
        self.cancelled += 1


class Played:
    """An ingress, what its replicas answer, and what they got."""

    def __init__(self, directory: PlayedDirectory, settings: IngressSettings, limits: Limits | None) -> None:
        self.directory = directory
        self.answer = PlayedAnswer(AnswerBegin(200, JSON, b"{}"))
        self.got: list[tuple[bytes, bytes, bytes]] = []
        self.membership = FleetMembership("played", "s" * 40, ask=directory.ask)
        models = [ListedModel("tiny", ("gpt-tiny",)), ListedModel("other")]
        self.ingress = Ingress(
            settings, models, self.membership, {"tiny": self.forward, "other": self.forward}, limits
        )

    def forward(self, target: bytes, lines: bytes, body: bytes) -> PlayedAnswer:
        self.got.append((target, lines, body))
        return self.answer

    async def ask(
        self,
        path: str = CHAT,
        body: bytes | None = None,
        *,
        method: str = "POST",
        key: str = "alice",
        headers: Mapping[str, str] | None = None,
        root: str = "",
        rest: Callable[[], Awaitable[bytes]] | None = None,
    ) -> Response:
        """``rest``: gives the next piece of a body without an end, after the first byte."""
        given = {"host": "127.0.0.1:8000", "authorization": f"Bearer {key}", **(headers or {})}
        content = b'{"model": "tiny"}' if body is None else body
        pieces = [content[:1], content[1:]]

        async def receive() -> Any:
            if rest is not None and len(pieces) == 1:
                return {"type": "http.request", "body": await rest(), "more_body": True}
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        plain, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "http_version": "1.1",
            "path": root + plain,
            "raw_path": (root + plain).encode(),
            "root_path": root,
            "query_string": query.encode(),
            "server": ("127.0.0.1", 8000),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }
        return await self.ingress.answer(Request(scope, receive))


@asynccontextmanager
async def played(
    *nodes: FleetNode, limits: Limits | None = None, wait_timeout_s: float = PATIENCE_S, max_queued: int = 9
) -> AsyncIterator[Played]:
    settings = IngressSettings(
        (ALICE, BOB, LIMITED), ("llm.example.net",), wait_timeout_s=wait_timeout_s, max_queued=max_queued
    )
    found = Played(PlayedDirectory(*nodes), settings, limits)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(found.membership.run())
        await until(found, lambda: found.directory.polls[-1:] and found.directory.polls[-1].seen)
        yield found
        running.cancel()


async def until(found: Played, holds: Callable[[], object]) -> None:
    """Wait until a poll makes it true."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            found.directory.news.clear()
            await found.directory.news.wait()


def error_of(response: Response) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(response.body))["error"]
    return {**found, "status": response.status_code}


async def received(response: Response) -> tuple[list[tuple[bytes, bytes]], bytes, bool]:
    """The headers, the body, and whether the answer is complete."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("an answer is only sent")

    complete = True
    try:
        await response({"type": "http"}, receive, send)
    except AnswerCut:
        complete = False
    body = b"".join(message["body"] for message in sent[1:])
    assert complete is not sent[-1]["more_body"]
    return sent[0]["headers"], body, complete


# --- who may ask, and what -------------------------------------------------------------------------------


@pytest.mark.check("X4", "401 or 403")
@async_test
async def test_ingress_of_ray_serve_checks_the_keys_of_clients() -> None:
    async with played(NODE) as found:
        for key in ("", "other"):
            response = await found.ask(key=key)
            assert error_of(response) | {"status": 401, "cause": "api_key"} == error_of(response)
            assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(await found.ask(key="carol"))["cause"] == "key_limits"
        for model in ("other", "nope"):
            body = json.dumps({"model": model}).encode()
            assert error_of(await found.ask(body=body, key="bob"))["cause"] == "key_models"
        assert found.got == []
        assert (await found.ask(key="bob")).status_code == 200


@pytest.mark.check("X2", "403")
@async_test
async def test_ingress_of_ray_serve_refuses_foreign_hosts_and_web_pages() -> None:
    async with played(NODE) as found:
        evil = {"host": "evil.example"}
        assert error_of(await found.ask(key="", headers=evil))["cause"] == "foreign_host"
        assert (await found.ask(headers=evil)).status_code == 200  # no other page has the key
        refused = await found.ask(headers={"origin": "https://evil.example"})
        assert error_of(refused)["cause"] == "foreign_origin"


@async_test
async def test_list_has_the_models_that_the_key_may_use() -> None:
    async with played(NODE) as found:
        listed = json.loads(bytes((await found.ask("/v1/models", method="GET")).body))["data"]
        assert [(each["id"], each["status"]["value"]) for each in listed] == [
            ("tiny", "loaded"),
            ("other", "unloaded"),
        ]
        assert listed[0]["aliases"] == ["gpt-tiny"]
        one = await found.ask("/v1/models", method="GET", key="bob")
        assert [each["id"] for each in json.loads(bytes(one.body))["data"]] == ["tiny"]
        assert json.loads(bytes((await found.ask("/v1/models/tiny", method="GET")).body))["id"] == "tiny"
        assert error_of(await found.ask("/v1/models/nope", method="GET"))["status"] == 404
        assert (await found.ask("/health", method="GET", key="")).status_code == 200


@async_test
async def test_other_requests_are_not_for_this_address() -> None:
    async with played(NODE) as found:
        for method, path in (("GET", "/props"), ("POST", "/"), ("DELETE", "/v1/models/tiny"), ("GET", "/")):
            assert error_of(await found.ask(path, method=method))["status"] == 404, path
        assert error_of(await found.ask("/tools"))["cause"] == "closed_path"
        assert error_of(await found.ask("/v1/%63ompletions"))["cause"] == "path_spelling"
        assert error_of(await found.ask(headers={"transfer-encoding": "gzip"}))["status"] == 400
        assert found.got == []


@async_test
async def test_model_must_be_named_and_known() -> None:
    async with played(NODE) as found:
        assert error_of(await found.ask(body=b"{}"))["cause"] == "model_unnamed"
        unknown = error_of(await found.ask(body=b'{"model": "tinny"}'))
        assert (unknown["status"], unknown["cause"]) == (404, "model_not_found")
        assert unknown["remedy"] == "Did you mean tiny or gpt-tiny?"
        assert error_of(await found.ask(headers={"content-encoding": "gzip"}))["status"] == 415


@pytest.mark.check("X8", "413 or 503")
@async_test
async def test_ingress_of_ray_serve_bounds_bodies() -> None:
    limits = Limits(body_bytes=100, small_body_bytes=20, bodies_bytes=50)
    async with played(NODE, limits=limits) as found:
        assert error_of(await found.ask(body=b" " * 101))["cause"] == "body_limit"
        announced = await found.ask(headers={"content-length": "101"})
        assert error_of(announced)["status"] == 413
        many = await found.ask(body=b" " * 60)
        assert (error_of(many)["cause"], many.headers["retry-after"]) == ("bodies_limit", "1")
        assert (await found.ask()).status_code == 200, "what was refused is not counted any more"


@pytest.mark.check("X8", "408")
@async_test
async def test_body_that_does_not_come_is_a_408() -> None:
    async def nothing() -> bytes:
        await asyncio.Event().wait()
        return b""

    async with played(NODE, limits=Limits(body_idle_s=0.01)) as found:
        error = error_of(await found.ask(rest=nothing))
        assert (error["status"], error["cause"]) == (408, "slow_request")
        assert found.got == []


@async_test
async def test_body_that_comes_byte_by_byte_is_a_408() -> None:
    async def byte() -> bytes:
        await asyncio.sleep(0.001)
        return b" "

    async with played(NODE, limits=Limits(body_idle_s=0.1)) as found, asyncio.timeout(PATIENCE_S):
        assert error_of(await found.ask(rest=byte))["cause"] == "slow_request"


@async_test
async def test_client_cannot_control_ray_serve_by_a_header() -> None:
    async with played(NODE) as found:
        for name in ("x-request-disconnect-disabled", "x-request-timeout-seconds"):
            error = error_of(await found.ask(headers={name: "?1"}))
            assert (error["status"], error["cause"]) == (400, "serve_header")
            assert name in error["message"]
        assert found.got == []


# --- what a replica gets, and what its client gets -------------------------------------------------------


@async_test
async def test_replica_gets_the_request_without_the_key_of_its_client() -> None:
    async with played(NODE) as found:
        headers = {
            "x-llamasup-priority": "high",
            "x-llamasup-other": "1",
            "x-request-id": "mine",
            "accept": "text/plain",
        }
        body = b'{"model": "GPT-tiny", "prompt": "a"}'
        await found.ask("/v1/completions?a=%20", body, key="bob", headers=headers, root="/fleet")
        ((target, lines, sent),) = found.got
        assert target == b"/v1/completions?a=%20"
        assert sent == body
        assert sorted(lines.split(b"\r\n")[:-1]) == [
            b"X-Llamasup-Node: ingress",
            b"X-Llamasup-Priority: high",
            b"X-Request-Id: mine",
            b"accept: text/plain",
        ]
        await found.ask(headers=headers)
        assert b"Priority" not in found.got[-1][1], "the key does not allow it"


@async_test
async def test_answer_comes_unchanged_and_is_cancelled_when_it_is_over() -> None:
    async with played(NODE) as found:
        found.answer = PlayedAnswer(AnswerBegin(400, JSON + b"X-Own: 1\r\n", b"ab"), b"c", b"\x00")
        headers, body, complete = await received(await found.ask())
        assert (headers, body, complete) == (
            [(b"content-type", b"application/json"), (b"x-own", b"1")],
            b"abc\x00",
            True,
        )
        assert found.answer.cancelled == 1


ERROR_EVENT = b'data: {"error":{"message":"from the node"}}\n\n'


@pytest.mark.parametrize(
    ("lines", "parts", "added"),
    [
        (EVENTS, (b"data: 1\n\n",), True),
        (EVENTS, (b"data: 1\n\n", b"data: 2\r\n\r\n"), True),
        (EVENTS, (b"data: " + b"x" * 40_000 + b"\n\n",), True),
        (EVENTS, (b"data: 1\n\n", b"data: 2"), False),
        (EVENTS, (b"data: 1\n\n", ERROR_EVENT), False),
        (EVENTS, (b"data: 1\n\n" + ERROR_EVENT,), False),
        (JSON, (b"{}\n\n",), False),
    ],
)
def test_stream_that_breaks_off_ends_with_one_error_event(
    lines: bytes, parts: tuple[bytes, ...], added: bool
) -> None:
    @async_test
    async def play() -> None:
        async with played(NODE) as found:
            found.answer = PlayedAnswer(AnswerBegin(200, lines, b""), *parts, RuntimeError("it died"))
            _, body, complete = await received(await found.ask())
            assert not complete
            rest = body.removeprefix(b"".join(parts))
            assert bool(rest) is added
            if added:
                assert rest.startswith(
                    b'data: {"error":{"message":"The replica of the model \'tiny\' has ended'
                )
                assert rest.endswith(b"}}\n\n")
            assert found.answer.cancelled == 1

    play()


@async_test
async def test_replica_that_dies_before_its_answer_is_a_503() -> None:
    async with played(NODE) as found:
        for died in ((RuntimeError("it died"),), ()):
            found.answer = PlayedAnswer(*died)
            response = await found.ask()
            assert (error_of(response)["status"], error_of(response)["cause"]) == (503, "node_absent")
            assert response.headers["retry-after"] == "1"
            assert found.answer.cancelled == 1


# --- a model without a replica ---------------------------------------------------------------------------


@async_test
async def test_request_waits_until_a_replica_serves() -> None:
    async with played() as found, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(found.ask())
        await until(found, lambda: found.directory.polls[-1].waiting == {"tiny": 1})
        assert found.got == []
        found.directory.publish(NODE)
        assert (await asking).status_code == 200
        await until(found, lambda: found.directory.polls[-1].waiting == {})


@async_test
async def test_client_that_goes_away_does_not_wait_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_REPEAT_S", 0.01)
    async with played() as found, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(found.ask())
        await until(found, lambda: found.directory.polls[-1].waiting == {"tiny": 1})
        asking.cancel()
        await until(found, lambda: found.directory.polls[-1].waiting == {})
        assert found.got == []


@async_test
async def test_wait_ends_with_the_reason_why_no_replica_serves() -> None:
    async with played(wait_timeout_s=0.05) as found:
        found.directory.publish(problem="its last start failed: no memory.")
        async with asyncio.timeout(PATIENCE_S):
            await found.membership.changed()
        response = await found.ask()
        error = error_of(response)
        assert error["status"] == 503
        assert "No node of the fleet has the model yet; its last start failed: no memory" in error["message"]
        assert "has waited for 0.05 s" in error["message"]
        assert response.headers["retry-after"] == "2"


@async_test
async def test_only_so_many_requests_wait() -> None:
    async with played(max_queued=1) as found, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(found.ask())
        await until(found, lambda: found.directory.polls[-1].waiting == {"tiny": 1})
        assert error_of(await found.ask())["cause"] == "waiting_room_full"
        found.directory.publish(NODE)
        assert (await first).status_code == 200


@async_test
async def test_replica_that_serve_does_not_know_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamasup.fleet.ingress._KNOWN_S", 0.0)
    async with played(NODE, wait_timeout_s=0.05) as found:
        found.answer = PlayedAnswer(assigned=False)
        assert error_of(await found.ask())["status"] == 503
        assert found.answer.cancelled == 1


@async_test
async def test_request_that_is_cancelled_before_its_answer_is_cancelled_at_the_replica() -> None:
    async with played(NODE) as found, asyncio.TaskGroup() as tasks:
        found.answer = PlayedAnswer(assigned=False)
        asking = tasks.create_task(found.ask())
        while not found.got:  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        assert found.answer.cancelled == 1


@async_test
async def test_only_so_many_requests_wait_for_the_choice_of_a_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llamasup.fleet.ingress._FEWEST_ASSIGNED", 1)
    async with played(NODE, max_queued=0) as found, asyncio.TaskGroup() as tasks:
        found.answer = PlayedAnswer(assigned=False)
        asking = tasks.create_task(found.ask())
        while not found.got:  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0)
        assert error_of(await found.ask())["cause"] == "waiting_room_full"
        asking.cancel()
        await asyncio.wait({asking})
        found.answer = PlayedAnswer(AnswerBegin(200, JSON, b"{}"))
        assert (await found.ask()).status_code == 200, "what was cancelled is not counted any more"
