"""The official ``openai`` client, through llamasup and a real llama-server."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.clients.conftest import KEY, LONG, Served, frees_slot
from tests.clients.prompts import QUESTION, WEATHER_PARAMETERS, Reading, grammar_for, is_weather

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER_PARAMETERS},
}


def client_of(served: Served, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.v1, **{"api_key": KEY, "max_retries": 0, **options})


def async_client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.v1, api_key=KEY, max_retries=0)


@pytest.fixture
def client(chat: Served) -> Iterator[openai.OpenAI]:
    with client_of(chat) as client:
        yield client


def test_chat_equals_direct_answer_of_server_plain_and_streamed(client: openai.OpenAI, chat: Served) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "seed": 1, "max_tokens": 40}
    direct = chat.direct("/v1/chat/completions", body)
    plain = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, seed=1, max_tokens=40
    )
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        seed=1,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)

    text = direct["choices"][0]["message"]["content"]
    assert text
    assert plain.choices[0].message.content == text
    assert plain.choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert len(chunks) > 40  # token by token, not all at once
    assert chunks[-1].usage is not None
    assert plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens == 40


def test_completions_api_equals_direct_answer_of_server(client: openai.OpenAI, chat: Served) -> None:
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 10}
    plain = client.completions.create(model="tiny", prompt="Once", temperature=0, max_tokens=10)
    stream = client.completions.create(model="tiny", prompt="Once", temperature=0, max_tokens=10, stream=True)
    text = chat.direct("/v1/completions", body)["choices"][0]["text"]
    assert text
    assert plain.choices[0].text == text
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == text


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_required_tool_is_called_and_its_result_accepted(tools: Served) -> None:
    with client_of(tools) as client:
        answer = client.chat.completions.create(
            model="caller",
            messages=MESSAGES,
            tools=[WEATHER],
            tool_choice="required",
            max_tokens=300,
            temperature=0,
        )
        (call,) = answer.choices[0].message.tool_calls or []
        assert answer.choices[0].finish_reason == "tool_calls"
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert is_weather(json.loads(call.function.arguments))

        talk: list[Any] = [
            *MESSAGES,
            {"role": "assistant", "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"},
        ]
        after = client.chat.completions.create(
            model="caller",
            messages=talk,
            tools=[WEATHER],
            tool_choice="none",
            max_tokens=5,
        )
        assert after.usage is not None
        assert answer.usage is not None
        assert after.usage.prompt_tokens > answer.usage.prompt_tokens


def test_pieces_of_a_streamed_tool_call_form_one_call(tools: Served) -> None:
    with (
        client_of(tools) as client,
        client.chat.completions.stream(
            model="caller",
            messages=MESSAGES,
            tools=[WEATHER],
            tool_choice="required",
            max_tokens=300,
            temperature=0,
        ) as stream,
    ):
        pieces = sum(event.type == "tool_calls.function.arguments.delta" for event in stream)
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    assert pieces > 5
    assert is_weather(json.loads(call.function.arguments))


def test_answer_by_a_schema_parses_into_its_class(tools: Served) -> None:
    with client_of(tools) as client:
        answer = client.chat.completions.parse(
            model="caller", messages=MESSAGES, response_format=Reading, temperature=0, max_tokens=300
        )
    assert isinstance(answer.choices[0].message.parsed, Reading)


def test_embeddings_equal_those_of_the_server(encoder: Served) -> None:
    texts = ["hello world", "cat", "cat"]
    with client_of(encoder) as client:  # asks for base64, and unpacks it
        vectors = [item.embedding for item in client.embeddings.create(model="encoder", input=texts).data]
    direct = [item["embedding"] for item in encoder.direct("/v1/embeddings", {"input": texts})["data"]]
    assert [len(vector) for vector in vectors] == [64, 64, 64]
    assert all(math.dist(*pair) < 1e-4 for pair in zip(vectors, direct, strict=True))
    assert math.dist(vectors[1], vectors[2]) < 1e-4 < math.dist(vectors[0], vectors[1])


def test_responses_are_answered_plain_and_streamed(client: openai.OpenAI, chat: Served) -> None:
    plain = client.responses.create(model="tiny", input=QUESTION, temperature=0, max_output_tokens=20)
    direct = chat.direct(
        "/v1/responses", {"input": QUESTION, "temperature": 0, "max_output_tokens": 20, "model": "tiny"}
    )
    # Its raw events: responses.stream() wants more of the first one than llama-server (b11434) puts there.
    events = list(
        client.responses.create(
            model="tiny", input=QUESTION, temperature=0, max_output_tokens=20, stream=True
        )
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert plain.output_text == direct["output"][0]["content"][0]["text"] != ""
    assert "".join(deltas) == plain.output_text
    assert len(deltas) > 10
    assert events[-1].type == "response.completed"
    assert plain.usage is not None
    assert plain.usage.output_tokens == 20


def test_responses_api_calls_a_tool(tools: Served) -> None:
    with client_of(tools) as client:
        answer = client.responses.create(
            model="caller",
            input=QUESTION,
            tools=[
                {"type": "function", "name": "get_weather", "parameters": WEATHER_PARAMETERS, "strict": True}
            ],
            tool_choice="required",
            max_output_tokens=300,
            temperature=0,
        )
    (call,) = answer.output
    assert call.type == "function_call"
    assert is_weather(json.loads(call.arguments))


# --- many, and leaving -----------------------------------------------------------------------------------


def test_twenty_concurrent_requests_get_their_own_answers(chat: Served) -> None:
    """More than there are slots. A grammar lets each of them be answered in one way only."""
    texts = [f"word number {number} " * 5 for number in range(20)]

    async def ask(client: openai.AsyncOpenAI, text: str) -> str:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, extra_body={"grammar": grammar_for(text)}
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def ask_all() -> list[str]:
        async with async_client_of(chat) as client:
            return list(await asyncio.gather(*(ask(client, text) for text in texts)))

    assert asyncio.run(ask_all()) == texts


def test_closed_stream_frees_the_slot(client: openai.OpenAI, chat: Served) -> None:
    with frees_slot(chat):
        stream = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=LONG, stream=True)
        next(iter(stream))
        stream.close()


def test_cancelled_reader_task_frees_the_slot(chat: Served) -> None:
    """A stream: llama-server (b11434) does not check for the client of an answer without a stream."""

    async def leave() -> None:
        async with async_client_of(chat) as client, asyncio.TaskGroup() as tasks:
            report_progress = asyncio.Event()

            async def read() -> None:
                stream = await client.chat.completions.create(
                    model="tiny", messages=MESSAGES, max_tokens=LONG, stream=True
                )
                async for _ in stream:
                    report_progress.set()

            reading = tasks.create_task(read())
            await report_progress.wait()
            reading.cancel()

    with frees_slot(chat):
        asyncio.run(leave())


# --- errors ----------------------------------------------------------------------------------------------


def test_wrong_key_is_an_authentication_error(chat: Served) -> None:
    with client_of(chat, api_key="another") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"]


def test_too_long_prompt_error_gives_prompt_and_context_size(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "the " * 40_000}])
    error = caught.value.body
    assert isinstance(error, dict)
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > error["n_ctx"] > 0


def test_missing_routes_are_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.files.list()


def test_loading_model_gives_503_at_once_and_an_answer_after_retries(
    slow_to_load: Callable[[], tuple[Served, Callable[[], None]]],
) -> None:
    """Without a queue: 503 with Retry-After, which the client respects."""
    served, load = slow_to_load()
    with client_of(served) as client_without_retries, pytest.raises(openai.InternalServerError) as caught:
        client_without_retries.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1

    seen: list[int] = []

    def note(response: httpx.Response) -> None:
        seen.append(response.status_code)
        if len(seen) == 1:
            load()
            served.running.wait_for("ready")

    http = httpx.Client(event_hooks={"response": [note]})
    with client_of(served, max_retries=2, http_client=http) as retrying_client:
        answer = retrying_client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
    assert seen == [503, 200]
    assert answer.choices[0].message.content
