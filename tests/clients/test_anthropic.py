"""The official ``anthropic`` client: llama-server's messages API, through llamasup."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam

from tests.clients.conftest import KEY, LONG, Served, frees_slot
from tests.clients.prompts import QUESTION, WEATHER_PARAMETERS, is_weather

MESSAGES: list[MessageParam] = [{"role": "user", "content": QUESTION}]
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": WEATHER_PARAMETERS,
}


def client_of(served: Served, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, **{"api_key": KEY, "max_retries": 0, **options})


@pytest.fixture
def client(chat: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(chat) as client:
        yield client


def test_message_equals_direct_answer_of_server_plain_and_streamed(
    client: anthropic.Anthropic, chat: Served
) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 30, "model": "tiny"}
    text = chat.direct("/v1/messages", body)["content"][0]["text"]
    plain = client.messages.create(
        model="tiny", messages=MESSAGES, max_tokens=30, extra_body={"temperature": 0}
    )
    with client.messages.stream(
        model="tiny", messages=MESSAGES, max_tokens=30, extra_body={"temperature": 0}
    ) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()

    (block,) = plain.content
    assert block.type == "text"
    assert block.text == text != ""
    assert "".join(pieces) == text
    assert len(pieces) > 10
    assert plain.stop_reason == streamed.stop_reason == "max_tokens"
    assert plain.usage.output_tokens == streamed.usage.output_tokens == 30


def test_required_tool_is_used_plain_and_streamed(tools: Served) -> None:
    with client_of(tools) as client:
        plain = client.messages.create(
            model="caller",
            messages=MESSAGES,
            tools=[WEATHER],
            tool_choice={"type": "any"},
            extra_body={"temperature": 0},
            max_tokens=300,
        )
        with client.messages.stream(
            model="caller",
            messages=MESSAGES,
            tools=[WEATHER],
            tool_choice={"type": "any"},
            extra_body={"temperature": 0},
            max_tokens=300,
        ) as stream:
            streamed = stream.get_final_message()
    for message in (plain, streamed):
        (use,) = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == "tool_use"
        assert use.name == "get_weather"
        assert is_weather(use.input)


def test_counted_tokens_equal_the_usage_of_the_answer(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens
    usage = client.messages.create(model="tiny", messages=MESSAGES, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_async_client_gets_answers_to_concurrent_requests(chat: Served) -> None:
    async def ask_all() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=chat.url, api_key=KEY, max_retries=0) as client:

            async def ask() -> str:
                async with client.messages.stream(model="tiny", messages=MESSAGES, max_tokens=20) as stream:
                    return await stream.get_final_text()

            return list(await asyncio.gather(*(ask() for _ in range(8))))

    answers = asyncio.run(ask_all())
    assert len(answers) == 8
    assert all(answers)


def test_abandoned_stream_frees_the_slot(client: anthropic.Anthropic, chat: Served) -> None:
    with (
        frees_slot(chat),
        client.messages.stream(model="tiny", messages=MESSAGES, max_tokens=LONG) as stream,
    ):
        next(iter(stream.text_stream))


def test_bearer_token_works_like_an_api_key(chat: Served) -> None:
    with client_of(chat, api_key=None, auth_token=KEY) as client:
        assert client.messages.create(model="tiny", messages=MESSAGES, max_tokens=1).content


def test_wrong_key_is_an_authentication_error(chat: Served) -> None:
    with client_of(chat, api_key="another") as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model="tiny", messages=MESSAGES, max_tokens=1)


def test_too_long_prompt_is_a_bad_request(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(
            model="tiny", messages=[{"role": "user", "content": "the " * 40_000}], max_tokens=1
        )


def test_missing_routes_are_404(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list()
