"""What the client of a batch makes of the answers of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from llamasup.errors import NotAllowed, NotRunning
from llamasup.features.batch.client import READ_TIMEOUT_S, Answer, BatchClient
from llamasup.features.batch.schedule import Refusal

Handler = Callable[[httpx.Request], httpx.Response]

OURS = {"data": [{"id": "tiny", "owned_by": "llamasup"}]}


def client_of(handler: Handler, url: str = "http://server") -> BatchClient:
    client = BatchClient(url)
    client._http._transport = httpx.MockTransport(handler)
    return client


def unknown(handler: Handler, url: str = "http://server") -> Mapping[str, str]:
    return asyncio.run(client_of(handler, url).unknown_models(["big"], 0.0))


def answer_of(response: httpx.Response) -> Answer:
    return asyncio.run(client_of(lambda _: response).send("/v1/embeddings", b"{}"))


def test_url_may_end_with_v1() -> None:
    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(404 if "big" in request.url.path else 200, json=OURS)

    for url in ("http://server", "http://server/", "http://server/v1", "http://server/v1/"):
        asked: list[str] = []
        assert list(unknown(serve, url)) == ["big"]
        assert asked == ["/v1/models", "/v1/models/big"]


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (httpx.Response(404, text="no"), "http://server/v1/models answers with the status 404"),
        (httpx.Response(302), "the status 302"),
        (httpx.Response(200, text="<html>"), "does not answer with a list of models"),
    ],
)
def test_server_that_is_not_llamasup_is_named(response: httpx.Response, why: str) -> None:
    with pytest.raises(NotRunning, match=why):
        unknown(lambda _: response)


def test_llamasup_that_starts_and_another_server_take_every_model() -> None:
    assert unknown(lambda _: httpx.Response(503, json={"error": {"message": "starting"}})) == {}
    assert unknown(lambda _: httpx.Response(200, json={"data": [{"id": "x"}]})) == {}


def test_key_that_is_refused_is_an_error() -> None:
    with pytest.raises(NotAllowed, match="no key"):
        unknown(lambda _: httpx.Response(401, json={"error": {"message": "no key"}}))


@pytest.mark.parametrize("stream", [False, True])
def test_server_that_says_nothing_is_a_time_out(stream: bool) -> None:
    async def ask() -> Answer:
        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            await done.wait()
            writer.close()

        done = asyncio.Event()
        async with await asyncio.start_server(say_nothing, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            client = BatchClient(f"http://127.0.0.1:{port}", timeout_s=0.01)
            try:
                return await client.send("/v1/completions", b'{"prompt": "x"}', stream=stream)
            finally:
                await client.aclose()
                done.set()

    answer = asyncio.run(ask())
    assert answer.refusal is not None
    assert answer.refusal.status == 504


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_request_that_is_cancelled_as_its_answer_arrives_leaves_no_error(
    tmp_path: Path, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def ask() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            requests.pop().cancel()
            writer.close()

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context["message"]))
        async with await asyncio.start_unix_server(answer, tmp_path / "s"):
            for _ in range(20):
                client = BatchClient("http://x", socket=str(tmp_path / "s"))
                requests = [loop.create_task(client.send("/v1/completions", b""))]
                with pytest.raises(asyncio.CancelledError):
                    await requests[0]
                await client.aclose()

    errors: list[str] = []
    run(ask())
    assert errors == []


def test_requests_have_a_time_limit_by_default() -> None:
    limits: list[object] = []

    def serve(request: httpx.Request) -> httpx.Response:
        limits.append(request.extensions["timeout"]["read"])
        return httpx.Response(200, text="{}")

    asyncio.run(client_of(serve).send("/v1/embeddings", b"{}"))
    assert limits == [READ_TIMEOUT_S]


def test_only_an_answer_with_a_body_is_an_answer() -> None:
    assert answer_of(httpx.Response(200, text="{}")).refusal is None
    assert answer_of(httpx.Response(302, text="moved")).refusal == Refusal(302)
    assert answer_of(httpx.Response(200)).refusal == Refusal(500, "", "the answer is empty")
