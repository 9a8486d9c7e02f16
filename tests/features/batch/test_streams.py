from __future__ import annotations

import json
from typing import Any

import pytest

from llamasup.features.batch.streams import Assembly, streamed

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def asked(url: str, **body: Any) -> Any:
    found = streamed(url, json.dumps(body).encode())
    return None if found is None else json.loads(found)


def test_stream_asks_for_the_usage() -> None:
    assert asked(COMPLETIONS, prompt="x", n=1) == {
        "prompt": "x",
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert asked(CHAT, messages=[], stream_options={"a": 1})["stream_options"] == {
        "a": 1,
        "include_usage": True,
    }


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        (COMPLETIONS, {"prompt": ["x", "y"]}),
        (COMPLETIONS, {"prompt": "x", "n": 2}),
        (CHAT, {"messages": [], "logprobs": True}),
        (CHAT, {"messages": [], "top_logprobs": 5}),
    ],
)
def test_answer_that_a_stream_does_not_give_is_asked_for_whole(url: str, body: Any) -> None:
    assert asked(url, **body) is None


@pytest.mark.parametrize("body", [b'{"prompt": "x", "temperature": 1e999}', b"[1]", b'{"a":' * 100_000])
def test_body_that_cannot_be_read_is_sent_as_it_is(body: bytes) -> None:
    assert streamed(COMPLETIONS, body) is None


def assembled(url: str, *events: Any, done: bool = True) -> Any:
    assembly = Assembly(url)
    for event in events:
        assembly.add(json.dumps(event).encode())
    if done:
        assembly.add(b" [DONE]")
    answer = assembly.answer()
    return None if answer is None else json.loads(answer)


def test_completion_is_put_together() -> None:
    answer = assembled(
        COMPLETIONS,
        {"choices": [{"text": "On", "index": 0, "finish_reason": None}], "object": "x", "model": "m"},
        {"choices": [{"text": "ce", "index": 0, "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 2}, "id": "i"},
    )
    assert answer == {
        "choices": [{"finish_reason": "length", "index": 0, "text": "Once", "logprobs": None}],
        "object": "text_completion",
        "model": "m",
        "usage": {"completion_tokens": 2},
        "id": "i",
    }


def delta(finish: str | None = None, **delta: Any) -> Any:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "object": "chunk"}


def test_chat_with_reasoning_and_tool_calls_is_put_together() -> None:
    answer = assembled(
        CHAT,
        delta(role="assistant", content=None),
        delta(reasoning_content="Hm"),
        delta(content="A"),
        delta(content="B"),
        delta(tool_calls=[{"index": 1, "id": "c2", "function": {"name": "g", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"a'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '":1}'}}]),
        delta("tool_calls"),
    )
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "AB",
        "reasoning_content": "Hm",
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}, "id": "c1"},
            {"type": "function", "function": {"name": "g", "arguments": ""}, "id": "c2"},
        ],
    }


def test_stream_that_is_cut_gives_no_answer() -> None:
    assert assembled(CHAT, delta("stop", content="A"), done=False) is None
    assert assembled(CHAT, delta(content="A")) is None


def test_error_event_is_kept() -> None:
    assembly = Assembly(CHAT)
    assembly.add(b'{"error": {"code": 503}}')
    assert assembly.error == b'{"error": {"code": 503}}'
    with pytest.raises(ValueError, match=r"malformed|invalid|truncated"):
        assembly.add(b"{")


def test_plain_chat_has_no_tool_calls() -> None:
    [choice] = assembled(CHAT, delta("stop", content="A"))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "A"}
