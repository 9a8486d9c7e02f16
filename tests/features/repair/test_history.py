"""Which tool calls of a conversation are repaired, and that all other bytes stay."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.features.repair.history import MARK, with_valid_arguments
from tests.features.repair.conversations import BAD_ARGUMENTS, conversation


def arguments_in(body: bytes | None) -> Any:
    assert body is not None
    return json.loads(body)["messages"][1]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_malformed_arguments_become_an_object(arguments: str) -> None:
    repaired = with_valid_arguments(json.dumps(conversation(arguments)).encode())
    given_to_model = json.loads(arguments_in(repaired))
    assert given_to_model == ({MARK: arguments} if arguments.strip() else {})


@pytest.mark.parametrize(
    ("value", "valid"),
    [([1], {MARK: "[1]"}), (3, {MARK: "3"}), (None, {}), ("null", {}), (True, {MARK: "true"})],
)
def test_json_that_is_not_an_object_becomes_one(value: Any, valid: dict[str, str]) -> None:
    """llama-server makes a text of it, and reads that."""
    repaired = with_valid_arguments(json.dumps(conversation(value)).encode())
    assert json.loads(arguments_in(repaired)) == valid


@pytest.mark.parametrize(
    "arguments", ['{"city": "Paris"}', "{}", ' {"a": [1, {"b": null}]} ', "\ufeff{}", {"city": "Paris"}]
)
def test_other_arguments_stay(arguments: Any) -> None:
    assert with_valid_arguments(json.dumps(conversation(arguments)).encode()) is None


def test_repaired_request_is_not_repaired_again() -> None:
    repaired = with_valid_arguments(json.dumps(conversation("{")).encode())
    assert repaired is not None
    assert with_valid_arguments(repaired) is None


def test_all_other_bytes_stay() -> None:
    good = b'{ "id" : "2", "type":"function","function":{"name":"f","arguments":"{\\"n\\": 1.50}"}}'
    bad = b'{"id":"1","type":"function","function":{"name":"f","arguments":"{"}}'
    body = (
        b'{"temperature": 0.70, "messages": [{"role":"user",  "content":"\\u00e4"},'
        b'{"role":"assistant", "x": 1e2, "tool_calls":[%b,%b]}], "big": 12345678901234567890123}'
        % (good, bad)
    )
    repaired = with_valid_arguments(body)
    assert repaired is not None
    assert b'"temperature":0.70,' in repaired
    assert b'{"role":"user",  "content":"\\u00e4"}' in repaired
    assert b'"x":1e2' in repaired
    assert good in repaired
    assert b'"big":12345678901234567890123' in repaired
    assert json.loads(repaired)["messages"][1]["tool_calls"][1]["function"]["arguments"] == json.dumps(
        {MARK: "{"}, separators=(",", ":")
    )


def test_call_of_another_form_does_not_stop_the_repair() -> None:
    body = conversation("{")
    old = {"role": "assistant", "tool_calls": None, "function_call": {"name": "f", "arguments": "{}"}}
    odd = [{"function": None, "arguments": 1}, {"arguments": 1}, "arguments", {"function": {"arguments": {}}}]
    body["messages"] += [old, "arguments", {"role": "assistant", "tool_calls": odd}]
    repaired = with_valid_arguments(json.dumps(body).encode())
    assert arguments_in(repaired) == '{"malformed_arguments":"{"}'
    assert repaired is not None
    assert json.loads(repaired)["messages"][2:] == body["messages"][2:]


def test_body_with_a_byte_order_mark_is_repaired() -> None:
    body = json.dumps(conversation("{")).encode()
    assert with_valid_arguments(b"\xef\xbb\xbf" + body + b"\0") == with_valid_arguments(body)


@pytest.mark.parametrize(
    "text", ["[" + "[]," * 100_000 + "[]]", "[" * 50_000, '{"a": ' * 20 + "1" + "}" * 19]
)
def test_large_and_deep_texts_are_malformed_if_they_are_not_an_object(text: str) -> None:
    repaired = with_valid_arguments(json.dumps(conversation(text)).encode())
    assert json.loads(arguments_in(repaired)) == {MARK: text}


def test_function_calls_of_responses_are_repaired() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}
    others = [
        {"role": "user", "content": "arguments"},
        {**call, "type": "mcp_call"},
        {**call, "arguments": "{}"},
    ]
    repaired = with_valid_arguments(json.dumps({"input": [*others, call]}).encode())
    assert repaired is not None
    shown = json.loads(repaired)["input"]
    assert shown == [*others, {**call, "arguments": '{"malformed_arguments":"{"}'}]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no JSON",
        b'{"messages": [{"role": "user", "content": "a"}]}',
        b'{"arguments": "{", "messages": "a text"}',
        b'{"input": "a text", "arguments": "{"}',
        b'{"messages": [{"arguments": "{"}]}',
        b'{"messages": [{"tool_calls": [{"arguments": "{"}]}]}',
        b'{"messages": [{"tool_calls": [{"function": {"name": "arguments"}, "x": {"arguments": "{"}}]}]}',
        b'{"messages": [{"tool_calls": {"arguments": "{"}}]}',
        b'{"messages": [{"tool_calls": [{"function": "\\"arguments\\""}]}], "arguments": 1}',
        b'{"messages": [3, "arguments", {"tool_calls": null, "arguments": 1}]}',
        b'["arguments"]',
        b'{"messages": [{"tool_calls": [{"function": {"arguments": "\xff"}}]}]}',
        b'{"messages": [{"arguments": ' + b"[" * 5000 + b"]" * 5000 + b"}]}",
        b'{"messages": [{"tool_calls": [{"function": {"arguments": "{"}}]}], "x": ['
        + b"1," * 500_001
        + b"1]}",
        b'{"messages": [{"tool_calls": [{"function": {"arguments": "{"}}]}], "x": "' + b":" * 200_001 + b'"}',
    ],
    ids=lambda body: repr(body[:40]),
)
def test_other_bodies_stay(body: bytes) -> None:
    assert with_valid_arguments(body) is None


def test_large_conversation_is_repaired() -> None:
    body = conversation("{")
    body["messages"][0]["content"] = "long " * 100_000
    assert arguments_in(with_valid_arguments(json.dumps(body).encode())) == '{"malformed_arguments":"{"}'


@given(st.text(), st.text())
def test_any_text_becomes_valid_and_nothing_else_changes(arguments: str, content: str) -> None:
    body = conversation(arguments)
    body["messages"][0]["content"] = content
    try:
        sent = json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        sent = json.dumps(body).encode()
    repaired = with_valid_arguments(sent)
    if repaired is None:
        assert isinstance(json.loads(arguments), dict)
        return
    valid = json.loads(arguments_in(repaired))
    assert isinstance(valid, dict)
    after = json.loads(repaired)
    after["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments
    assert after == body
