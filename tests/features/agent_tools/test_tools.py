"""The tools and the conversation of a request, as llama-server gets them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.features.agent_tools.tools import MAX_NAME, Tool, flat_name, rewritten
from tests.features.agent_tools.agents import APPLY_PATCH, FLAT, PATCH, WEATHER, call, function

Object = dict[str, Any]


def changed(**body: Any) -> Object:
    found = rewritten(json.dumps(body).encode())
    assert found.body is not None
    result: Object = json.loads(found.body)
    return result


def namespace(name: Any, *tools: Any) -> Object:
    return {"type": "namespace", "name": name, "tools": list(tools)}


def names_of(*tools: Any) -> dict[str, Tool]:
    return rewritten(json.dumps({"input": "hi", "tools": tools}).encode()).names


def test_tools_of_a_namespace_become_functions_in_its_place() -> None:
    body = changed(model="m", input="hi", tools=[function("a"), WEATHER, function("b")], store=False)
    (tool,) = WEATHER["tools"]
    assert body["tools"] == [function("a"), {**tool, "name": FLAT}, function("b")]
    assert (body["model"], body["input"], body["store"]) == ("m", "hi", False)
    assert names_of(WEATHER) == {FLAT: Tool("get_weather", "mcp__weather")}


def test_custom_tool_becomes_a_function_with_one_argument_and_its_grammar() -> None:
    (tool,) = changed(input="hi", tools=[APPLY_PATCH])["tools"]
    assert (tool["type"], tool["name"]) == ("function", "apply_patch")
    assert tool["parameters"]["required"] == ["input"]
    assert tool["description"].startswith("Edit files.\n\n")
    assert tool["description"].endswith("matches this grammar (lark):\nstart: /.+/")
    assert names_of(APPLY_PATCH) == {"apply_patch": Tool("apply_patch", "", is_custom=True)}


def test_custom_tool_without_a_grammar_says_only_where_its_input_goes() -> None:
    (tool,) = changed(input="hi", tools=[{"type": "custom", "name": "say", "format": {"type": "text"}}])[
        "tools"
    ]
    assert tool["description"].startswith("Put the complete input")


@pytest.mark.parametrize(
    ("tool", "flat"),
    [
        (Tool("a", "n"), "n__a"),
        (Tool("a", "n__"), "n__a"),
        (Tool("a", "mcp__n"), "mcp__n__a"),
        (Tool("a.b", "n"), "n__a_b_f2a31b4f"),
        (Tool("é", "☃"), "_____ea24dc58"),
    ],
)
def test_name_of_a_function_has_plain_letters(tool: Tool, flat: str) -> None:
    assert flat_name(tool) == flat


def test_long_names_stay_different_and_the_same_in_each_request() -> None:
    one, other = Tool("x" * 100 + "1", "n"), Tool("x" * 100 + "2", "n")
    assert len(flat_name(one)) == MAX_NAME
    assert flat_name(one) == flat_name(one) != flat_name(other)


def test_functions_with_the_same_name_stay_different() -> None:
    names = names_of(
        function(FLAT),
        WEATHER,
        namespace("mcp__weather__", function("get_weather")),
        namespace("other", function("get_weather")),
        function("apply_patch"),
        APPLY_PATCH,
    )
    assert sorted((each.namespace, each.name) for each in names.values()) == [
        ("", "apply_patch"),
        ("mcp__weather", "get_weather"),
        ("mcp__weather__", "get_weather"),
        ("other", "get_weather"),
    ]
    assert not {FLAT, "apply_patch"} & names.keys()
    assert "other__get_weather" in names


def test_white_space_makes_no_difference() -> None:
    body = {"input": [], "tools": [WEATHER, APPLY_PATCH]}
    spaced = rewritten(json.dumps(body, indent=3).encode())
    assert spaced.names == names_of(WEATHER, APPLY_PATCH)
    assert spaced.body is not None
    assert json.loads(spaced.body) == changed(**body)


def test_tool_that_comes_twice_becomes_one_function() -> None:
    assert len(changed(input="hi", tools=[WEATHER, WEATHER, APPLY_PATCH, APPLY_PATCH])["tools"]) == 2


def test_conversation_has_the_calls_of_functions() -> None:
    answer = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "Done."}
    items = [
        {"role": "user", "content": "hi"},
        {"type": "custom_tool_call", "id": "c", "call_id": "call_1", "name": "apply_patch", "input": PATCH},
        answer,
        call("get_weather", "{}", namespace="mcp__weather"),
        call("gone", "{}", namespace="mcp__gone"),
        call("plain", "{}"),
    ]
    found = changed(input=items, tools=[WEATHER, APPLY_PATCH])["input"]
    assert (found[0], found[5]) == (items[0], items[5])
    assert (found[1]["type"], found[1]["name"]) == ("function_call", "apply_patch")
    assert json.loads(found[1]["arguments"]) == {"input": PATCH}
    assert "input" not in found[1]
    assert found[2] == {**answer, "type": "function_call_output"}
    assert found[3] == call(FLAT, "{}")
    assert found[4] == call("mcp__gone__gone", "{}")


@pytest.mark.parametrize(
    ("choice", "tool"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "get_weather", "namespace": "mcp__weather"}, FLAT),
        ({"type": "function", "name": "get_weather"}, FLAT),
        ({"type": "function", "name": "plain"}, None),
        ({"type": "function", "name": "get_weather", "namespace": "other"}, None),
        ({"type": "mcp", "name": "get_weather"}, None),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, None),
        ("auto", None),
    ],
)
def test_chosen_tool_is_the_only_one_and_required(choice: Any, tool: str | None) -> None:
    tools = [function("plain"), WEATHER, APPLY_PATCH]
    body = changed(input="hi", tools=tools, tool_choice=choice)
    names = [each["name"] for each in body["tools"]]
    if tool is None:
        assert (names, body["tool_choice"]) == (["plain", FLAT, "apply_patch"], choice)
    else:
        assert (names, body["tool_choice"]) == ([tool], "required")


@pytest.mark.parametrize(
    ("items", "instructions", "merged"),
    [
        (
            [("developer", "a"), ("developer", "b"), ("user", "c")],
            None,
            [("developer", "a\n\nb"), ("user", "c")],
        ),
        ([("developer", "a"), ("system", "b")], None, [("developer", "a\n\nb")]),
        ([("developer", "a"), ("user", "c")], "i", [("user", "c")]),
    ],
)
def test_instructions_at_the_beginning_become_one_message(
    items: list[tuple[str, str]], instructions: str | None, merged: list[tuple[str, str]]
) -> None:
    asked = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": said}]}
        for role, said in items
    ]
    more = {"instructions": instructions} if instructions else {}
    body = changed(input=asked, **more)
    found = []
    for item in body["input"]:
        content = item["content"]
        found.append((item["role"], content if isinstance(content, str) else content[0]["text"]))
    assert found == merged
    assert body.get("instructions") == (f"{instructions}\n\na" if instructions else None)


def message(role: str, content: Any) -> Object:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no JSON",
        b"[1]",
        b'{"tools": 1}',
        b'{"tools": [1, null, "custom"]}',
        b'{"tools":[{"type":"custom","name":"\\ud800"}]}',
        b'{"tools":[{"type":"custom","name":"a"}]',
        b'{"input":' + b"[" * 100_000,
        b'{"tools":[' + b'{"type":"custom","name":"a"},' * 20_001 + b"{}]}",
        b'{"tools":[{"type":"custom","name":"a"}],"input":[' + b"[]," * 500_001 + b"{}]}",
        *(
            json.dumps(body).encode()
            for body in (
                {"input": "hi", "tools": [function("a")]},
                {"input": "hi", "tools": [{"type": "custom"}, {"type": "custom", "name": 1}]},
                {"input": "hi", "tools": [{"type": "namespace", "tools": [function("a")]}]},
                {"input": "hi", "tools": [{"type": "namespace", "name": "n", "tools": {}}]},
                {"input": "hi", "tools": [namespace("n", 1, {"type": "web_search"}, {"type": "function"})]},
                {"input": [call("a", "{}"), 1, {"type": "function_call_output", "output": "tool_call"}]},
                {"input": [message("developer", "a"), message("user", "b"), message("system", "c")]},
                {"input": [message("system", [{"type": "input_image"}]), message("system", "a")]},
                {"input": [message("user", "a"), message("system", "b"), message("system", "c")]},
            )
        ),
    ],
    ids=lambda body: body[:60],
)
def test_other_requests_stay_as_they_are(body: bytes) -> None:
    assert rewritten(body).body is None


def test_ignored_tools_are_named_once_and_only_by_plain_words() -> None:
    tools = [
        {"type": "web_search"},
        {"type": "mcp", "name": "a"},
        {"type": "web_search"},
        {"type": "x\r\nSet-Cookie: a=b"},
        {"name": "no type"},
        namespace("n", {"type": "computer_use"}),
        *({"type": f"more_{number}"} for number in range(9)),
    ]
    found = rewritten(json.dumps({"input": "hi", "tools": tools}).encode())
    assert found.body is None
    assert found.ignored[:4] == ("web_search", "mcp", "other", "computer_use")
    assert len(found.ignored) == 8


_WORDS = """
    type name namespace custom function tools input function_call custom_tool_call custom_tool_call_output
    tool_choice role system developer content format grammar instructions input_text arguments text a é☃
"""
WORDS = st.sampled_from([*_WORDS.split(), "", "x" * 70])
VALUES = st.recursive(
    WORDS | st.none() | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=20,
)
TYPED = st.fixed_dictionaries(
    {"type": WORDS | VALUES},
    optional=dict.fromkeys(("name", "namespace", "tools", "input", "format"), VALUES),
)


@given(st.fixed_dictionaries({"tools": st.lists(TYPED) | VALUES, "input": st.lists(TYPED) | VALUES}))
def test_any_request_gets_other_functions_or_stays(body: Object) -> None:
    found = rewritten(json.dumps(body).encode())
    if found.body is None:
        return
    again = rewritten(found.body)
    assert again.names == {}
    if isinstance(body["tools"], list):
        tools = json.loads(found.body)["tools"]
        names = [
            tool.get("name") for tool in tools if isinstance(tool, dict) and tool.get("type") == "function"
        ]
        assert all(names.count(name) == 1 for name in found.names)
