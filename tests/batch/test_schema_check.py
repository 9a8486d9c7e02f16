from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from llamasup.batch.schema_check import asks_for_json, violation

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def asked(response_format: Any) -> bytes:
    return json.dumps({"messages": [], "response_format": response_format}).encode()


def answered(content: str | None, **more: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"content": content, **more}}]}).encode()


@pytest.mark.parametrize(
    ("url", "body", "asks"),
    [
        (CHAT, asked(STRICT), True),
        (CHAT, asked({"type": "json_object"}), True),
        (CHAT, asked({"type": "text"}), False),
        (CHAT, asked(7), False),
        (CHAT, b'{"messages": []}', False),
        ("/v1/completions", asked(STRICT), False),
    ],
)
def test_only_some_requests_ask_for_json(url: str, body: bytes, asks: bool) -> None:
    assert asks_for_json(url, body) == asks


@pytest.mark.parametrize(
    ("response_format", "answer", "wrong"),
    [
        (STRICT, answered('{"age": 3}'), None),
        (STRICT, answered('{"age": -3}'), "at $.age: -3 is less than the minimum of 0"),
        (STRICT, answered("{}"), "at $: 'age' is a required property"),
        (STRICT, answered('{"age"'), "the answer is no JSON: "),
        (STRICT, answered(None), "the answer is no JSON: "),
        (STRICT, answered(None, tool_calls=[{}]), None),
        (STRICT, b'{"choices": [{}]}', None),
        (STRICT, b"{", "the answer cannot be read: "),
        ({"type": "json_object"}, answered("[1]"), None),
        ({"type": "json_object", "schema": SCHEMA}, answered("[1]"), "at $: [1] is not of type 'object'"),
        ({"type": "json_object", "schema": {"type": 7}}, answered("[1]"), None),
        ({"type": "json_object", "schema": {"$ref": "http://127.0.0.1:9/x"}}, answered("[1]"), None),
    ],
)
def test_answer_must_be_what_the_request_asks_for(
    response_format: Any, answer: bytes, wrong: str | None
) -> None:
    found = violation(asked(response_format), answer)
    assert found == wrong or (found is not None and wrong is not None and found.startswith(wrong))


def test_without_the_package_any_json_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert violation(asked(STRICT), answered("{}")) is None
    assert violation(asked(STRICT), answered("{")) is not None
