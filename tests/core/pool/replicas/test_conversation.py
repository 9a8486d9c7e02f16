"""The common beginning of two requests, read from their bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamasup.core.pool.replicas.conversation import (
    BLOCK,
    FIRST_MARKS,
    LAST_MARKS,
    MAX_OBJECTS,
    Conversation,
    read_conversation,
)

SYSTEM = {"role": "system", "content": "You know llamas."}
FIRST = {"role": "user", "content": "What do they eat?"}
ANSWER = {"role": "assistant", "content": "Grass."}
SECOND = {"role": "user", "content": "And drink?"}


def read(**body: Any) -> Conversation:
    found = read_conversation(json.dumps(body).encode())
    assert found is not None
    return found


def chat(*messages: dict[str, Any], **rest: Any) -> Conversation:
    return read(messages=list(messages), **rest)


def shared(one: Conversation, other: Conversation) -> int:
    """The number of equal marks at the beginning of both."""
    alike = [a == b for a, b in zip(one.marks, other.marks, strict=False)]
    return alike.index(False) if False in alike else len(alike)


def test_turn_begins_with_the_turn_before() -> None:
    before, after = chat(SYSTEM, FIRST), chat(SYSTEM, FIRST, ANSWER, SECOND)
    assert after.marks[: len(before.marks)] == before.marks
    assert (len(before.marks), len(after.marks)) == (2, 4)
    assert after.sizes[1] == before.size == len("You know llamas.What do they eat?")


def test_text_role_and_order_distinguish_conversations() -> None:
    first_turn = chat(SYSTEM, FIRST)
    assert shared(first_turn, chat(SYSTEM, SECOND)) == 1
    assert shared(first_turn, chat(SYSTEM, {**FIRST, "role": "assistant"})) == 1
    assert shared(first_turn, chat(FIRST, SYSTEM)) == 0
    assert shared(first_turn, chat({"role": "system", "content": "You know llamas.W"}, FIRST)) == 0


def test_system_prompt_and_tools_come_first() -> None:
    tools = [{"type": "function", "function": {"name": "weigh"}}]
    plain, tooled = chat(FIRST), chat(FIRST, tools=tools)
    assert shared(plain, tooled) == 0
    assert shared(tooled, chat(SECOND, tools=tools)) == 1
    assert shared(read(messages=[FIRST], system="Short."), read(messages=[SECOND], system="Short.")) == 1


def test_string_and_text_part_have_equal_marks() -> None:
    part = {"type": "text", "text": "What do they eat?", "cache_control": {"type": "ephemeral"}}
    assert chat({"role": "user", "content": [part]}) == chat(FIRST)
    system = [{"type": "text", "text": "Short.", "cache_control": {"type": "ephemeral"}}]
    assert read(messages=[FIRST], system=system) == read(messages=[FIRST], system="Short.")


def picture(of: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{of}"}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": [picture("AAAA")]}, {"content": [picture("BBBB")]}),
        ({"content": [{"type": "input_audio", "input_audio": {"data": "A"}}]}, {"content": []}),
        ({"content": [{"type": "image", "source": {"data": "A"}}]}, {"content": None}),
        (
            {"content": [{"type": "tool_use", "name": "weigh", "input": {"of": 1}}]},
            {"content": [{"type": "tool_use", "name": "weigh", "input": {"of": 2}}]},
        ),
        (
            {"content": [{"type": "tool_result", "content": "130 kg"}]},
            {"content": [{"type": "tool_result", "content": "131 kg"}]},
        ),
        (
            {"content": None, "tool_calls": [{"function": {"name": "weigh"}}]},
            {"content": None, "tool_calls": [{"function": {"name": "feed"}}]},
        ),
    ],
)
def test_media_and_tools_distinguish_conversations(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = chat(SYSTEM, {"role": "user", **one}), chat(SYSTEM, {"role": "user", **other})
    assert shared(first, second) == 1


def test_size_of_an_image_is_not_its_bytes() -> None:
    assert chat({"role": "user", "content": [picture("A" * 100_000)]}).size == BLOCK


def test_responses_are_items_or_one_text() -> None:
    one = read(instructions="Short.", input="What do they eat?")
    assert one == read(instructions="Short.", input=[{"type": "message", **FIRST}])
    call = {"type": "function_call", "name": "weigh", "arguments": '{"of":1}'}
    result = {"type": "function_call_output", "call_id": "1", "output": "130 kg"}
    longer = read(instructions="Short.", input=[{"type": "message", **FIRST}, call, result])
    assert (shared(one, longer), len(longer.marks)) == (2, 4)


def test_questions_about_one_long_text_share_the_text() -> None:
    document = "".join(f"Line {number}. " for number in range(1000))
    one, other = (chat({"role": "user", "content": document + end}) for end in ("Who?", "Where?"))
    assert shared(one, other) == len(document) // BLOCK == len(one.marks) - 1


def test_marks_of_a_prompt_cover_its_complete_blocks() -> None:
    letters = "abcdefghij" * 300
    one, other = read(prompt=letters + "x"), read(prompt=letters + "y")
    assert shared(one, other) == len(one.marks) == len(letters) // BLOCK
    assert one.size == len(letters) + 3  # includes the quotes of its JSON
    assert read(input_prefix=letters).marks == one.marks
    assert read(prompt=list(range(1000))).marks


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b'{"messages":5}',
        b'{"messages":[]}',
        b'{"messages":[{"role":"user","content":null}]}',
        b'{"input":["two","texts to embed"]}',
        b'{"prompt":"less than a block"}',
        b'{"prompt":null}',
        b'{"query":"q","documents":["d"]}',
        b'{"messages":' + b"[" * 100_000,
    ],
)
def test_short_or_unknown_prompt_is_no_conversation(body: bytes) -> None:
    assert read_conversation(body) is None


def test_first_and_last_of_many_marks_are_kept() -> None:
    messages = [{"role": "user", "content": f"message {number}"} for number in range(1000)]
    before, after = chat(*messages), chat(*messages, ANSWER, SECOND)
    assert len(before.marks) == FIRST_MARKS + LAST_MARKS
    assert before.marks[:FIRST_MARKS] == after.marks[:FIRST_MARKS]
    assert before.marks[-1] in after.marks
    assert before.sizes[-1] == before.size


def test_marks_of_a_body_are_unique() -> None:
    marks = chat(*[FIRST] * 100).marks
    assert len(set(marks)) == 100


def test_body_with_too_many_objects_is_not_read() -> None:
    """An object takes more memory than the three bytes with which a client sends it."""

    def messages(count: int) -> bytes:
        return b'{"messages":[{"content":"llama"}' + b",{}" * (count - 2) + b"]}"

    assert read_conversation(messages(MAX_OBJECTS)) is not None
    assert read_conversation(messages(MAX_OBJECTS + 1)) is None
