"""System messages in the middle of a conversation: which there are, and where their text goes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamasup.features.agent_tools.system_messages import PROBE, has_later_system, keeps_all, moved

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CONTENT = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}


def message(word: str) -> dict[str, Any]:
    """``u1``: the message of the user with the text u1."""
    return {"role": CONTENT[word[0]], "content": word}


def of(words: str) -> list[dict[str, Any]]:
    return [message(word) for word in words.split()]


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("s1 u1", None),
        ("u1 a1 u2", None),
        ("s1 s2 u1", "s1+s2 u1"),
        ("s1 d2 u1 a1 u2", "s1+d2 u1 a1 u2"),
        ("u1 s1", "u1(s1)"),
        ("s1 u1 s2 a1 u2", "s1 u1(s2) a1 u2"),
        ("s1 u1 a1 s2 u2", "s1 u1 a1 u2(s2)"),
        ("s1 u1 a1 s2 d3 u2", "s1 u1 a1 u2(s2+d3)"),
        ("s1 u1 a1 s2", "s1 u1 a1 u(s2)"),
        ("s1 u1 a1 s2 a2", "s1 u1 a1 u(s2) a2"),
        ("s1 u1 a1 t1 s2", "s1 u1 a1 t1(s2)"),
        ("s1 u1 s2 s3 a1 s4 u2", "s1 u1(s2)(s3) a1 u2(s4)"),
    ],
)
def test_later_system_message_goes_to_the_message_beside_it(words: str, expected: str | None) -> None:
    body = json.dumps({"model": "m", "messages": of(words), "n": 1}).encode()
    assert has_later_system(body, CHAT) == (expected is not None)
    found, count = moved(body, CHAT)
    shown = " ".join(_shown(each) for each in json.loads(found)["messages"])
    assert shown == (expected or words)
    assert count == (0 if expected is None else expected.count("(") + expected.count("+"))
    assert has_later_system(found, CHAT) is False
    assert json.loads(found)["n"] == 1


def _shown(each: dict[str, Any]) -> str:
    """``u1(s2)`` for a text with a reminder; ``u(s2)`` for a message that is only the reminder."""
    text = str(each["content"]).replace("<system-reminder>\n", "(").replace("\n</system-reminder>", ")")
    text = text.replace("\n\n(", "(").replace("\n\n", "+")
    return each["role"][0] + text if text.startswith("(") else text


PARTS = [{"type": "text", "text": "s1"}, {"type": "text", "text": "more"}]
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "done"}
IMAGE = {"role": "system", "content": [{"type": "image_url"}]}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "done"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
DEVELOPER = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d1"}]}


@pytest.mark.parametrize(
    ("route", "fields", "expected"),
    [
        (CHAT, {"messages": [*of("u1"), {"role": "system", "content": PARTS}]},
         [{"role": "user", "content": "u1\n\n" + reminder("s1\nmore")}]),
        (CHAT, {"messages": [{"role": "user", "content": PARTS}, *of("s1")]},
         [{"role": "user", "content": [*PARTS, {"type": "text", "text": reminder("s1")}]}]),
        (CHAT, {"messages": [*of("u1"), {"role": "system", "content": ""}]}, of("u1")),
        (CHAT, {"messages": [*of("u1"), IMAGE, *of("s1 u2")]},
         [message("u1"), {**IMAGE, "content": [*IMAGE["content"], {"type": "text", "text": "s1"}]},
          message("u2")]),
        (MESSAGES, {"system": "top", "messages": of("s1 u1")},
         [{"role": "user", "content": f"u1\n\n{reminder('s1')}"}]),
        (MESSAGES, {"system": [], "messages": of("s1 u1")}, None),
        (MESSAGES, {"system": PARTS, "messages": [{"role": "user", "content": [RESULT]}, *of("s1")]},
         [{"role": "user", "content": [RESULT, {"type": "text", "text": reminder("s1")}]}]),
        (RESPONSES, {"instructions": "top", "input": [*of("u1"), DEVELOPER]},
         [{"role": "user", "content": f"u1\n\n{reminder('d1')}"}]),
        (RESPONSES, {"input": [*of("d0 u1"), CALL, OUTPUT, DEVELOPER]},
         [*of("d0 u1"), CALL, {**OUTPUT, "output": f"done\n\n{reminder('d1')}"}]),
        (RESPONSES, {"input": [*of("u1"), CALL, DEVELOPER, OUTPUT]},
         [*of("u1"), CALL, {**OUTPUT, "output": f"done\n\n{reminder('d1')}"}]),
        (RESPONSES, {"input": "system"}, None),
    ],
)  # fmt: skip
def test_each_api_has_its_own_parts(route: str, fields: dict[str, Any], expected: list[Any] | None) -> None:
    body = json.dumps(fields).encode()
    assert has_later_system(body, route) == (expected is not None)
    if expected is not None:
        found = json.loads(moved(body, route)[0])
        assert found.pop("input" if route == RESPONSES else "messages") == expected
        assert found == {name: fields[name] for name in found}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/apply-template", {"messages": of("u1 s1")}),  # shows what the template makes of it
        ("/completion", {"prompt": "system"}),
        (CHAT, {"messages": [1, *of("s1")]}),
        (CHAT, {"messages": "system"}),
        (CHAT, {"messages": [{"role": ["system"]}, {"role": {"system": 1}}]}),
        (CHAT, {"messages": [*of("u1 s1")], "tools": [{"type": "f"}] * 20_001}),
    ],
)
def test_other_bodies_have_none(route: str, body: Any) -> None:
    assert not has_later_system(json.dumps(body).encode(), route)


def test_unreadable_text_stays() -> None:
    body = b'{"messages":[{"role":"user","content":"\xff"},{"role":"system","content":"\xff"}]}'
    assert has_later_system(body, CHAT)
    assert moved(body, CHAT) == (body, 0)


def test_messages_before_the_new_one_stay_the_same() -> None:
    """So that llama-server computes only what is new."""
    before = moved(json.dumps({"messages": of("s1 u1 a1 t1 s2")}).encode(), CHAT)[0]
    after = moved(json.dumps({"messages": of("s1 u1 a1 t1 s2 a2 u2")}).encode(), CHAT)[0]
    assert json.loads(after)["messages"][:4] == json.loads(before)["messages"]


def test_answer_shows_whether_the_template_keeps_them() -> None:
    texts = [each["content"] for each in PROBE.body["messages"]]
    whole = {"prompt": " ".join(texts)}
    assert keeps_all(200, json.dumps(whole).encode()) is True
    for missing in (0, 1, 4):  # the system messages
        prompt = " ".join(text for number, text in enumerate(texts) if number != missing)
        assert keeps_all(200, json.dumps({"prompt": prompt}).encode()) is False
    assert keeps_all(400, b"") is False
    assert keeps_all(500, b"") is False
    for status, answer in ((404, b"{}"), (200, b"<html>"), (200, b'{"prompt":null}'), (401, b'{"error":1}')):
        assert keeps_all(status, answer) is None
