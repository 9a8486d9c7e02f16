"""``langchain-openai``, as a client of the chat and embeddings APIs."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import SecretStr

from tests.clients.conftest import KEY, LONG, Served, frees_slot
from tests.clients.prompts import QUESTION, WEATHER_PARAMETERS, Reading, is_weather

WEATHER = {"title": "get_weather", "description": "The weather.", **WEATHER_PARAMETERS}


def model_of(served: Served, **options: Any) -> ChatOpenAI:
    given = {"api_key": SecretStr(KEY), "model": "tiny", "max_retries": 0, "temperature": 0, **options}
    return ChatOpenAI(base_url=served.v1, **given)


def test_streamed_and_plain_chat_are_equal(chat: Served) -> None:
    model = model_of(chat, max_tokens=20, stream_usage=True)
    plain = model.invoke(QUESTION)
    pieces = list(model.stream(QUESTION))
    assert plain.text
    assert "".join(piece.text for piece in pieces) == plain.text
    assert len(pieces) > 10
    assert plain.usage_metadata is not None
    assert plain.usage_metadata["output_tokens"] == 20
    usages = [piece.usage_metadata for piece in pieces if piece.usage_metadata is not None]
    assert sum(usage["output_tokens"] for usage in usages) == 20


def test_bound_tool_is_called(tools: Served) -> None:
    model = model_of(tools, max_tokens=300).bind_tools([WEATHER], tool_choice="required")
    (call,) = model.invoke(QUESTION).tool_calls
    assert call["name"] == "get_weather"
    assert is_weather(call["args"])


def test_structured_output_has_the_requested_class(tools: Served) -> None:
    answer = model_of(tools, max_tokens=300).with_structured_output(Reading).invoke(QUESTION)
    assert isinstance(answer, Reading)


def test_texts_are_embedded(encoder: Served) -> None:
    model = OpenAIEmbeddings(
        base_url=encoder.v1,
        api_key=SecretStr(KEY),
        model="encoder",
        check_embedding_ctx_length=False,  # else it sends numbers of OpenAI's tokens
        max_retries=0,
    )
    cat, same, other = model.embed_documents(["cat", "cat", "hello world"])
    assert len(cat) == 64
    assert math.dist(cat, same) < 1e-4 < math.dist(cat, other)
    assert math.dist(model.embed_query("cat"), cat) < 1e-4


def test_batch_is_answered_concurrently(chat: Served) -> None:
    async def ask_all() -> list[AIMessage]:
        async with httpx.AsyncClient() as http:  # its own one would outlive this loop
            return await model_of(chat, max_tokens=10, http_async_client=http).abatch([QUESTION] * 8)

    answers = asyncio.run(ask_all())
    usages = [answer.usage_metadata for answer in answers]
    assert [usage and usage["output_tokens"] for usage in usages] == [10] * 8


def test_abandoned_stream_frees_the_slot(chat: Served) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient() as http:
            stream = model_of(chat, max_tokens=LONG, http_async_client=http).astream(QUESTION)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            await asyncio.to_thread(chat.wait_until_idle)  # while its client lives on

    with frees_slot(chat):
        asyncio.run(leave())


def test_errors_have_the_classes_of_the_openai_client(chat: Served) -> None:
    with pytest.raises(openai.AuthenticationError):
        model_of(chat, api_key=SecretStr("another")).invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="context"):
        model_of(chat).invoke("the " * 40_000)
