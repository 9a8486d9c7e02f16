"""The control API from request to answer, over a real socket and without a model."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamasup.core.control import routes
from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.errors import (
    ConfigInvalid,
    Conflict,
    ControlFailed,
    DoesNotFit,
    GaveUp,
    LlamasupError,
    ModelUnknown,
    NotRunning,
    RequestUnknown,
    ServerFailed,
    Stopping,
    UsageInvalid,
)
from tests.core.control.fake import AsyncControlClient, FakeConnection, FakeControlTarget, controlled, served


def run(folder: Path, visit: Callable[[FakeControlTarget, AsyncControlClient], Awaitable[None]]) -> None:
    async def both() -> None:
        fake = FakeControlTarget()
        async with controlled(fake, folder) as client:
            await visit(fake, client)

    asyncio.run(both())


def raw(
    folder: Path, *requests: tuple[str, str], fake: FakeControlTarget | None = None
) -> list[httpx.Response]:
    """Requests as any HTTP client sends them."""

    async def all_of_them() -> list[httpx.Response]:
        async with served(fake or FakeControlTarget(), folder) as (_, path):
            transport = httpx.AsyncHTTPTransport(uds=path)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return [await http.request(method, target) for method, target in requests]

    return asyncio.run(all_of_them())


def test_each_request_is_carried_out_once_and_answered(tmp_path: Path) -> None:
    async def visit(fake: FakeControlTarget, client: AsyncControlClient) -> None:
        assert (await client.load("tiny"))["id"] == "tiny"
        assert (await client.unload("small"))["id"] == "tiny"  # by its alias
        assert (await client.restart("org/repo:q8_0"))["id"] == "org/repo:q8_0"
        assert (await client.reload())["added"] == ["new"]
        assert await client.shutdown() == {"pid": 4242, "in_flight": 2}
        await client.shutdown(now=True)
        assert fake.requests == [
            ("load", "tiny"),
            ("unload", "small"),
            ("restart", "org/repo:q8_0"),
            ("reload", ""),
            ("shutdown", ""),
            ("shutdown", "now"),
        ]

    run(tmp_path, visit)


def client_of(
    folder: Path,
    visit: Callable[[FakeControlTarget, ControlClient], None],
    make: Callable[[], FakeControlTarget] = FakeControlTarget,
) -> None:
    """``visit`` with the client of the commands, in a thread."""
    fake = make()

    async def both() -> None:
        async with served(fake, folder) as (_, path):
            with ControlClient(ControlAddress(socket=path)) as client:
                await asyncio.to_thread(visit, fake, client)

    asyncio.run(both())


def test_reasons_of_a_model_are_shown(tmp_path: Path) -> None:
    def visit(fake: FakeControlTarget, client: ControlClient) -> None:
        assert client.why("org/repo:q8_0")["sentences"] == ["org/repo:q8_0 is loaded."]
        with pytest.raises(ModelUnknown) as caught:
            client.why("tinny")
        assert caught.value.remedy == "The nearest is 'tiny'."

    client_of(tmp_path, visit)


def test_last_decisions_are_listed(tmp_path: Path) -> None:
    def visit(fake: FakeControlTarget, client: ControlClient) -> None:
        assert len(client.decisions()["decisions"]) == 2
        assert len(client.decisions(1)["decisions"]) == 1
        assert client.decisions(0) == {"decisions": []}
        with pytest.raises(UsageInvalid, match="limit='201' is not a valid value"):
            client.decisions(201)

    client_of(tmp_path, visit)


def test_requests_in_flight_are_listed(tmp_path: Path) -> None:
    def visit(fake: FakeControlTarget, client: ControlClient) -> None:
        assert client.requests() == {"live": [], "ended": [], "ended_total": 0}
        fake.connections.append(FakeConnection("mine"))
        (shown,) = client.requests(ended=200)["live"]
        assert (shown["id"], shown["phase"], shown["age_s"]) == ("mine", "prompt", 1.5)
        assert (shown["key"], shown["position"], shown["tokens_completion"]) == (None, None, None)

    client_of(tmp_path, visit)


@pytest.mark.parametrize("request_id", ["mine", "a/b", "..", "ü", "a?b#c", "/"])
def test_request_is_cancelled_by_its_id(tmp_path: Path, request_id: str) -> None:
    def visit(fake: FakeControlTarget, client: ControlClient) -> None:
        mine, other = FakeConnection(request_id), FakeConnection("other")
        fake.connections += [mine, other]
        assert [request["id"] for request in client.cancel(request_id)["cancelled"]] == [request_id]
        assert mine.error is not None
        assert mine.error.cause == "cancelled"
        assert other.error is None
        with pytest.raises(RequestUnknown, match="No request in flight"):
            client.cancel(request_id)

    client_of(tmp_path, visit)


def test_invalid_query_of_the_requests_is_refused(tmp_path: Path) -> None:
    prefix = "/llamasup/v1"
    targets = ("/requests?ended=201", "/requests?ended=x", "/events?requests=2")
    *answers, without_id = raw(
        tmp_path, *(("GET", prefix + target) for target in targets), ("DELETE", f"{prefix}/requests")
    )
    assert [answer.status_code for answer in answers] == [400, 400, 400]
    assert {answer.json()["error"]["cause"] for answer in answers} == {"usage"}
    assert without_id.status_code == 405


@pytest.mark.parametrize(
    "name", ["a/b/c:Q4", "a b", "ü%2F", "..", ".", "a//b", "/a", "a/", "load", "x/logs", "a?b#c"]
)
def test_a_model_may_have_any_name(tmp_path: Path, name: str) -> None:
    async def visit(fake: FakeControlTarget, client: AsyncControlClient) -> None:
        fake.names = {name: ()}
        await client.load(name)
        assert fake.requests == [("load", name)]

    run(tmp_path, visit)


def test_slashes_in_a_name_need_no_encoding(tmp_path: Path) -> None:
    plain, encoded = raw(
        tmp_path,
        ("POST", "/llamasup/v1/models/org/repo:q8_0/load"),
        ("POST", "/llamasup/v1/models/org%2Frepo%3Aq8_0/load"),
    )
    assert plain.json() == encoded.json()
    assert plain.json()["id"] == "org/repo:q8_0"


def test_request_without_wait_continues_in_background(tmp_path: Path) -> None:
    async def visit(fake: FakeControlTarget, client: AsyncControlClient) -> None:
        fake.gate.clear()
        assert (await client.load("tiny", wait=False))["id"] == "tiny"
        assert fake.requests == [("load", "tiny")]
        waiting = asyncio.ensure_future(client.restart("tiny"))  # noqa: TID251 - awaited below
        await fake.until(lambda: len(fake.requests) == 2)
        assert not waiting.done()
        fake.gate.set()
        await waiting

    run(tmp_path, visit)


@pytest.mark.parametrize("what", ["load", "restart"])
def test_change_of_a_model_is_cancelled_when_its_client_disconnects(tmp_path: Path, what: str) -> None:
    async def visit(fake: FakeControlTarget, client: AsyncControlClient) -> None:
        fake.gate.clear()
        waiting = asyncio.ensure_future(getattr(client, what)("tiny"))  # noqa: TID251 - cancelled below
        await fake.until(lambda: fake.requests == [(what, "tiny")])
        waiting.cancel()
        await fake.until(lambda: fake.requests[1:] == [(f"{what} given up", "tiny")])

    run(tmp_path, visit)


def test_reload_continues_when_its_client_disconnects(tmp_path: Path) -> None:
    async def visit(fake: FakeControlTarget, client: AsyncControlClient) -> None:
        fake.gate.clear()
        waiting = asyncio.ensure_future(client.reload())  # noqa: TID251 - cancelled below
        await fake.until(lambda: fake.requests == [("reload", "")])
        waiting.cancel()
        await client.status()  # what was sent before has been seen
        fake.gate.set()
        assert fake.requests == [("reload", "")]

    run(tmp_path, visit)


def test_early_error_is_answered_even_without_wait(tmp_path: Path) -> None:
    async def visit(fake: FakeControlTarget, client: AsyncControlClient) -> None:
        with pytest.raises(ModelUnknown, match="nosuch"):
            await client.load("nosuch", wait=False)

    run(tmp_path, visit)


def test_failure_in_background_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def visit(fake: FakeControlTarget, client: AsyncControlClient) -> None:
        logged: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(routes._log, "warning", lambda text, *rest: logged.set_result(text % rest))
        fake.gate.clear()
        fake.error = DoesNotFit("It does not fit.")
        await client.load("tiny", wait=False)
        fake.gate.set()
        assert await logged == "A request of the control API failed: It does not fit."

    run(tmp_path, visit)


@pytest.mark.parametrize(
    "error",
    [
        ModelUnknown("No such.", remedy="The nearest is 'tiny'."),
        DoesNotFit("Too big.", remedy="Less.", details=("a table", "of two lines")),
        ServerFailed("It died.", cause="out_of_memory", exit_code=71, remedy="r", lines=("E x", "E y")),
        GaveUp("Gave up after 6 crashes."),
        Conflict("It was unloaded meanwhile."),
        Stopping("llamasup is stopping."),
        ConfigInvalid("config.yaml:3: nope", details=("one", "two")),
    ],
    ids=lambda error: error.cause,
)
def test_client_raises_the_same_error_as_the_server(tmp_path: Path, error: LlamasupError) -> None:
    async def visit(fake: FakeControlTarget, client: AsyncControlClient) -> None:
        fake.error = error
        with pytest.raises(type(error)) as raised:
            await client.reload()
        raised_error = raised.value
        for name in ("message", "remedy", "cause", "exit_code", "http_status", "lines", "details"):
            assert getattr(raised_error, name) == getattr(error, name), name

    run(tmp_path, visit)


def test_error_object_has_the_shape_of_the_contract(tmp_path: Path) -> None:
    (answer,) = raw(tmp_path, ("POST", "/llamasup/v1/models/nosuch/load"))
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "No model 'nosuch' is served here.",
        "type": "not_found_error",
        "code": 404,
        "cause": "model_not_found",
        "remedy": "The nearest is 'tiny'.",
        "exit_code": 66,
    }


def test_internal_error_is_answered_without_details_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def visit(fake: FakeControlTarget, client: AsyncControlClient) -> None:
        async def broken(model: str) -> None:
            raise RuntimeError("the secret inside")

        fake.restart = broken  # type: ignore[method-assign]
        with pytest.raises(LlamasupError) as raised:
            await client.restart("tiny")
        assert "secret" not in raised.value.message
        await client.restart("tiny", wait=False)
        assert (await client.status())["pid"] == 4242

    run(tmp_path, visit)
    assert "the secret inside" in caplog.text


@pytest.mark.parametrize(
    ("method", "target", "status", "cause"),
    [
        ("POST", "/llamasup/v1/models/tiny/load?wait=2", 400, "usage"),
        ("POST", "/llamasup/v1/models/tiny/load?wait=yes", 400, "usage"),
        ("POST", "/llamasup/v1/shutdown?now=-1", 400, "usage"),
        ("GET", "/llamasup/v1/models/tiny/logs?lines=10001", 400, "usage"),
        ("GET", "/llamasup/v1/models/tiny/logs?lines=" + "9" * 5000, 400, "usage"),
        ("GET", "/llamasup/v1/models/tiny/logs?lines=%D9%A1", 400, "usage"),
        ("GET", "/llamasup/v1/logs?lines=10001", 400, "usage"),
        ("GET", "/llamasup/v1/logs?follow=2", 400, "usage"),
        ("POST", "/llamasup/v1/logs", 405, "no_such_route"),
        ("GET", "/llamasup/v1/models/nosuch/logs", 404, "model_not_found"),
        ("GET", "/llamasup/v1/models/tiny/logs", 404, "no_log"),
        ("GET", "/llamasup/v1/nosuch", 404, "no_such_route"),
        ("GET", "/llamasup/v1/status/", 404, "no_such_route"),
        ("GET", "/llamasup/v2/status", 404, "no_such_route"),
        ("GET", "/llamasup/v1/shutdown", 405, "no_such_route"),
        ("GET", "/llamasup/v1/models/tiny/load", 405, "no_such_route"),
        ("POST", "/llamasup/v1/status", 405, "no_such_route"),
        ("DELETE", "/llamasup/v1/models/tiny/logs", 405, "no_such_route"),
    ],
)
def test_invalid_request_gets_an_error_object(
    tmp_path: Path, method: str, target: str, status: int, cause: str
) -> None:
    (answer,) = raw(tmp_path, (method, target))
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["code"], error["cause"]) == (status, cause)
    assert error["message"]
    assert error["remedy"]


def test_head_request_of_a_stream_keeps_the_connection_usable(tmp_path: Path) -> None:
    head, status = raw(tmp_path, ("HEAD", "/llamasup/v1/events"), ("GET", "/llamasup/v1/status"))
    assert head.headers["content-type"].startswith("text/event-stream")
    assert status.json()["pid"] == 4242


def test_status_contains_vram_reported_by_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "vram_by_process", lambda: {7: 1000, 8: 1})

    async def visit(fake: FakeControlTarget, client: AsyncControlClient) -> None:
        tiny, other = (await client.status())["models"]
        assert tiny["memory"] == {"ram_bytes": 1, "vram_bytes": 1000}
        assert other["memory"]["vram_bytes"] is None

    run(tmp_path, visit)


def test_blocking_client_sends_the_same_requests(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"one\ntwo\n")

    def ask(path: str) -> list[Any]:
        with ControlClient(ControlAddress(socket=path)) as client:
            return [
                client.status()["pid"],
                client.load("small")["id"],
                client.unload("tiny", wait=False)["id"],
                client.restart("tiny")["id"],
                client.reload()["added"],
                b"".join(client.log("tiny", lines=1)),
                next(iter(client.events()))["model"],
                client.shutdown(now=True)["pid"],
            ]

    async def both() -> None:
        fake = FakeControlTarget(log)
        async with served(fake, tmp_path) as (_, path):
            answers = await asyncio.to_thread(ask, path)
        assert answers == [4242, "tiny", "tiny", "tiny", ["new"], b"two\n", "tiny", 4242]
        assert [what for what, _ in fake.requests] == ["load", "unload", "restart", "reload", "shutdown"]

    asyncio.run(both())


# --- no llamasup, or another program -----------------------------------------------------------------


@contextmanager
def other_program(path: Path, response: bytes) -> Iterator[None]:
    """Another program answers once."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(response)

        thread = threading.Thread(target=answer)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize(
    ("response", "error", "says"),
    [
        (b"", ControlFailed, "broke"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ControlFailed, "broke"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", ControlFailed, "like a llamasup"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nNot Found", ControlFailed, "does not know"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\n[]", ControlFailed, "status 500"),
        (b'HTTP/1.1 503 No\r\nContent-Length: 14\r\n\r\n{"error":null}', ControlFailed, "status 503"),
    ],
)
def test_answer_of_another_program_is_a_control_error(
    tmp_path: Path, response: bytes, error: type[LlamasupError], says: str
) -> None:
    path = tmp_path / "other.sock"
    client = ControlClient(ControlAddress(socket=str(path)))
    with other_program(path, response), client, pytest.raises(error, match=says):
        client.reload()


# httpcore (1.0) leaves a Unix socket that could not be connected for the collector to close.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_missing_socket_is_an_error(tmp_path: Path) -> None:
    address = ControlAddress(socket=str(tmp_path / "control.sock"))
    with pytest.raises(NotRunning), ControlClient(address) as client:
        client.status()


@pytest.mark.parametrize(
    ("address", "error"),
    [
        (ControlAddress(url="http://127.0.0.1:1"), NotRunning),
        (ControlAddress(url="ftp://127.0.0.1:1"), UsageInvalid),
        (ControlAddress(url="http://"), UsageInvalid),
        (ControlAddress(url="http://[::1"), UsageInvalid),
    ],
)
def test_unreachable_address_is_an_error(address: ControlAddress, error: type[LlamasupError]) -> None:
    with pytest.raises(error), ControlClient(address) as client:
        client.status()


def test_a_key_is_sent_and_never_shown() -> None:
    address = ControlAddress(url="http://127.0.0.1:1", api_key="the-secret")
    assert "the-secret" not in repr(address)
    with pytest.raises(NotRunning) as raised, ControlClient(address) as client:
        client.status()
    assert "the-secret" not in str(raised.value)
