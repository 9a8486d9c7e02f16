"""Which requests can be continued, and how."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamasup.features.continuation.answer import NotContinued
from llamasup.features.continuation.apis import API_BY_ROUTE
from llamasup.features.continuation.request import Body, encoded, limited, of_request
from llamasup.features.continuation.stream import Recording
from tests.features.continuation.streams import SERVERS, ChatServer, MessagesServer, data, framed

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def continued(route: str, request: Any, *events: str) -> Any:
    """The body of the request that continues these events."""
    record = Recording(route, request if isinstance(request, bytes) else json.dumps(request).encode())
    record.begin(lambda _: None)
    for read in framed(events):
        record.relay(read)
    return json.loads(record.continued_body())


def chat(request: dict[str, Any], *deltas: dict[str, Any]) -> Any:
    events = [data({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    messages = [{"role": "user", "content": "Tell me"}]
    return continued(ChatServer.route, {"messages": messages, **request}, *events)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"response_format": {"type": "json_object"}}, "grammar of response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "grammar of response_format"),
        ({"text": {"format": {"type": "json_schema"}}}, "grammar of text"),
        ({"grammar": 'root ::= "a"'}, "grammar of grammar"),
        ({"json_schema": {"type": "object"}}, "grammar of json_schema"),
        ({"output_config": {"format": {}}}, "grammar of output_config"),
        ({"tool_choice": "required"}, "grammar of tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "grammar of tool_choice"),
        ({"n": 2}, "several answers of n"),
        ({"n_cmpl": 3}, "several answers of n_cmpl"),
        ({"mirostat": 2}, "sampler mirostat"),
        ({"t_max_predict_ms": 500}, "t_max_predict_ms does not count"),
        ({"response_fields": ["content"]}, "response_fields does not count"),
        ({"adaptive_target": 0.5}, "sampler adaptive_target"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "images or sounds"),
        ({"messages": [{"role": "user", "content": ["text"]}]}, "images or sounds"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
            "images or sounds",
        ),
        ({"messages": "Tell me"}, "messages is not a list of messages"),
        ({"messages": [1]}, "messages is not a list of messages"),
    ],
)
def test_answer_whose_state_is_lost_is_not_continued(request_: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotContinued, match=reason):
        chat(request_, {"content": "Once"})


@pytest.mark.parametrize(
    "request_",
    [
        {"response_format": {"type": "text"}, "n": 1, "mirostat": 0, "adaptive_target": -1},
        {"text": {"format": {"type": "text"}}, "tool_choice": "auto", "grammar": "", "tools": []},
        {"tool_choice": {"type": "auto"}, "text": "not an object", "response_format": None},
        {"messages": [{"role": "user", "content": [{"text": "a"}, {"type": "text", "text": "b"}]}]},
        {"temperature": 0.7, "seed": 42, "logit_bias": {"5": -1}, "top_p": 0.95},
    ],
)
def test_answer_without_such_a_state_is_continued(request_: dict[str, Any]) -> None:
    body = chat(request_, {"content": "Once"})
    assert body["messages"][-1] == {"role": "assistant", "content": "Once"}
    for name, value in request_.items():
        assert name == "messages" or body[name] == value


def test_members_of_the_request_stay_as_they_were_written() -> None:
    body = b'{"seed":12345678901234567890,"x":1.50,"prompt":"a","max_tokens":-1}'
    assert encoded(of_request(body)) == body
    parts: Body = of_request(body)
    assert limited(parts, 5) is False
    assert encoded(parts) == body


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff"])
def test_request_that_is_not_an_object_is_not_continued(body: bytes) -> None:
    with pytest.raises(NotContinued, match="not a JSON object"):
        continued(ChatServer.route, body, data({"choices": [{"delta": {"content": "Once"}}]}))


def test_answer_that_the_client_began_is_continued_once() -> None:
    """The stream repeats what the client wrote."""
    begun = [{"role": "user", "content": "Tell me"}, {"role": "assistant", "content": "Once"}]
    body = chat({"messages": begun}, {"content": "Once there"})
    assert body["messages"] == [begun[0], {"role": "assistant", "content": "Once there"}]


def test_reasoning_is_part_of_the_begun_message() -> None:
    body = chat({}, {"reasoning_content": "Hm"}, {"reasoning_content": "."}, {"content": "Once"})
    assert body["messages"][-1] == {"role": "assistant", "content": "Once", "reasoning_content": "Hm."}


def test_answer_within_its_reasoning_is_not_continued() -> None:
    with pytest.raises(NotContinued, match="still in its reasoning"):
        chat({}, {"reasoning_content": "Hm"})


@pytest.mark.parametrize("delta", [{"tool_calls": [{"index": 0}]}, {"function_call": {"name": "f"}}])
def test_begun_tool_call_is_not_continued(delta: dict[str, Any]) -> None:
    with pytest.raises(NotContinued, match="tool call has begun"):
        chat({}, {"content": "Once"}, delta)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([{"type": "content_block_start", "content_block": {"type": "tool_use"}}], "tool call has begun"),
        ([{"type": "content_block_delta", "delta": {"thinking": "Hm"}}], "thinking blocks"),
        ([{"type": "message_stop"}], "complete but for its end"),
        (["not an object"], "is not an object"),
    ],
)
def test_other_events_of_messages_are_not_continued(events: list[Any], reason: str) -> None:
    texts = [data(json.dumps(event)) for event in events]
    with pytest.raises(NotContinued, match=reason):
        continued(MessagesServer.route, MessagesServer.body, *texts)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.output_item.added", "item": {"type": "function_call"}},
        {"type": "response.reasoning_text.delta", "delta": "Hm"},
    ],
)
def test_responses_with_more_than_text_are_not_continued(event: dict[str, Any]) -> None:
    with pytest.raises(NotContinued, match="more than text"):
        continued("/v1/responses", {"input": "Tell me"}, data(event))


def test_items_of_responses_are_kept() -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Tell me"}]}]
    event = data({"type": "response.output_text.delta", "delta": "Once"})
    body = continued("/v1/responses", {"input": items}, event)
    assert body["input"][0] == items[0]
    assert body["input"][1]["content"] == [{"type": "output_text", "text": "Once"}]


@pytest.mark.parametrize(("prompt", "expected"), [("Tell me", "Tell meOnce"), ([1, 2], [1, 2, "Once"])])
def test_text_is_added_to_the_prompt(prompt: Any, expected: Any) -> None:
    event = data({"choices": [{"text": "Once"}]})
    assert continued("/v1/completions", {"prompt": prompt}, event) == {"prompt": expected}


def test_tokens_are_added_to_a_prompt_of_tokens() -> None:
    event = data({"content": "Once", "tokens": [7, 8], "tokens_predicted": 2})
    assert continued("/completion", {"prompt": [1, 2]}, event) == {"prompt": [1, 2, 7, 8]}


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [(["a", "b"], "more than one text"), ([[1], [2]], "more than one text"), (None, "is not text")],
)
def test_other_prompts_are_not_continued(prompt: Any, reason: str) -> None:
    event = data({"choices": [{"text": "Once"}]})
    with pytest.raises(NotContinued, match=reason):
        continued("/v1/completions", {"prompt": prompt}, event)


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.route)
def test_error_in_the_stream_is_not_continued(server: Any) -> None:
    with pytest.raises(NotContinued, match="has an error"):
        continued(server.route, server.body, data({"error": {"message": "no"}}))


def test_every_form_of_a_stream_is_known() -> None:
    assert {server.route for server in SERVERS} == set(API_BY_ROUTE)


def test_limit_may_be_a_whole_number_with_a_point() -> None:
    assert chat({"max_tokens": 9.0}, {"content": "Once"})["max_tokens"] == 8
    assert chat({"max_tokens": 9.5}, {"content": "Once"})["max_tokens"] == 9.5
