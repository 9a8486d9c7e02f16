"""The request of `llamasup connect --check`, and what the stream of its answer says."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any

import pytest
from msgspec import structs

from llamasup.features.connect.check import Reply, context_warning, request_body
from llamasup.features.connect.clients import CLIENTS, Api, Connection


def reply(*events: Any) -> Reply:
    lines = [event if isinstance(event, str) else f"data: {json.dumps(event)}" for event in events]
    return reduce(Reply.after, lines, Reply())


TEXTS: dict[Api, tuple[Any, ...]] = {
    "messages": (
        "event: message_start",
        {"type": "message_start", "message": {"usage": {"cache_read_input_tokens": 30, "input_tokens": 5}}},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "h"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "i"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
    ),
    "responses": (
        {"type": "response.created", "response": {"error": None}},
        {"type": "response.output_text.delta", "delta": "h"},
        {"type": "response.output_text.delta", "delta": "i"},
        {
            "type": "response.completed",
            "response": {"usage": {"input_tokens": 35, "input_tokens_details": {"cached_tokens": 30}}},
        },
    ),
    "chat": (
        {"choices": [{"delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"delta": {"content": "h"}}]},
        {"choices": [{"delta": {"content": "i"}}]},
        {
            "choices": [],
            "usage": {"prompt_tokens": 35, "prompt_tokens_details": {"cached_tokens": 30}},
        },
        "data: [DONE]",
    ),
}

CALLS: dict[Api, tuple[Any, ...]] = {
    "messages": (
        {"type": "content_block_start", "content_block": {"type": "tool_use", "name": "read_file"}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{}"}},
    ),
    "responses": (
        {"type": "response.output_item.added", "item": {"type": "function_call", "name": "read_file"}},
        {"type": "response.function_call_arguments.delta", "delta": "{}"},
    ),
    "chat": (
        {"choices": [{"delta": {"tool_calls": [{"function": {"name": "read_file", "arguments": ""}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{}"}}]}}]},
    ),
}


@pytest.mark.parametrize("api", TEXTS)
def test_text_and_tokens_are_read_from_the_stream_of_each_api(api: Api) -> None:
    read = reply(*TEXTS[api])
    assert (read.text, read.tool_call, read.prompt_tokens, read.cached_tokens) == ("hi", None, 35, 30)
    assert read.has_begun
    assert read.error is None


@pytest.mark.parametrize("api", CALLS)
def test_tool_call_is_named_and_its_arguments_are_not_text(api: Api) -> None:
    read = reply(*CALLS[api])
    assert (read.text, read.tool_call) == ("", "read_file")


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "no"}},
        {"type": "error", "error": {"message": "no"}},
        {"type": "response.failed", "response": {"error": {"message": "no"}}},
    ],
)
def test_error_in_a_stream_is_kept(event: Any) -> None:
    assert reply(event, {"choices": [{"delta": {"content": "x"}}]}).error == {"message": "no"}


@pytest.mark.parametrize(
    "line",
    [
        *("", ": keep-alive", "data: [1]", "data: 3", 'data: {"choices": 3}', 'data: {"choices": [7]}'),
        'data: {"choices": [{"delta": {"tool_calls": true}}]}',
        'data: {"usage": {"cache_read_input_tokens": null}}',
        f"data: {'[' * 100_000}",
    ],
)
def test_strange_lines_say_nothing(line: str) -> None:
    assert reply(line) == Reply()


def test_shown_text_is_short() -> None:
    assert len(reply(*[{"choices": [{"delta": {"content": "x" * 90}}]}] * 9).text) == 200


@pytest.mark.parametrize("client", CLIENTS)
def test_request_is_a_stream_with_a_tool(client: str) -> None:
    body = request_body(CLIENTS[client].api, "m")
    assert (body["model"], body["stream"], len(body["tools"])) == ("m", True, 1)
    assert "read_file" in json.dumps(body["tools"])


# --- the context ---------------------------------------------------------------------------------------

TO = Connection("http://127.0.0.1:8080", "qwen", context=23_095)


def test_context_for_the_first_prompt_and_an_answer_is_enough() -> None:
    assert context_warning(CLIENTS["claude-code"], structs.replace(TO, context=23_096)) is None
    warned = context_warning(CLIENTS["claude-code"], TO)
    assert warned is not None
    assert "about 19,000 tokens" in warned.message
    assert "room for 23,095" in warned.message
    assert "--ctx-size 65536 --parallel 1" in warned.remedy
    assert "ctx_size: 65536" in warned.remedy


@pytest.mark.parametrize(("client", "context"), [("claude-code", None), ("openai", 10)])
def test_unknown_context_or_client_is_no_warning(client: str, context: int | None) -> None:
    assert context_warning(CLIENTS[client], structs.replace(TO, context=context)) is None
