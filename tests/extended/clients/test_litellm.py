"""``litellm``, as a client of the chat, embeddings and messages APIs."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from tests.clients.conftest import KEY, LONG, Served, frees_slot
from tests.clients.prompts import QUESTION, WEATHER_PARAMETERS, Reading, is_weather

pytestmark = [
    # Of its own classes: they are built, and serialised, in ways that pydantic does not like.
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict class:UserWarning"),
]

MESSAGES = [{"role": "user", "content": QUESTION}]
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER_PARAMETERS},
}


def of(served: Served, model: str = "openai/tiny", **options: Any) -> dict[str, Any]:
    base = served.url if model.startswith("anthropic/") else served.v1
    return {"model": model, "api_base": base, "api_key": KEY, "max_retries": 0, **options}


@pytest.mark.parametrize("model", ["openai/tiny", "anthropic/tiny"])
def test_streamed_and_plain_chat_are_equal(litellm: Any, chat: Served, model: str) -> None:
    options = of(chat, model, messages=MESSAGES, temperature=0, max_tokens=20)
    plain = litellm.completion(**options)
    chunks = list(litellm.completion(**options, stream=True))
    text = plain.choices[0].message.content
    assert text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert len(chunks) > 10
    assert plain.usage.completion_tokens == 20


@pytest.mark.parametrize("model", ["openai/caller", "anthropic/caller"])
def test_required_tool_is_called(litellm: Any, tools: Served, model: str) -> None:
    options = of(tools, model, messages=MESSAGES, tools=[WEATHER], tool_choice="required", temperature=0)
    (call,) = litellm.completion(**options, max_tokens=300).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert is_weather(json.loads(call.function.arguments))


def test_answer_by_a_schema_is_valid(litellm: Any, tools: Served) -> None:
    answer = litellm.completion(
        **of(tools, "openai/caller", messages=MESSAGES, response_format=Reading, temperature=0)
    )
    assert isinstance(Reading.model_validate_json(answer.choices[0].message.content), Reading)


def test_texts_are_embedded(litellm: Any, encoder: Served) -> None:
    answer = litellm.embedding(**of(encoder, "openai/encoder", input=["cat", "cat", "hello world"]))
    cat, same, other = (item["embedding"] for item in answer.data)
    assert len(cat) == 64
    assert math.dist(cat, same) < 1e-4 < math.dist(cat, other)


def test_concurrent_requests_are_all_answered(litellm: Any, chat: Served) -> None:
    async def ask_all() -> list[Any]:
        options = of(chat, messages=MESSAGES, max_tokens=10)
        return list(await asyncio.gather(*(litellm.acompletion(**options) for _ in range(8))))

    assert all(answer.usage.completion_tokens == 10 for answer in asyncio.run(ask_all()))


def test_abandoned_stream_frees_the_slot(litellm: Any, chat: Served) -> None:
    async def leave() -> None:
        stream = await litellm.acompletion(**of(chat, messages=MESSAGES, max_tokens=LONG, stream=True))
        async for _ in stream:
            break
        await stream.aclose()

    with frees_slot(chat):
        asyncio.run(leave())


def test_errors_have_the_classes_of_litellm(litellm: Any, chat: Served) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**of(chat, messages=MESSAGES) | {"api_key": "another"})
    with pytest.raises(litellm.BadRequestError, match="context"):
        litellm.completion(**of(chat, messages=[{"role": "user", "content": "the " * 40_000}]))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**of(chat, messages=MESSAGES) | {"api_base": f"{chat.url}/nowhere"})
