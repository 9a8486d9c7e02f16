"""Downloads and removals that a client of the control API asks for, over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from llamasup.core.control.streams import MAX_PULLS, MAX_PULLS_OF_ONE, Streams, pull_stream
from llamasup.core.hub.remote_file import Listener
from llamasup.errors import Conflict, DownloadFailed
from tests.core.control.fake import PATIENCE_S, FakeControlTarget, served

PROGRESS = {"event": "progress", "done_bytes": 5, "total_bytes": 10, "bytes_per_s": 1}


def run(folder: Path, visit: Callable[[FakeControlTarget, httpx.AsyncClient], Awaitable[None]]) -> None:
    async def both() -> None:
        fake = FakeControlTarget()
        async with served(fake, folder) as (_, path):
            transport = httpx.AsyncHTTPTransport(uds=path)
            base = "http://localhost/llamasup/v1"
            async with httpx.AsyncClient(transport=transport, base_url=base, timeout=PATIENCE_S) as http:
                await visit(fake, http)

    asyncio.run(both())


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(block[6:]) for block in text.split("\n\n") if block.startswith("data: ")]


def test_download_is_a_stream_of_events(tmp_path: Path) -> None:
    async def visit(fake: FakeControlTarget, http: httpx.AsyncClient) -> None:
        answer = await http.post("/pull", json={"model": "tiny"})
        assert events(answer.text)[-1] == {"event": "done"}
        assert fake.requests == [("pull", "tiny")]

    run(tmp_path, visit)


def test_failed_download_ends_with_its_error(tmp_path: Path) -> None:
    async def visit(fake: FakeControlTarget, http: httpx.AsyncClient) -> None:
        fake.error = DownloadFailed("The hub is away.", remedy="Try again.")
        answer = await http.post("/pull", json={"model": "tiny"})
        last = events(answer.text)[-1]
        assert (last["event"], last["error"]["message"], last["error"]["code"]) == (
            "error",
            "The hub is away.",
            503,
        )
        unknown = await http.post("/pull", json={"model": "nope"})
        assert (unknown.status_code, unknown.json()["error"]["cause"]) == (404, "model_not_found")
        assert (await http.post("/pull", json={})).status_code == 400

    run(tmp_path, visit)


def test_download_ends_with_its_client(tmp_path: Path) -> None:
    async def visit(fake: FakeControlTarget, http: httpx.AsyncClient) -> None:
        fake.gate.clear()
        async with http.stream("POST", "/pull", json={"model": "tiny"}) as answer:
            first = await anext(answer.aiter_lines())
            assert json.loads(first.removeprefix("data: ")) == PROGRESS
        await fake.until(lambda: fake.requests == [("pull", "tiny"), ("pull given up", "tiny")])

    run(tmp_path, visit)


def test_downloads_are_bounded_and_leave_the_streams_to_operators(tmp_path: Path) -> None:
    async def visit(fake: FakeControlTarget, http: httpx.AsyncClient) -> None:
        fake.gate.clear()

        async def pull(client: str) -> int:
            body = {"model": "tiny", "client": client}
            return (await opened.enter_async_context(http.stream("POST", "/pull", json=body))).status_code

        async with AsyncExitStack() as opened:
            assert [await pull("a") for _ in range(MAX_PULLS_OF_ONE)] == [200] * MAX_PULLS_OF_ONE
            assert await pull("a") == 429
            assert [await pull("") for _ in range(MAX_PULLS - MAX_PULLS_OF_ONE)][-1] == 200
            assert await pull("b") == 429
            async with http.stream("GET", "/events") as events:
                assert events.status_code == 200

    run(tmp_path, visit)


def test_model_is_removed(tmp_path: Path) -> None:
    async def visit(fake: FakeControlTarget, http: httpx.AsyncClient) -> None:
        answer = await http.post("/models/org%2Frepo%3Aq8_0/remove")
        assert answer.json() == {"removed": ["/models/org/repo:q8_0.gguf"], "freed_bytes": 10}
        fake.error = Conflict("It stays.")
        assert (await http.post("/models/tiny/remove")).status_code == 409
        assert fake.requests == [("rm", "org/repo:q8_0"), ("rm", "tiny")]

    run(tmp_path, visit)


async def _collected(fetch: Callable[[Listener], Any], streams: Streams) -> list[dict[str, Any]]:
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        frames = [frame async for frame in pull_stream(fetch, streams, tasks, keepalive_s=0.001)]
    return events(b"".join(frames).decode())


def test_unexpected_error_ends_the_download_and_not_llamasup() -> None:
    async def fetch(_listener: Listener) -> None:
        raise RuntimeError("bug")

    (last,) = asyncio.run(_collected(fetch, Streams()))
    assert last["error"]["message"] == "Internal error in llamasup: RuntimeError."


def test_download_ends_with_llamasup() -> None:
    streams = Streams()

    async def fetch(_listener: Listener) -> None:
        await asyncio.sleep(0.01)  # some comments
        streams.end()
        await asyncio.Event().wait()

    (last,) = asyncio.run(_collected(fetch, streams))
    assert last["error"]["cause"] == "stopping"
