from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from llamasup.core.llama_server.schema_check import (
    MAX_SCHEMA,
    AskedJson,
    asked_json,
    import_package,
    mismatch,
    read_answer,
)
from llamasup.core.llama_server.schema_check import violation as checked

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def violation(route: str, body: bytes, answer: bytes) -> str | None:
    found = asked_json(route, body)
    assert found is not None
    return checked(found, answer)


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
    assert (asked_json(url, body) is not None) == asks


@pytest.mark.parametrize(
    ("response_format", "answer", "wrong"),
    [
        (STRICT, answered('{"age": 3}'), None),
        (STRICT, answered('{"age": -3}'), "at $.age: -3 is less than the minimum of 0"),
        (STRICT, answered("{}"), "at $: 'age' is a required property"),
        (STRICT, answered('{"age"'), "the answer is not JSON: "),
        (STRICT, answered(None), "the answer is not JSON: "),
        (STRICT, answered(None, tool_calls=[{}]), None),
        (STRICT, answered("", tool_calls=[{}]), None),
        (STRICT, answered(" \n", tool_calls=[{}]), None),
        (STRICT, answered("", tool_calls=[]), "the answer is not JSON: "),
        (STRICT, answered("x", tool_calls=[{}]), "the answer is not JSON: "),
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
    found = violation(CHAT, asked(response_format), answer)
    assert found == wrong or (found is not None and wrong is not None and found.startswith(wrong))


def test_without_the_package_any_json_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    import_package()
    assert violation(CHAT, asked(STRICT), answered("{}")) is None
    assert violation(CHAT, asked(STRICT), answered("{")) is not None


def test_package_is_imported() -> None:
    import_package()
    assert "jsonschema" in sys.modules


PATTERN = {"type": "string", "pattern": "^(a+)+$"}


def doubling(levels: int) -> Any:
    """A schema whose check doubles its steps at each level."""
    twice = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n - 1}"}] * 2} for n in range(1, levels)}
    return {"$defs": {"d0": {"type": "integer"}, **twice}, "$ref": f"#/$defs/d{levels - 1}"}


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "a" * 200 + "!", "not": PATTERN},
        PATTERN,
        {"patternProperties": {"^(a+)+$": {}}},
        {"additionalProperties": False, "patternProperties": {"^(a+)+$": {}}},
        {"allOf": [{"$schema": "http://json-schema.org/draft-07/schema#", **PATTERN}]},
        doubling(60),
    ],
)
@pytest.mark.parametrize("given", ["a" * 200 + "!", {"a" * 200 + "!": 1}, 1])
def test_schema_of_a_client_does_not_take_for_ever(schema: Any, given: Any) -> None:
    body = asked({"type": "json_schema", "json_schema": {"schema": schema}})
    violation(CHAT, body, answered(json.dumps(given)))


def test_long_list_of_unique_items_is_not_compared() -> None:
    body = asked({"type": "json_object", "schema": {"uniqueItems": True}})
    assert violation(CHAT, body, answered(json.dumps([{"a": 1}] * 2))) is not None
    assert violation(CHAT, body, answered(json.dumps([{"a": 1}] * 10_000))) is None


BIG = list(range(5000))


@pytest.mark.parametrize(
    ("schema", "given"),
    [
        ({"not": {"enum": [[*BIG, 1]] * 5}}, [*BIG, 0]),
        ({"not": {"const": [*BIG, *BIG, *BIG, 1]}}, [*BIG, *BIG, *BIG, 0]),
        ({"anyOf": [{"type": "string"}] * 2000}, 1),
        ({"items": {}}, ["x"] * 20_000),
        ({"prefixItems": [{}] * 20_000}, ["x"] * 20_000),
        ({"contains": False, "minContains": 0}, ["x"] * 20_000),
        ({"additionalProperties": {}}, {str(n): 1 for n in range(20_000)}),
        ({"propertyNames": {}}, {str(n): 1 for n in range(20_000)}),
        ({"uniqueItems": True}, [[*BIG * 4, 1], [*BIG * 4, 0]]),
    ],
)
def test_check_that_takes_long_is_given_up(schema: Any, given: Any) -> None:
    answer = read_answer(answered(json.dumps(given)))
    assert answer is not None
    with pytest.raises(TimeoutError):
        mismatch(AskedJson(schema), answer, 10_000)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        {"$ref": "http://json-schema.org/draft-07/schema#"},
        {"properties": {"a": {"$id": "https://json-schema.org/draft/2020-12/schema", "$ref": "#"}}},
    ],
)
def test_schemas_of_json_schema_itself_are_not_checked(schema: Any) -> None:
    """The validators of the package for them have no bound."""
    assert checked(AskedJson(schema), answered('{"a": {"type": 7}, "type": 7}')) is None


def test_other_keywords_next_to_a_pattern_are_checked() -> None:
    schema = {"properties": {"a": PATTERN, "b": {"type": "integer"}}}
    body = asked({"type": "json_object", "schema": schema})
    assert violation(CHAT, body, answered('{"a": "b", "b": "x"}')) == "at $.b: 'x' is not of type 'integer'"
    assert violation(CHAT, body, answered('{"a": "b", "b": 1}')) is None


@pytest.mark.parametrize("route", [CHAT, "/completion"])
def test_large_schema_is_not_read(route: str) -> None:
    """Of its answer, only the JSON is checked."""
    schema = {"type": "integer", "$comment": "x" * MAX_SCHEMA}
    chat = {"type": "json_schema", "json_schema": {"schema": schema}}
    body = asked(chat) if route == CHAT else json.dumps({"json_schema": schema}).encode()
    found = asked_json(route, body)
    assert found == AskedJson(None)
    assert checked(found, answered('"x"')) is None
    assert checked(found, answered("x")) is not None


@pytest.mark.parametrize("schema", [None, {}])
def test_null_is_no_schema(schema: Any) -> None:
    body = json.dumps({"json_schema": schema}).encode()
    assert asked_json("/completion", body) == (None if schema is None else AskedJson({}))
    assert asked_json(CHAT, asked({"type": "json_object", "schema": schema})) == AskedJson(schema)


def test_schema_may_name_its_draft() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "integer"}
    body = asked({"type": "json_object", "schema": schema})
    assert violation(CHAT, body, answered('"x"')) == "at $: 'x' is not of type 'integer'"
