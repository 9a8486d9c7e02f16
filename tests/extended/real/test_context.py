"""How llamasup recognizes a full context in the answers of a real llama-server, in every API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from llamasup.core.llama_server.answers import ContextWindow
from llamasup.core.observability.counters import RequestRecord
from llamasup.core.observability.observer import Observer
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.states import State
from tests.e2e.service import PATIENCE_S, Serving, serving

N_CTX = 256
LONG = "word " * 600
_MESSAGES = [{"role": "user", "content": "Tell me."}]
_LONG_MESSAGES = [{"role": "user", "content": LONG}]
# path, a prompt, one that is too long, and what limits the answer
APIS: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any], str], ...] = (
    ("/completion", {"prompt": "some words"}, {"prompt": LONG}, "n_predict"),
    ("/v1/completions", {"prompt": "some words"}, {"prompt": LONG}, "max_tokens"),
    ("/v1/chat/completions", {"messages": _MESSAGES}, {"messages": _LONG_MESSAGES}, "max_tokens"),
    ("/v1/responses", {"input": "some words"}, {"input": LONG}, "max_output_tokens"),
    ("/v1/messages", {"messages": _MESSAGES}, {"messages": _LONG_MESSAGES}, "max_tokens"),
)


class RecordedClient:
    """A service with a small context, and the record of each request."""

    def __init__(self, server: Serving) -> None:
        self._client = server.client
        self._records: asyncio.Queue[RequestRecord] = asyncio.Queue()
        server.service.observe(Observer(finished=self._records.put_nowait))

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[httpx.Response, RequestRecord]:
        answer = await self._client.post(path, json={"temperature": 0, **body})
        return answer, await self._records.get()


async def window_of(server: Serving) -> ContextWindow:
    """llamasup reads it once the server is ready."""
    await server.reaches(State.READY, 1)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            endpoint = server.runner.endpoint
            if isinstance(endpoint, Endpoint) and endpoint.window is not None:
                return endpoint.window
            await asyncio.sleep(0.005)


def test_full_context_is_detected_in_every_api_plain_and_streamed(runtime: str, tiny_model: Path) -> None:
    async def scenario() -> None:
        settings = Settings(ctx_size=N_CTX, parallel=2)
        async with serving(tiny_model, runtime=runtime, settings=settings) as server:
            assert await window_of(server) == ContextWindow(N_CTX, N_CTX)
            client = RecordedClient(server)
            for path, prompt, too_long, limit in APIS:
                for stream in (False, True):
                    case = f"{path}, stream {stream}"
                    endless: Mapping[str, Any] = {"ignore_eos": True, limit: 100_000, "stream": stream}
                    answer, record = await client.post(path, {**prompt, **endless})
                    assert (answer.status_code, record.context) == (200, "cut"), case
                    assert (record.n_ctx, record.n_prompt_tokens) == (N_CTX, record.tokens_prompt), case
                    total = (record.tokens_prompt or 0) + (record.tokens_completion or 0)
                    assert total == N_CTX, case

                    _, record = await client.post(path, {**prompt, **endless, limit: 5})
                    assert (record.tokens_completion, record.context) == (5, ""), case

                    answer, record = await client.post(path, {**too_long, limit: 5, "stream": stream})
                    error = json.loads(answer.content)["error"]
                    assert (answer.status_code, error["type"]) == (400, "exceed_context_size_error"), case
                    assert (record.status, record.context) == (400, "exceeded"), case
                    reported = (error["n_prompt_tokens"], error["n_ctx"])
                    assert (record.n_prompt_tokens, record.n_ctx) == reported, case
                    assert (record.tokens_prompt, record.tokens_completion) == (None, None), case
            text = (await server.client.get("/metrics")).text
            for kind in ("cut", "exceeded"):
                expected = 2.0 * len(APIS)
                assert f'llamasup_context_ends_total{{kind="{kind}",model="tiny"}} {expected}' in text

    asyncio.run(scenario())


def test_full_context_is_detected_with_a_draft_model(runtime: str, tiny_model: Path) -> None:
    async def scenario() -> None:
        settings = Settings(ctx_size=N_CTX, parallel=2, draft_model=str(tiny_model))
        async with serving(tiny_model, runtime=runtime, settings=settings) as server:
            window = await window_of(server)
            assert window.full_from < window.n_ctx
            client = RecordedClient(server)
            for path, prompt, _, limit in APIS:
                for stream in (False, True):
                    endless: Mapping[str, Any] = {"ignore_eos": True, limit: 100_000, "stream": stream}
                    _, record = await client.post(path, {**prompt, **endless})
                    assert record.context == "cut", f"{path}, stream {stream}: {record}"
                    _, record = await client.post(path, {**prompt, **endless, limit: 5})
                    assert record.context == "", f"{path}, stream {stream}: {record}"

    asyncio.run(scenario())


def test_shifted_context_is_distinguished_from_one_that_ends(runtime: str, tiny_model: Path) -> None:
    async def scenario() -> None:
        settings = Settings(ctx_size=N_CTX, parallel=2, extra=("--context-shift",))
        async with serving(tiny_model, runtime=runtime, settings=settings) as server:
            await window_of(server)
            client = RecordedClient(server)
            body = {"prompt": "some words", "ignore_eos": True, "n_predict": 400}
            _, record = await client.post("/completion", body)
            assert (record.tokens_completion, record.context) == (400, "shifted")

    asyncio.run(scenario())
