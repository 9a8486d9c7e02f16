"""Which answers are requested a second time, and how the request for the second one looks."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest

from llamasup.core.llama_server.schema_check import AskedJson, asked_json
from llamasup.core.settings.model import NO_REPAIRS, Repairs, repairs_of
from llamasup.features.repair.answers import Checks, Fault, checks_for, with_another_seed

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
ANY = AskedJson(None)
BOTH = Repairs(tool_calls=True, json=True)
MISMATCH = (
    b'{"error":{"code":500,"message":"The model produced output that does not match the expected '
    b'peg-native format","type":"server_error"}}'
)
"""What b11434 answers with 500 (``common_chat_peg_parse`` in chat.cpp, ``ex_wrapper`` in server.cpp)."""
ERROR_EVENT = b"data: " + MISMATCH + b"\n\n"
"""The first event of a stream of b11434 in that case."""


def chat(content: str, finish_reason: str = "stop") -> bytes:
    choice = {
        "finish_reason": finish_reason,
        "index": 0,
        "message": {"role": "assistant", "content": content},
    }
    return json.dumps({"choices": [choice]}).encode()


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [], **fields}).encode()


@pytest.mark.parametrize(
    ("repairs", "route", "fields", "tool_calls", "checks_json"),
    [
        (BOTH, CHAT, JSON, True, True),
        (BOTH, CHAT, {}, True, False),
        (BOTH, CHAT, {**JSON, "stream": True}, True, False),
        (BOTH, CHAT, {**JSON, "stream": False, "temperature": 0.1}, True, True),
        (BOTH, "/v1/responses", {}, True, False),
        (BOTH, "/v1/messages", JSON, True, False),
        (BOTH, "/completion", {"json_schema": {}}, False, True),
        (BOTH, "/v1/completions", {"json_schema": {}}, False, True),
        (Repairs(tool_calls=True), CHAT, JSON, True, False),
        (Repairs(json=True), CHAT, JSON, False, True),
    ],
)
def test_answers_are_checked(
    repairs: Repairs, route: str, fields: dict[str, Any], tool_calls: bool, checks_json: bool
) -> None:
    asked = body(**fields)
    json = asked_json(route, asked) if checks_json else None
    assert (json is not None) == checks_json
    assert checks_for(repairs, route, asked) == Checks(route, tool_calls, json)


@pytest.mark.parametrize(
    ("repairs", "route", "asked"),
    [
        (NO_REPAIRS, CHAT, body(**JSON)),
        (Repairs(json=True), CHAT, body()),
        (Repairs(json=True), CHAT, body(**JSON, stream=True)),
        (Repairs(tool_calls=True), "/completion", body()),
        (BOTH, "/completion", body(json_schema={}, grammar="")),
        (BOTH, "/completion", body(json_schema={}, grammar_lazy=True)),
        (BOTH, "/completion", body(json_schema=1)),
        (BOTH, "/v1/embeddings", body(**JSON)),
        (BOTH, CHAT, body(**JSON, temperature=0)),
        (BOTH, CHAT, body(**JSON, temperature=-1)),
        (BOTH, "/completion", body(json_schema={}, temperature=0, stream=True)),
        (BOTH, CHAT, b"{"),
        (BOTH, CHAT, b"[]"),
        (BOTH, CHAT, b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    ],
)
def test_other_answers_are_not_checked(repairs: Repairs, route: str, asked: bytes) -> None:
    assert checks_for(repairs, route, asked) is None


def test_temperature_of_another_type_is_for_llama_server_to_judge() -> None:
    assert checks_for(BOTH, CHAT, body(temperature="hot")) is not None


@pytest.mark.parametrize(
    ("status", "answer", "is_stream", "fault"),
    [
        (500, MISMATCH, False, Fault.TOOL_CALL),
        (500, b'{"error":{"code":500,"message":"Failed to parse input","type":"server_error"}}', False, None),
        (200, b"a7\r\n" + ERROR_EVENT + b"\r\n0\r\n\r\n", True, Fault.TOOL_CALL),
        (200, b'data: {"error":{"message":"x"}}\n\n', True, None),
        (200, chat('{"age": 3}'), False, None),
        (200, chat('{"age": -3}'), False, Fault.JSON),
        (200, chat('{"age": '), False, Fault.JSON),
        (200, chat('{"age": ', "length"), False, None),  # the second one would be cut off, too
        (400, chat("no"), False, None),
    ],
)
def test_fault_of_an_answer(status: int, answer: bytes, is_stream: bool, fault: Fault | None) -> None:
    checks = Checks(CHAT, tool_calls=True, json=AskedJson(SCHEMA))
    assert checks.fault(status, answer, is_stream=is_stream) == fault


@pytest.mark.parametrize("answer", [MISMATCH, ERROR_EVENT])
def test_only_what_the_model_asks_for_is_a_fault(answer: bytes) -> None:
    is_stream = answer is ERROR_EVENT
    status = 200 if is_stream else 500
    assert Checks(CHAT, False, ANY).fault(status, answer, is_stream=is_stream) is None
    assert Checks(CHAT, True, None).fault(200, chat("no"), is_stream=False) is None


@pytest.mark.parametrize(
    ("route", "content", "fault"),
    [
        ("/completion", {"content": '{"age": 1}', "stop_type": "eos"}, None),
        ("/completion", {"content": " no", "stop_type": "eos"}, Fault.SCHEMA_IGNORED),
        ("/completion", {"content": " think", "stop_type": "limit"}, Fault.SCHEMA_IGNORED),
        ("/completion", {"content": " " * 1_000_000 + "x", "stop_type": "eos"}, Fault.SCHEMA_IGNORED),
        ("/completion", {"content": " true tale", "stop_type": "eos"}, Fault.JSON),
        ("/completion", {"content": "t rue", "stop_type": "eos"}, Fault.SCHEMA_IGNORED),
        ("/completion", {"content": "7 no", "stop_type": "eos"}, Fault.JSON),
        ("/completion", {"content": "[", "stop_type": "limit"}, None),
        ("/completion", {"content": "tru", "stop_type": "limit"}, None),
        ("/completion", {"content": "", "stop_type": "limit"}, None),
        ("/v1/completions", {"choices": [{"text": "{}", "finish_reason": "stop"}]}, Fault.JSON),
        ("/v1/completions", {"choices": [{"text": '{"age": 1}', "finish_reason": "stop"}]}, None),
        ("/v1/completions", {"choices": [{"text": "{", "finish_reason": "length"}]}, None),
        ("/completion", {"content": 3}, None),
    ],
)
def test_fault_of_a_completion(route: str, content: dict[str, Any], fault: Fault | None) -> None:
    checks = checks_for(BOTH, route, body(json_schema=SCHEMA))
    assert checks is not None
    answer = json.dumps(content).encode()
    assert checks.fault(200, answer, is_stream=False) == fault


@pytest.mark.parametrize(("content", "fault"), [(" no", Fault.SCHEMA_IGNORED), ("{}", None), ("{", None)])
def test_only_an_ignored_schema_is_a_fault_without_a_temperature(content: str, fault: Fault | None) -> None:
    """Each seed gives the same answer."""
    checks = checks_for(BOTH, "/completion", body(json_schema=SCHEMA, temperature=0))
    assert checks is not None
    answer = json.dumps({"content": content, "stop_type": "eos"}).encode()
    assert checks.fault(200, answer, is_stream=False) == fault


@pytest.mark.parametrize(
    ("status", "beginning", "is_stream", "holds"),
    [
        (200, b"{", False, True),
        (500, b"{", False, True),
        (400, b"{", False, False),
        (200, ERROR_EVENT, True, True),
        (200, b"a7\r\n" + ERROR_EVENT, True, True),
        (200, b"event: error\n" + ERROR_EVENT, True, True),  # of /v1/messages
        (200, b'data: {"choices":[]}\n\n', True, False),
        (200, b"", True, False),
    ],
)
def test_only_answers_that_may_be_requested_again_are_held(
    status: int, beginning: bytes, is_stream: bool, holds: bool
) -> None:
    assert Checks(CHAT, True, ANY).holds(status, beginning, is_stream=is_stream) == holds


def test_streams_are_not_held_for_json() -> None:
    assert not Checks(CHAT, False, ANY).holds(200, ERROR_EVENT, is_stream=True)
    assert not Checks(CHAT, True, None).holds(200, b"{", is_stream=False)
    assert not Checks(CHAT, False, ANY).holds(500, b"{", is_stream=False)


def test_only_the_seed_changes() -> None:
    asked = b'{ "seed" : 7, "messages": [ {"role":"user"} ], "top_p": 0.90}'
    seed = zlib.crc32(b"id") >> 1
    assert with_another_seed(asked, b"id") == (
        b'{"seed":%d,"messages":[ {"role":"user"} ],"top_p":0.90}' % seed
    )
    assert with_another_seed(b"{}", b"id") == b'{"seed":%d}' % seed


def test_seed_is_always_another_one() -> None:
    seed = zlib.crc32(b"id") >> 1
    assert with_another_seed(b'{"seed":%d}' % seed, b"id") == b'{"seed":%d}' % (seed + 1)


@pytest.mark.parametrize("asked", [b'{"\xff":1}', b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"])
def test_unreadable_body_has_no_second_request(asked: bytes) -> None:
    assert with_another_seed(asked, b"id") is None


@pytest.mark.parametrize(
    ("setting", "repairs"),
    [
        (None, NO_REPAIRS),
        ("off", NO_REPAIRS),
        ("tools", Repairs(tool_calls=True)),
        ("json", Repairs(json=True)),
        ("both", BOTH),
    ],
)
def test_setting_says_what_is_repaired(setting: str | None, repairs: Repairs) -> None:
    assert repairs_of(setting) == repairs
    assert (repairs_of(setting) is NO_REPAIRS) == (repairs == NO_REPAIRS)
