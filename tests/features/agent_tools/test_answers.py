"""The calls of an answer, whole and as a stream in any pieces, as the client gets them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.features.agent_tools import answers
from llamasup.features.agent_tools.answers import Events, InputText, input_of, whole
from llamasup.features.agent_tools.tools import Tool
from tests.features.agent_tools.agents import FLAT, PATCH, call, events, fields, read, streamed

NAMES = {
    FLAT: Tool("get_weather", "mcp__weather"),
    "apply_patch": Tool("apply_patch", "", is_custom=True),
    "n__say": Tool("say", "n", is_custom=True),
}
CALLS = [
    call(FLAT, fields({"city": "Paris"}), "1"),
    call("apply_patch", fields({"input": PATCH}), "2"),
    call("plain", '{"apply_patch": "function_call"}', "3"),
]
STREAM = streamed(events(*CALLS))


def translated(stream: bytes, cuts: list[int] | None = None) -> bytes:
    found, at, reader = b"", 0, Events(NAMES)
    for cut in [*sorted(cuts or []), len(stream)]:
        found += reader.add(stream[at:cut])
        at = cut
    return found + reader.rest()


def test_whole_answer_has_the_calls_of_the_client() -> None:
    answer = {"id": "r", "output": [{"type": "message", "content": []}, *CALLS], "usage": {"total_tokens": 1}}
    found = json.loads(whole(json.dumps(answer).encode(), NAMES))
    text, weather, patch, plain = found["output"]
    assert weather == call("get_weather", CALLS[0]["arguments"], "1", namespace="mcp__weather")
    assert patch["type"] == "custom_tool_call"
    assert (patch["name"], patch["input"], patch["call_id"]) == ("apply_patch", PATCH, "call_2")
    assert "arguments" not in patch
    assert (text, plain) == (answer["output"][0], CALLS[2])  # type: ignore[index]
    assert found["usage"] == {"total_tokens": 1}


@pytest.mark.parametrize(
    "body", [b"", b"function_call", b'{"output": 1, "a": "function_call"}', b'{"output": ["function_call"]}']
)
def test_other_answers_pass_unchanged(body: bytes) -> None:
    assert whole(body, NAMES) == body
    assert translated(body + b"\n\n") == body + b"\n\n"


def test_streamed_call_of_a_namespace_has_its_namespace() -> None:
    found = read(translated(streamed(events(CALLS[0]))))
    items = [event["item"] for event in found if "item" in event]
    assert [(item["name"], item["namespace"]) for item in items] == [("get_weather", "mcp__weather")] * 2
    deltas = [event["delta"] for event in found if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == CALLS[0]["arguments"]
    assert found[-1]["response"]["output"] == [items[1]]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_streamed_call_of_a_custom_tool_has_its_input(step: int) -> None:
    found = read(translated(streamed(events(call("n__say", fields({"input": PATCH})), step=step))))
    assert {event["type"] for event in found if "function_call" in event["type"]} == set()
    deltas = [event for event in found if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(event["delta"] for event in deltas) == PATCH
    assert {event["item_id"] for event in deltas} == {"fc_1"}
    *_, done, item, completed = found
    assert done == {"type": "response.custom_tool_call_input.done", "input": PATCH, "item_id": "fc_1"}
    assert item["item"]["input"] == PATCH
    assert item["item"]["namespace"] == "n"
    assert completed["response"]["output"] == [item["item"]]


def test_end_of_arguments_of_a_newer_build_is_the_end_of_the_input() -> None:
    sent = events(CALLS[1])
    end = {"type": "response.function_call_arguments.done", "item_id": "fc_2", "arguments": "{}"}
    sent.insert(-2, end)
    kinds = [event["type"] for event in read(translated(streamed(sent)))]
    assert kinds.count("response.custom_tool_call_input.done") == 1
    assert end["type"] not in kinds
    sent = events(CALLS[0])
    sent.insert(-2, {**end, "item_id": "fc_1", "name": FLAT})
    (found,) = [event for event in read(translated(streamed(sent))) if event["type"] == end["type"]]
    assert found["name"] == "get_weather"


def test_end_of_the_input_has_the_place_of_its_item_and_needs_no_id() -> None:
    (item,) = [event for event in events(CALLS[1]) if event["type"] == "response.output_item.done"]
    without_id = {name: value for name, value in item["item"].items() if name != "id"}
    done, _ = read(translated(streamed([{**item, "item": without_id, "output_index": 3}])))
    assert done == {"type": "response.custom_tool_call_input.done", "input": PATCH, "output_index": 3}


def test_line_feed_of_a_model_beside_an_escape_is_read() -> None:
    assert InputText().add('{"input": "a\n\\tb') == "a\n\tb"  # JSON has no line feed in a string


@given(st.lists(st.integers(0, len(STREAM))))
def test_pieces_of_a_stream_make_no_difference(cuts: list[int]) -> None:
    assert translated(STREAM, cuts) == translated(STREAM)


def test_stream_in_single_bytes_is_the_same() -> None:
    assert translated(STREAM, list(range(len(STREAM)))) == translated(STREAM)


@given(st.integers(0, len(STREAM)))
def test_cut_stream_is_a_beginning_of_the_whole_one(size: int) -> None:
    whole_stream, reader = translated(STREAM), Events(NAMES)
    assert whole_stream.startswith(reader.add(STREAM[:size]))


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 9), st.booleans())
def test_input_is_read_while_it_arrives(text: str, step: int, ascii_only: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    reader = InputText()
    read_text = "".join(reader.add(arguments[at : at + step]) for at in range(0, len(arguments), step))
    assert read_text == text
    assert input_of(arguments) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a"}', "a"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"patch": 1}', '{"patch": 1}'),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ("*** Begin Patch", "*** Begin Patch"),
        ('{"input": "cut', '{"input": "cut'),
        ("{}", "{}"),
        ("", ""),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_input_of_odd_arguments(arguments: str, text: str) -> None:
    assert input_of(arguments) == text


@pytest.mark.parametrize("arguments", ['{"patch": "a"}', "free text", "", '{"input": 1}'])
def test_odd_arguments_have_no_deltas(arguments: str) -> None:
    reader = InputText()
    assert "".join(map(reader.add, arguments)) == ""


@pytest.mark.parametrize(
    "block",
    [
        b": function_call",
        b"event: x\ndata: function_call",
        b'data: {"type":"response.output_item.added","item":"function_call"}',
        b'data: {"type":"response.function_call_arguments.delta","item_id":"unknown","delta":"x"}',
        b'event: error\ndata: {"type":"error","error":{"message":"function_call"}}',
        b'data: {"type":"response.completed","response":{"output":["function_call"]}}',
        b'data: {"response":{"output":[{"type":"function_call","name":"apply_patch"}]}}',
        b'data: {"type":1,"function_call":[' + b"[" * 5000,
        b'data: {"function_call":1}\ndata: {"function_call":2}',
    ],
)
def test_odd_events_pass_unchanged(block: bytes) -> None:
    assert translated(block + b"\n\n") == block + b"\n\n"


def test_event_that_is_too_large_passes_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_HELD", 100)
    sent = STREAM + b"data: " + b"x" * 200
    cuts: list[Any] = [len(STREAM)]
    assert translated(sent, cuts) == translated(STREAM) + sent[len(STREAM) :]


WORDS = st.sampled_from(
    ["type", "item", "id", "name", "arguments", "delta", "item_id", "response", "output", "fc_1"]
)
_KINDS = """
    function_call apply_patch response.output_item.added response.output_item.done response.completed
    response.function_call_arguments.delta response.function_call_arguments.done
"""
KINDS = st.sampled_from([*_KINDS.split(), FLAT])
VALUES = st.recursive(
    WORDS | KINDS | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(WORDS, VALUES) | st.fixed_dictionaries({"type": KINDS, "item": VALUES})))
def test_any_events_are_read(sent: list[dict[str, Any]]) -> None:
    stream = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in sent)
    found = translated(stream)
    assert found == b"" or found.endswith(b"\n\n")
    whole(json.dumps({"output": sent}).encode(), NAMES)
